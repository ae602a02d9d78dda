"""What a run's summary says: its figures, where they come from, and the last line about it."""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from toolkit import __version__, strategies
from toolkit.support import files, redaction, status

__all__ = ["figures", "last_line", "of", "provenance", "read"]

_VERSIONS = ("tensorflow", "keras", "tensorflow-datasets", "numpy")
_OF_A_ROW = ("epoch", "step", "learning_rate", "images_per_second", "examples_per_second", "seconds")


def figures(
    rows: Sequence[Mapping[str, Any]], examples_per_second: float | None, *, steps: int | None = None
) -> dict[str, Any]:
    """Returns the figures of a run: each metric of its last epoch by Keras's name, and those that all runs have.

    Args:
        rows: Those of history.csv.
        examples_per_second: Over all replicas; None where it isn't known.
        steps: Steps up to the checkpoint of an interrupted run.
    """
    last = rows[-1] if rows else {}
    rate = round(examples_per_second, 1) if examples_per_second else None
    return {
        **{name: value for name, value in last.items() if name not in _OF_A_ROW},
        "epochs": len(rows),
        "steps": max(last.get("step", 0), steps or 0),
        "train_loss": last.get("loss"),
        "train_accuracy": last.get("accuracy"),
        "test_loss": last.get("val_loss"),
        "test_accuracy": last.get("val_accuracy"),
        "images_per_second": rate,
        "examples_per_second": rate,
    }


def provenance() -> dict[str, Any]:
    """Returns what the figures depend on: versions, the command line without secrets, and its launcher's logs."""
    return {
        "versions": {
            "toolkit": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _VERSIONS},
        },
        "command": redaction.masked_command(_command(), os.environ),
        "launch_logs": status.logs(),
    }


def of(facts: Mapping[str, Any], watching: Any, *, seconds: float, steps: int | None) -> dict[str, Any]:
    """Returns a whole summary.

    Args:
        facts: What is known beside the figures.
        watching: What has watched the training: a `Watching`.
        seconds: Of the whole run.
        steps: Steps up to the checkpoint of an interrupted run; None where the last epoch's row has them.
    """
    found = {
        **facts,
        **figures(watching.rows, watching.examples_per_second, steps=steps),
        "wall_seconds": round(seconds, 3),
        **provenance(),
        "step": watching.breakdown,
    }
    if report := strategies.report(watching.model):
        found["parameter_servers"] = report
    return found


def read(directory: Any) -> dict[str, Any]:
    """Returns what summary.json of a run directory says; {} where there is none, or it can't be read."""
    try:
        found = json.loads(files.read_text(directory.summary))
    except (AttributeError, OSError, ValueError):  # The first: only the chief has a directory.
        return {}
    return found if isinstance(found, dict) else {}


def _command() -> list[str]:
    """Returns the command line without what the launcher put before the user's."""
    arguments = sys.orig_argv
    launched = [number for number, part in enumerate(arguments) if part.endswith("/toolkit/launch/task/child.py")]
    return [arguments[0], *arguments[launched[0] + 3 :]] if launched else arguments


def last_line(summary: Mapping[str, Any], directory: object) -> str:
    """Returns the line that a completed run ends with."""
    parts = [f"{summary['epochs']} epochs, {summary['steps']} steps"]
    if summary["test_accuracy"] is not None:
        parts.append(f"test accuracy {summary['test_accuracy']:.2%}")
    else:
        parts += [f"{name} {summary[name]:.4f}" for name in ("val_loss", "loss") if summary.get(name) is not None][:1]
    if summary["examples_per_second"]:
        parts.append(f"{summary['examples_per_second']:,.0f} examples/s")
    parts.append(f"weights {summary['weights_sha256'][:16]}")
    return f"Done: {', '.join(parts)}, {summary['wall_seconds']:.0f} s. Everything is in {directory}"
