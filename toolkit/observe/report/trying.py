"""Parts of a page, each of which may fail on its own: a damaged file costs a picture, and not the page."""

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["tried"]

T = TypeVar("T")


def tried(notes: list[str], otherwise: T, make: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Returns what `make` does, or `otherwise` with a note where the run's files hold what can't be.

    Args:
        notes: Is given a sentence without its full stop.
        otherwise: In its place.
        make: Makes a part.
        args: Its own.
        kwargs: The same.
    """
    try:
        return make(*args, **kwargs)
    except Exception as error:  # Files that somebody has edited can hold anything.
        notes.append(f"A part of this page is missing: a file of the run can't be understood ({type(error).__name__})")
        return otherwise
