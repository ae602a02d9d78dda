"""The phase that a task is in, which its agent can read at any moment: also while the task can't answer.

Both have a small file in memory. A report would come too late, or not at all: steps are reported once in a while, and a
task that hangs in native code may hold Python's interpreter lock. To enter a phase costs some microseconds.
"""

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from typing import Any

from toolkit.support import status

__all__ = ["KINDS", "enter", "forget", "in_phase", "path", "read"]

# What ends by itself, so that the next of its kind can be expected to. "" is everything else, such as callbacks.
KINDS = ("", "first step of an epoch", "step", "first step of a validation", "validation step", "saving")
_LAYOUT = struct.Struct(
    f"<IBd{len(KINDS)}d"
)  # The process, the phase, since when, and the longest of each kind so far.


class _Writer:
    """The file of this task. A process that isn't the first to open it writes nothing."""

    def __init__(self, file: str) -> None:
        self._process = os.getpid()
        self._kind, self._since = 0, time.monotonic()
        self._longest = [0.0] * len(KINDS)
        with open(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as made:
            made.truncate(_LAYOUT.size)
            self._memory = mmap.mmap(made.fileno(), _LAYOUT.size)

    def enter(self, kind: str) -> None:
        if os.getpid() != self._process:  # A fork.
            return
        now = time.monotonic()
        self._longest[self._kind] = max(self._longest[self._kind], now - self._since)
        self._kind, self._since = KINDS.index(kind), now
        _LAYOUT.pack_into(self._memory, 0, self._process, self._kind, self._since, *self._longest)

    def forget(self) -> None:
        self._kind, self._longest = 0, [0.0] * len(KINDS)
        self.enter("")


_writer: _Writer | None = None
_tried = False


def _opened() -> _Writer | None:
    global _writer, _tried
    if not _tried:
        _tried = True
        task, _, socket = os.environ.get(status.SOCKET, "").partition("@")
        with contextlib.suppress(OSError):  # No launcher listens, or another process of this task was first.
            _writer = _Writer(path(socket, task)) if socket else None
    return _writer


def path(socket: str, task: str) -> str:
    """Returns the path of a task's file, beside the socket that tasks report to."""
    return f"{socket}.{task}.phase"


def enter(kind: str) -> None:
    """Notes that this process is in a phase from now on: one of `KINDS`."""
    if (writer := _opened()) is not None:
        writer.enter(kind)


def forget() -> None:
    """Forgets how long phases took: another training begins, whose steps may take longer."""
    if (writer := _opened()) is not None:
        writer.forget()


@contextlib.contextmanager
def in_phase(kind: str) -> Iterator[None]:
    """Marks a block as a phase."""
    enter(kind)
    try:
        yield
    finally:
        enter("")


def read(file: str) -> dict[str, Any] | None:
    """Returns what a task has written: its process, its phase, for how many seconds, and the longest of each kind.

    Args:
        file: Its path.

    Returns:
        None if the task has no phases.
    """
    try:
        with open(file, "rb") as found:
            process, kind, since, *longest = _LAYOUT.unpack(found.read(_LAYOUT.size))
    except (OSError, struct.error):
        return None
    known = {name: seconds for name, seconds in zip(KINDS, longest, strict=True) if name and seconds}
    return {"pid": process, "kind": KINDS[kind], "seconds": max(0.0, time.monotonic() - since), "longest": known}
