"""A task's output: into its log file as it is, and as whole, prefixed lines to whoever watches."""

import collections
import contextlib
import logging
import os
import pathlib

from toolkit.launch.masking import Masker
from toolkit.support import umask

__all__ = ["Output"]

_LOG = logging.getLogger(__name__)
_LONGEST = 16 << 10  # Bytes of a line; a longer one is shown in pieces.
_PARTIAL, _BAR = 1.0, 10.0  # Seconds until a line without an end is shown, and one that is written over.
_KEPT = 200  # Last lines, for the message about a failure.


class Output:
    """Takes bytes as they come.

    Args:
        descriptor: The reading end of the task's pipe; non-blocking, and closed with this object.
        log: The task's log file.
        masker: Takes out what is in neither log nor lines to be read.
    """

    def __init__(self, descriptor: int, log: pathlib.Path, masker: Masker | None = None) -> None:
        self.descriptor = descriptor
        self.log = log
        self.last: collections.deque[bytes] = collections.deque(maxlen=_KEPT)
        self.ended = False
        with umask.guarded():
            self._file = open(log, "ab", buffering=0)  # noqa: SIM115 - closed in close().
        self._masker = masker or Masker()
        self._rest = b""
        self._failed = False

    def read(self) -> list[bytes]:
        """Returns the whole lines that have come, without their ends, after writing it to the log."""
        try:
            data = os.read(self.descriptor, 1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.ended = True
            return self.flush()
        data = self._masker.feed(data)
        self.write(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            self._rest = _visible(self._rest)
        if len(self._rest) > _LONGEST:
            lines.append(self._rest)
            self._rest = b""
        lines = [piece for line in lines for piece in _pieces(_visible(line)) if piece.strip()]
        self.last.extend(lines[-_KEPT:])
        return lines

    def flush(self, *, held: bool = True) -> list[bytes]:
        """Returns what has come of a line that hasn't ended.

        Args:
            held: Also what is held back, as it may be the beginning of a secret.
        """
        end = self._masker.flush() if held else b""
        if end:
            self.write(end)
        rest, self._rest = self._rest + end, b""
        lines = [line for line in map(_visible, rest.split(b"\n")) if line.strip()]
        self.last.extend(lines)
        return lines

    def last_lines(self) -> list[str]:
        """Returns the last lines that have come, as text, each of at most 500 characters."""
        return [line.decode(errors="replace")[:500] for line in self.last]

    @property
    def patience(self) -> float | None:
        """Seconds until what has come of a line should be shown; None if nothing has."""
        if not self._rest.strip() and not self._masker.holds:
            return None
        return _BAR if b"\r" in self._rest else _PARTIAL

    def write(self, data: bytes) -> None:
        """Appends to the log. A full disk costs the log, not the job."""
        try:
            self._file.write(data)
        except OSError as error:
            if not self._failed:
                _LOG.error("%s can't be written any more (%s); the job goes on", self.log, error.strerror or error)
            self._failed = True

    def close(self) -> None:
        """Closes pipe and log."""
        for close in (lambda: os.close(self.descriptor), self._file.close):
            with contextlib.suppress(OSError):
                close()


def _visible(line: bytes) -> bytes:
    """Returns what a terminal shows of a line: a progress bar goes back and writes over itself."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].replace(b"\b", b"")


def _pieces(line: bytes) -> list[bytes]:
    return [line[start : start + _LONGEST] for start in range(0, len(line), _LONGEST)] or [line]
