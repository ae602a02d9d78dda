"""Describes what a task runs, so that tasks can compare their programs before they train together."""

import hashlib
import json
import pathlib
import platform
import re
from collections.abc import Sequence

from toolkit import __version__

__all__ = ["describe_program", "remedy"]

# They name the task, or a place on its host, and may differ.
_OWN = {"cluster", "data_dir", "gpus", "host", "index", "job", "job_name", "log_dir", "port", "rank", "run_dir"}
_OWN |= {"task", "task_id", "task_index", "task_type", "type", "visible_devices", "worker_id"}
# Versions are compared, not the names of distributions.
_PACKAGES = {"TensorFlow": ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu"), "Keras": ("keras",)}
_JOBS, _VERSIONS = "jobs", " versions"


def describe_program(script: str | None, arguments: Sequence[str] | None, *, job: str | None = None) -> dict[str, str]:
    """Returns what all tasks must share: words that complete "their ... differ" -> this task's value.

    Args:
        script: Path of the program; None where there is none, as in an interactive session.
        arguments: The command line without the program; None where tasks may have flags, and a
            text of the script, of their own: many a worker's script has its index written in it.
        job: What all tasks of this job share and no other job's do; None where that isn't known.
    """
    described = _versions()
    if job is not None:
        described[_JOBS] = job
    if script is not None:
        # Some tutorials have a script for each worker, with the worker's index in its name.
        described["scripts' names"] = re.sub(r"\d+", "", pathlib.Path(script).name)
    if arguments is not None:
        described["flags"] = json.dumps(sorted(_shared(arguments)))[1:-1]
        try:
            if script is not None:
                described["scripts"] = hashlib.sha256(pathlib.Path(script).read_bytes()).hexdigest()[:12]
        except OSError:
            pass
    return described


def remedy(differing: str) -> str:
    """Returns the remedy for a difference, named by its key in `describe_program`."""
    if differing == _JOBS:
        return "End what is left of earlier jobs"
    if differing.endswith(_VERSIONS):
        return "Install the same versions for every task"
    return "Start every task with the same script and flags"


def _versions() -> dict[str, str]:
    import importlib.metadata  # Takes a quarter of an agent's start, and agents don't need it.

    found = {"Python": ".".join(platform.python_version_tuple()[:2]), "toolkit": __version__}
    for name, packages in _PACKAGES.items():
        for package in packages:
            try:
                # The part after a + names the builder.
                found[name] = importlib.metadata.version(package).partition("+")[0]
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return {f"{name}{_VERSIONS}": version for name, version in found.items()}


def _shared(arguments: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        name, given, _ = argument.lstrip("-").partition("=")
        if argument.startswith("-"):
            skip = name in _OWN and not given  # A flag whose value follows.
            if name not in _OWN:
                kept.append(argument)
        elif not skip:
            kept.append(argument)
        else:
            skip = False
    return kept
