"""The summary that a run writes when it ends, with the origin of its figures."""

import collections
import contextlib
import json
import logging
import math
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from toolkit import __version__, devices, strategies
from toolkit.errors import ToolkitError
from toolkit.strategies.upstream.attributes import layers_within
from toolkit.support import files, goodput, redaction, status
from toolkit.support.history import is_own
from toolkit.support.versions import versions
from toolkit.support.words import counted
from toolkit.training import state

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger(__name__)
_VERSIONS = ("tensorflow", "keras", "tensorflow-datasets", "numpy")
# Variables that change how a script trains, and those of them that a launcher sets for each task.
# Terraform's begin with TF_, too, and may be secrets.
_SETTINGS = (
    *("CUDA_VISIBLE_DEVICES", "KERAS_", "NCCL_", "OMP_NUM_THREADS", "TFDS_DATA_DIR", "XLA_FLAGS", "TF_CONFIG"),
    *("TF_CPP_", "TF_CUDNN_", "TF_DETERMINISTIC_", "TF_ENABLE_", "TF_FORCE_", "TF_GPU_", "TF_NUM_", "TF_XLA_FLAGS"),
)
_LAUNCHERS_OWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TF_CONFIG", "TF_NUM_INTRAOP_THREADS")


class Summary:
    """The summary of a run, to which `add` adds facts, and what is written when the run ends.

    Args:
        directory: Where it is written; that of a process that isn't chief writes nothing.
        facts: What is known when the run begins.
        described: Is given the summary, and returns what is to be written.

    Attributes:
        facts: What the summary says beside figures.
        summary: What summary.json holds, once it is written.
        resumed_step: The step of the checkpoint that the run goes on from; None for a new run.
        complete: Whether that checkpoint was the end of the training.
    """

    def __init__(self, directory: Any, facts: Mapping[str, Any], *, described: Callable[[dict], dict]) -> None:
        self.facts = dict(facts)
        self.summary: dict[str, Any] = {}
        self.resumed_step: int | None = None
        self.complete = False
        self._directory, self._described = directory, described
        self._start = time.monotonic()

    def add(self, facts: Mapping[str, Any]) -> None:
        """Adds facts, also to a summary that has been written already."""
        self.facts.update(facts)
        if self.summary:
            self._write({**self.summary, **facts})

    def write(self, outcome: str, model: Any, progress: Any, *, steps: int | None = None) -> None:
        """Writes summary.json.

        Args:
            outcome: Its "status".
            model: What was trained.
            progress: The `Progress` of its training.
            steps: Steps up to the checkpoint of an interrupted run; None where the last epoch's row has them.

        Raises:
            OSError: It can't be written.
        """
        facts = {**self.facts, "status": outcome, "resumed_from_step": self.resumed_step}
        found = _summary(facts, model, progress, seconds=time.monotonic() - self._start, steps=steps)
        self._write(found)

    def finish(self, model: "keras.Model", progress: Any) -> None:
        """Writes the model and the summary. A run that was already complete keeps its figures, as of now.

        Raises:
            ToolkitError: They can't be written.
        """
        weights = self.facts["weights_sha256"] = state.digest(model)
        with state.chief_reads(model):
            self._finish(model, progress, weights)

    def _finish(self, model: "keras.Model", progress: Any, weights: str) -> None:
        earlier = _read(self._directory) if self.complete else {}
        if earlier.get("weights_sha256") == weights:
            self.summary = earlier
            with contextlib.suppress(OSError):
                os.utime(self._directory.summary)  # An evaluator sees by it that this job's run has ended, too.
            return
        try:
            with progress.account.during("saving"):
                self._directory.write_model(model)
            self.write("completed", model, progress)
        except OSError as error:
            raise ToolkitError(
                f"Training is done, but its results can't be written to {self._directory.path} "
                f"({error.strerror or error}). The last checkpoint is kept: free some space or mend the disk, then "
                "resume."
            ) from error
        _LOG.info("%s", _last_line(self.summary, self._directory.path))

    def _write(self, found: dict[str, Any]) -> None:
        self.summary = self._described(found)
        self._directory.write_summary(self.summary)


def _provenance() -> dict[str, Any]:
    """Returns what the figures depend on: versions, command line and variables without secrets, the launcher's logs."""
    command, logs = _command(), status.logs()
    settings = {
        name: os.environ[name]
        for name in sorted(os.environ)
        if name.startswith(_SETTINGS) and (logs is None or not name.startswith(_LAUNCHERS_OWN))
    }
    return {
        "versions": {"toolkit": __version__, "python": platform.python_version(), **versions(_VERSIONS)},
        "command": redaction.masked_command(command, os.environ),
        "environment": redaction.masked_all(settings, os.environ),
        "launch_logs": logs,
    }


