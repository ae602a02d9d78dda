"""A function of somebody else's, wrapped once by each of us."""

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["wrap"]


def wrap(owner: Any, name: str, around: Callable) -> None:
    """Replaces `owner.name` by `around(original, ...)`, for the whole process; a second time changes nothing.

    Several may wrap the same one, each around the others.

    Args:
        owner: A class or a module.
        name: The name of its method or function.
        around: Takes the original function, then its arguments.
    """
    original = getattr(owner, name)
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
