"""Exchanges events over a pair of pipes or a socket without ever blocking."""

import os
import threading
import time

from toolkit.launch.events import Event, Reader, line

__all__ = ["Channel"]

_AT_ONCE = 1 << 18  # Bytes read or written in one call.
_BACKLOG = 16 << 20  # When so many bytes wait to be sent, nothing more is read for this connection.


class Channel:
    """Two file descriptors, which the caller owns and closes.

    Args:
        reading: What the other end's events come from.
        writing: Where events go; perhaps the same.

    Attributes:
        ended: Whether the other end has closed it, and all that came is read.
        strange: The last lines that were no events, such as a shell's greeting.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        for descriptor in {reading, writing}:
            os.set_blocking(descriptor, False)
        self._reader = Reader()
        self._rest = bytearray()
        self._heard = time.monotonic()
        self._lock, self._closed = threading.Lock(), False
        self.ended = False

    @property
    def silence(self) -> float:
        """Seconds since its last event."""
        return time.monotonic() - self._heard

    @property
    def full(self) -> bool:
        """Whether so much waits to be sent that the sender should pause."""
        return len(self._rest) > _BACKLOG

    @property
    def strange(self) -> list[str]:
        """The last lines that weren't events."""
        return self._reader.strange

    def fileno(self) -> int:
        """The descriptor from which events are read."""
        return self._reading

    def send(self, *events: Event) -> None:
        """Sends as much as the other end accepts and keeps the rest; nothing to a closed connection. Thread-safe."""
        with self._lock:
            if self._closed:
                return
            for event in events:
                self._rest += line(event)
            try:
                while self._rest:
                    # Deleting from a bytearray's beginning is cheap.
                    del self._rest[: os.write(self._writing, self._rest[:_AT_ONCE])]
            except BlockingIOError:
                pass
            except OSError:  # The reading side notices it.
                self._rest.clear()

    def close(self) -> None:
        """Stops sending: the owner is about to close the descriptors, whose numbers may be used again."""
        with self._lock:
            self._closed = True

    def read(self) -> list[Event]:
        """Returns the events received, and sends more of what is waiting."""
        self.send()
        found = []
        try:
            while piece := os.read(self._reading, _AT_ONCE):
                found += self._reader.events(piece)
            self.ended = True
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        if found:
            self._heard = time.monotonic()
        return found
