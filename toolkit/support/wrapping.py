"""A function of somebody else's, wrapped once."""

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["wrap"]


def wrap(owner: Any, name: str, around: Callable) -> None:
    """Replaces `owner.name` by `around(original, ...)`, for the whole process; a second time changes nothing.

    Args:
        owner: A class or a module.
        name: The name of its method or function.
        around: Takes the original function, then its arguments.
    """
    original = getattr(owner, name)
    if getattr(original, "_toolkit", False):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapped._toolkit = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
