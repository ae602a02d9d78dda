"""Creates files and directories that aren't writable for everybody, whatever the umask."""

import contextlib
import os
import threading
from collections.abc import Iterator

__all__ = ["guarded"]

_EVERYBODY = 0o002  # Write permission for others than the owner and the group.
_lock = threading.Lock()
_entered: list[int] = []  # For each block that a thread is in, the umask from before the first block.


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Keeps what the process creates in the block from being writable for everybody. Never loosens the umask.

    A process has one umask: it holds for files that libraries make, and for all threads. The last thread that leaves
    such a block puts back what the first has found.
    """
    with _lock:
        # The umask can't be read without being set; it is strict meanwhile.
        before = _entered[0] if _entered else os.umask(0o077)
        _entered.append(before)
        os.umask(before | _EVERYBODY)
    try:
        yield
    finally:
        with _lock:
            _entered.pop()
            if not _entered:
                os.umask(before)
