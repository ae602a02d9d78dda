"""Files and directories that not everybody may write, whatever the umask says."""

import contextlib
import os
from collections.abc import Iterator

__all__ = ["guarded"]

_EVERYBODY = 0o002  # Write permission of who is neither the owner nor in the group.


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Keeps what the process makes in the block from being writable for everybody; never looser than the umask.

    A process has one umask: it holds for files that libraries make, and for all threads.
    """
    before = os.umask(0o077)  # It can't be read without being set; tight, for other threads.
    os.umask(before | _EVERYBODY)
    try:
        yield
    finally:
        os.umask(before)
