"""A task's output: unchanged into its log file, and as whole lines with a prefix to the display."""

import collections
import contextlib
import pathlib
import sys
import time
from collections.abc import Sequence

from toolkit.support import files

__all__ = ["Output", "say", "visible_lines"]

_LONGEST = 16 << 10  # The most bytes of a line; a longer one is shown in pieces.
# Seconds until an incomplete line is shown, and a line that overwrites itself, such as a progress bar.
_PARTIAL, _BAR = 1.0, 10.0
_KEPT = 200  # How many last lines a message about a failure has.


class Output:
    """Takes bytes as they arrive.

    Args:
        log: The task's log file.

    Attributes:
        log: The same.
        fault: What is to be said of a log that can't be written, once; "" for nothing.
        ended: Whether nothing more will come.
    """

    def __init__(self, log: pathlib.Path | str) -> None:
        self.log = pathlib.Path(log)
        self.ended = False
        self._last: collections.deque[bytes] = collections.deque(maxlen=_KEPT)
        with files.guarded():
            # The user may have deleted the log between two attempts.
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(log, "ab", buffering=0)  # noqa: SIM115 - closed in close().
        self._rest = b""
        self._failed, self.fault = False, ""
        self._came = 0.0

    def take(self, data: bytes) -> list[bytes]:
        """Writes to the log, and returns the lines that are now complete, without line ends."""
        self.write(data)
        self._came = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            self._rest = _visible(self._rest)
        if len(self._rest) > _LONGEST:
            lines.append(self._rest)
            self._rest = b""
        shown = visible_lines(lines)
        self._last.extend(shown[-_KEPT:])
        return shown

    def flush(self, *, late: bool = False) -> list[bytes]:
        """Returns the beginning of an incomplete line.

        Args:
            late: Only if it has been there for a while, a progress bar for longer.
        """
        patience = _BAR if b"\r" in self._rest else _PARTIAL
        if not self._rest.strip() or (late and time.monotonic() - self._came < patience):
            return []
        rest, self._rest = self._rest, b""
        lines = [line for line in map(_visible, rest.split(b"\n")) if line.strip()]
        self._last.extend(lines)
        return lines

    def last_lines(self) -> list[str]:
        """Returns the last lines as text, each of at most 500 characters."""
        return [line.decode(errors="replace")[:500] for line in self._last]

    def write(self, data: bytes) -> None:
        """Appends to the log. If the disk is full, the log is lost but the job goes on."""
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            if not self._failed:
                self.fault = f"note: {self.log} can't be written any more ({error.strerror or error}); the job goes on"
            self._failed = True

    def close(self) -> None:
        """Closes the log."""
        with contextlib.suppress(OSError):
            self._file.close()


def say(message: str) -> None:
    """Shows a message of the launcher before there is a display."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout is not None:  # Standard error may be closed.
            sys.stdout.write(f"{message}\n")
            sys.stdout.flush()


def visible_lines(lines: Sequence[bytes]) -> list[bytes]:
    """Returns what a terminal shows of whole lines, long ones in pieces.

    Blank lines stay, empty ends of progress bars don't.
    """
    return [piece for line in lines for piece in _pieces(_visible(line)) if piece.strip() or not line]


def _visible(line: bytes) -> bytes:
    """Returns what a terminal shows of a line: progress bars go back and overwrite themselves."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].replace(b"\b", b"")


def _pieces(line: bytes) -> list[bytes]:
    return [line[start : start + _LONGEST] for start in range(0, len(line), _LONGEST)] or [line]
