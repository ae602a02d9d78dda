"""Whether hosts see the same directory: a file of the job's own lies in it while they are being called."""

import contextlib
import pathlib

__all__ = ["forget", "shared"]


def shared(mark: str, *, make: bool) -> bool:
    """Returns whether this directory is the first host's own.

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
    """Removes the file; without a mark there is none."""
    with contextlib.suppress(OSError):
        if mark:
            _file(mark).unlink()


def _file(mark: str) -> pathlib.Path:
    return pathlib.Path(f".toolkit-{mark}")
