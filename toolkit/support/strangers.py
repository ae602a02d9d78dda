"""Connections that haven't proved themselves yet: a bounded number, each for a bounded time.

Any program that reaches a listening port may connect, stay silent, and connect again. It must use up neither the
descriptors of a job nor its time, and leave room for those that belong to the job.
"""

import collections
import contextlib
import errno
import socket
import sys
import time

_MOST = 256
_AT_ONCE = 32  # The most that are accepted in one call: a flood takes some milliseconds of it.
_MOMENT = 1.0  # Seconds that all get, however many wait.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Strangers:
    """The connections to listening sockets that haven't proved themselves.

    Args:
        within: Seconds in all in which one must prove itself, whatever it sends meanwhile.
    """

    def __init__(self, *, within: float) -> None:
        self._within = within
        self._known: dict[socket.socket, tuple[str, float]] = {}  # The address, and until when.
        self.most = max(1, min(_MOST, _descriptors() // 8))

    def accept(self, listener: socket.socket) -> list[tuple[socket.socket, str]]:
        """Returns new connections, which don't block, and their addresses.

        Where there are too many, those of the address that has most of them are overdue at once; others wait in the
        system's queue.
        """
        found = []
        for _ in range(min(_AT_ONCE, self.most)):
            if len(self._known) >= self.most and not self._make_room():
                break
            try:
                connection, (peer, *_) = listener.accept()
                connection.setblocking(False)
            except ConnectionAbortedError:  # It has hung up meanwhile.
                continue
            except OSError as error:  # Mostly because nobody waits. What else it may be goes by, or the job sees it.
                if error.errno in _EXHAUSTED:
                    self._make_room()
                break
            self._known[connection] = peer, time.monotonic() + self._within
            found.append((connection, peer))
        return found

    def overdue(self) -> list[socket.socket]:
        """Returns the connections that have had their time; their owner closes them."""
        now = time.monotonic()
        return [connection for connection, (_, until) in self._known.items() if until <= now]

    def forget(self, connection: socket.socket) -> None:
        """Called when one has proved itself, and before it is closed."""
        self._known.pop(connection, None)

    def _make_room(self) -> bool:
        """Makes one overdue: the oldest one of the address that has most. Returns whether there was one to take."""
        now = time.monotonic()
        waiting = {each: told for each, told in self._known.items() if told[1] > now}
        counts = collections.Counter(peer for peer, _ in waiting.values())
        for peer, count in counts.most_common(1):
            oldest = next(each for each, (theirs, _) in waiting.items() if theirs == peer)
            age = self._within - (waiting[oldest][1] - now)
            if age > _MOMENT or count > self.most // 8:
                self._known[oldest] = peer, now
                return True
        return False


def _descriptors() -> int:
    """Returns how many descriptors this process may have."""
    with contextlib.suppress(ImportError, ValueError):
        import resource  # Not on Windows.

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return sys.maxsize if limit == resource.RLIM_INFINITY else limit
    return 8 * _MOST
