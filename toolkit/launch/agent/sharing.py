"""Finds out whether hosts share a directory, by a file that the job writes there while it calls them."""

import contextlib
import pathlib

__all__ = ["forget", "shared"]


def shared(mark: str, *, make: bool) -> bool:
    """Returns whether this directory is the same one that the first host sees.

    Args:
        mark: The job's own.
        make: Whether this is the first host.
    """
    with contextlib.suppress(OSError):
        if make:
            _file(mark).touch()
        return _file(mark).exists()
    return False


def forget(mark: str) -> None:
    """Removes the file, if there is one."""
    with contextlib.suppress(OSError):
        if mark:
            _file(mark).unlink()


def _file(mark: str) -> pathlib.Path:
    return pathlib.Path(f".toolkit-{mark}")
