"""What a task runs, in words that tasks can compare before they train together."""

import hashlib
import json
import pathlib
from collections.abc import Sequence

__all__ = ["describe"]

# They say which task this is, or where something lies on its host, and may differ.
_OWN = {"cluster", "data_dir", "gpus", "host", "index", "job", "job_name", "log_dir", "port", "rank", "run_dir"}
_OWN |= {"task", "task_id", "task_index", "task_type", "type", "visible_devices", "worker_id"}


def describe(script: str | None, arguments: Sequence[str]) -> dict[str, str]:
    """Returns the script's SHA-256, shortened, and the flags that all tasks must share.

    Args:
        script: Path of the program; None where there is none, as in an interactive session.
        arguments: Of the command line, without the program.
    """
    described = {"flags": json.dumps(sorted(_shared(arguments)))[1:-1]}
    try:
        if script is not None:
            described["scripts"] = hashlib.sha256(pathlib.Path(script).read_bytes()).hexdigest()[:12]
    except OSError:
        pass
    return described


def _shared(arguments: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        name, given, _ = argument.lstrip("-").partition("=")
        if argument.startswith("-"):
            skip = name in _OWN and not given  # Its value follows.
            if name not in _OWN:
                kept.append(argument)
        elif not skip:
            kept.append(argument)
        else:
            skip = False
    return kept
