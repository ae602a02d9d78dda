"""A function of somebody else's, wrapped once by each of us."""

import functools
import importlib.metadata
import re
from collections.abc import Callable
from typing import Any

from toolkit.errors import RequestError

__all__ = ["TRIED", "installed", "wrap", "wrapped_here"]

TRIED = "Keras 3.12 to 3.15, TensorFlow 2.20 and 2.21"


wrapped_here: list[tuple[Any, str]] = []  # Owners, and names of what was wrapped.


def installed(module: str) -> str:
    """Returns the package of a module, with the version that is installed: "keras 3.15.1"."""
    package = re.split("[.:]", module, maxsplit=1)[0]
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package


def wrap(owner: Any, name: str, around: Callable) -> None:
    """Replaces `owner.name` by `around(original, ...)`, for the whole process; a second time changes nothing.

    Several may wrap the same one, each around the others.

    Args:
        owner: A class or a module.
        name: The name of its method or function.
        around: Takes the original function, then its arguments.

    Raises:
        RequestError: There is no such thing in the Keras or TensorFlow that is installed.
    """
    original = getattr(owner, name, None)
    if not callable(original):
        package = getattr(owner, "__module__", None) or owner.__name__
        raise RequestError(
            asked=f"{getattr(owner, '__qualname__', owner.__name__)}.{name} of {installed(package)} is needed",
            found="that version has none",
            remedy=f"Install a version that this toolkit was tried with: {TRIED}",
        )
    function = getattr(around, "func", around)  # Of a functools.partial.
    key = f"{function.__module__}.{function.__qualname__}"
    wrapped_by: tuple[str, ...] = getattr(original, "_toolkit", ())
    if key in wrapped_by:
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapped._toolkit = (*wrapped_by, key)  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
    wrapped_here.append((owner, name))
