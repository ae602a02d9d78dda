"""What a run's summary says beside its figures, and the last line about it."""

import platform
import sys
from importlib import metadata
from typing import Any

from toolkit import __version__

__all__ = ["closing", "command", "versions"]

_VERSIONS = ("tensorflow", "keras", "tensorflow-datasets", "numpy")


def versions() -> dict[str, str]:
    """Returns the versions of what the run's figures depend on."""
    return {
        "toolkit": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _VERSIONS},
    }


def command() -> list[str]:
    """Returns the command line without what the launcher put before the user's."""
    arguments = sys.orig_argv
    if "toolkit.launch.child" not in arguments:
        return arguments
    return [arguments[0], *arguments[arguments.index("toolkit.launch.child") + 3 :]]


def closing(summary: dict[str, Any], directory: object) -> str:
    """Returns the line that a completed run ends with."""
    parts = [f"{summary['epochs']} epochs, {summary['steps']} steps"]
    if summary["test_accuracy"] is not None:
        parts.append(f"test accuracy {summary['test_accuracy']:.2%}")
    if summary["images_per_second"]:
        parts.append(f"{summary['images_per_second']:,.0f} images/s")
    parts.append(f"weights {summary['weights_sha256'][:16]}")
    return f"Done: {', '.join(parts)}, {summary['wall_seconds']:.0f} s. Everything is in {directory}"