def _size(model: Any) -> dict[str, Any]:
    """Returns how many weights a model has, of how many sharded layers, its optimizer and the dtypes it computes in."""
    import keras

    weights = getattr(model, "weights", [])
    layers = layers_within(model) if isinstance(model, keras.Model) else ()
    sharded = sum(type(layer).__name__.startswith("Sharded") for layer in layers)
    return {
        "parameters": sum(math.prod(weight.shape) for weight in weights),
        "sharded_layers": sharded,
        "optimizer": type(optimizer).__name__ if (optimizer := getattr(model, "optimizer", None)) else None,
        "dtype_policy": getattr(getattr(model, "dtype_policy", None), "name", None),
    }


def _hardware() -> str:
    """Returns this machine's hardware: "2 x NVIDIA H100", or "4 cores of AMD EPYC, x86_64, 16 GB"."""
    there = devices.inventory.take()
    cores = counted(there.cores, "core")
    names = collections.Counter(gpu.name for gpu in there.gpus)
    if names:
        return ", ".join(f"{number} x {name}" for name, number in names.items())
    return f"{cores}{_processor()}, {platform.machine()}, {_memory() / 1e9:.0f} GB"


def _processor() -> str:
    """Returns " of" and the processor's name, as Linux reports it; "" elsewhere."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((f" of {line.partition(':')[2].strip()}" for line in lines if line.startswith("model name")), "")


def _memory() -> int:
    """Returns the bytes of memory of this machine."""
    import psutil

    return psutil.virtual_memory().total


def _summary(
    facts: Mapping[str, Any], model: Any, progress: Any, *, seconds: float, steps: int | None
) -> dict[str, Any]:
    """Returns the content of summary.json: each metric of the last epoch by Keras's name, and the facts of all runs.

    Args:
        facts: What is known beside the figures.
        model: What was trained.
        progress: The `Progress` of its training.
        seconds: Of the whole run.
        steps: Steps up to the checkpoint of an interrupted run; None where the last epoch's row has them.
    """
    last = progress.rows[-1] if progress.rows else {}
    # A resumed run may have had too few steps left to measure; then its last whole epoch counts.
    rates = [row["examples_per_second"] for row in progress.rows if row.get("examples_per_second")]
    rate = progress.examples_per_second or (rates or [None])[-1]
    provenance, spent, report = _provenance(), goodput.summary(progress.account.whole), strategies.report(model)
    found = {
        **facts,
        **{name: value for name, value in last.items() if not is_own(name)},
        "global_batch_size": facts.get("global_batch_size") or progress.global_batch_size,
        "epochs": len(progress.rows),
        "steps": max(last.get("step", 0), steps or 0),
        "examples_per_second": round(rate, 1) if rate else None,
        "measured_steps": progress.measured_steps,
        "peak_memory": progress.peak_memory,
        "wall_seconds": round(seconds, 3),
        **provenance,
        **_size(model),
        "hardware": _hardware(),
        "step": progress.breakdown,
        "goodput": spent,
    }
    if not (found["sharded_layers"] or found.get("weights") == "sharded"):
        found.pop("mesh", None)  # Nothing lies on it: each replica has all of the model.
    if report:
        found["parameter_servers"] = report
    return found


def _read(directory: Any) -> dict[str, Any]:
    """Returns a run directory's summary.json; {} if there is none, or it can't be read."""
    try:
        found = json.loads(files.read_text(directory.summary))
    except (AttributeError, OSError, ValueError):  # A NullRunDirectory has no such attribute.
        return {}
    return found if isinstance(found, dict) else {}


def _command() -> list[str]:
    """Returns the command line without what the launcher put before the user's."""
    arguments = sys.orig_argv
    launched = [number for number, part in enumerate(arguments) if part.endswith("/toolkit/launch/task/child.py")]
    return [arguments[0], *arguments[launched[0] + 3 :]] if launched else arguments


def _last_line(summary: Mapping[str, Any], directory: object) -> str:
    """Returns the last line that a completed run prints."""
    parts = [counted(summary["epochs"], "epoch"), counted(summary["steps"], "step")]
    if summary.get("val_accuracy") is not None:
        parts.append(f"test accuracy {summary['val_accuracy']:.2%}")
    else:
        parts += [f"{name} {summary[name]:.4f}" for name in ("val_loss", "loss") if summary.get(name) is not None][:1]
    if summary["examples_per_second"]:
        parts.append(f"{summary['examples_per_second']:,.0f} examples/s")
    parts.append(f"SHA-256 of the weights {summary['weights_sha256'][:16]}")
    return f"Done: {', '.join(parts)}, {summary['wall_seconds']:.0f} s. Everything is in {directory}"
