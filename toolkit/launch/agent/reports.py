"""Receives what tasks report to their launcher. `toolkit.support.status` is the tasks' side."""

import contextlib
import functools
import json
import os
import selectors
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Any

__all__ = ["Reports"]

_LONGEST = 1 << 16  # The most bytes in a report.
_WAITING = 1024  # The most connections that may wait to be accepted.


class Reports:
    """A Unix socket that tasks connect to. Reports arrive whole and in order, and none is lost while this object lives.

    Args:
        selector: Its keys hold functions, which are called when there is something to read.
        take: Is given each report.

    Attributes:
        scratch: A new directory for it and for what else goes with the job.
        path: Where the socket is.
    """

    def __init__(self, selector: selectors.BaseSelector, take: Callable[[dict[str, Any]], None]) -> None:
        self._selector = selector
        self._take = take
        # A Unix socket's path may have about 100 characters, so a temporary directory with a longer path isn't used.
        short = "/tmp" if len(tempfile.gettempdir()) > 60 and sys.platform != "win32" else None
        self._directory = tempfile.TemporaryDirectory(prefix="toolkit-", dir=short, ignore_cleanup_errors=True)
        self.scratch = self._directory.name
        self.path = os.path.join(self.scratch, "status")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(_WAITING)
        self._listener.setblocking(False)
        self._connections: set[socket.socket] = set()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def hang_up(self) -> None:
        """Closes the connections of tasks that have ended."""
        for connection in self._connections:
            self._selector.unregister(connection)
            connection.close()
        self._connections = set()

    def close(self) -> None:
        """Closes all connections and removes the directory."""
        self.hang_up()
        self._selector.unregister(self._listener)
        self._listener.close()
        self._directory.cleanup()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._connections.add(connection)
            self._selector.register(connection, selectors.EVENT_READ, functools.partial(self._read, connection))

    def _read(self, connection: socket.socket) -> None:
        """Reads all data of one connection."""
        try:
            while message := connection.recv(_LONGEST):
                with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):  # Not from a task.
                    self._take(json.loads(message))
        except BlockingIOError:
            return
        except ConnectionError:
            pass
        self._selector.unregister(connection)
        self._connections.discard(connection)
        connection.close()
