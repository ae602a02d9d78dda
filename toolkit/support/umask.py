"""Files and directories that not everybody may write, whatever the umask says."""

import contextlib
import os
import threading
from collections.abc import Iterator

__all__ = ["guarded"]

_EVERYBODY = 0o002  # Write permission of who is neither the owner nor in the group.
_lock = threading.Lock()
_entered: list[int] = []  # For each block that some thread is in, the umask from before the first.


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Keeps what the process makes in the block from being writable for everybody; never looser than the umask.

    A process has one umask: it holds for files that libraries make, and for all threads. The last thread that leaves
    such a block puts back what the first has found.
    """
    with _lock:
        before = _entered[0] if _entered else os.umask(0o077)  # It can't be read without being set; tight, meanwhile.
        _entered.append(before)
        os.umask(before | _EVERYBODY)
    try:
        yield
    finally:
        with _lock:
            _entered.pop()
            if not _entered:
                os.umask(before)
