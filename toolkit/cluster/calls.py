"""Sockets with which tasks call one another."""

import os
import socket
import time

from toolkit.cluster.addresses import is_loopback, split
from toolkit.cluster.spec import Task
from toolkit.errors import ClusterError

__all__ = ["Call", "Guest", "ask", "listen", "ports_are_shared", "reason"]


class Call:
    """An attempt to reach a peer; raises OSError where that fails at once."""

    def __init__(self, task: Task, address: str) -> None:
        host, port = split(address)
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.task = task
        self.greeted = False
        self.text = b""
        self.socket = socket.socket(family, kind, protocol)
        self.socket.setblocking(False)
        self._until = time.monotonic() + 5
        code = self.socket.connect_ex(where)
        if code not in (0, 115, 36, 10035):  # EINPROGRESS on Linux, macOS, Windows.
            self.socket.close()
            raise OSError(code, os.strerror(code))

    def late(self, now: float) -> bool:
        return now > self._until


class Guest:
    """Somebody who calls."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.text = b""


def ask(address: str, greeting: bytes) -> bytes:
    """Returns what is answered to a greeting, one line; nothing where nobody does."""
    try:
        with socket.create_connection(split(address), timeout=2) as connection:
            connection.sendall(greeting)
            return connection.makefile("rb").readline(1 << 16)
    except OSError:
        return b""


def listen(address: str, me: Task) -> list[socket.socket]:
    """Returns sockets that listen on a task's port, IPv4 and, where there is any, IPv6.

    Raises:
        ClusterError: The port can't be had.
    """
    host, port = split(address)
    # TensorFlow will listen on every interface; there is no need to begin with that for a local job.
    places = (
        [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
        if is_loopback(host)
        else [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
    )
    listeners: list[socket.socket] = []
    for family, place in places:
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # No IPv6 on this machine.
            continue
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if ports_are_shared():
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((place, port))
            listener.listen(min(4096, socket.SOMAXCONN))
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            if family == socket.AF_INET6:
                continue
            for other in listeners:
                other.close()
            raise ClusterError(
                asked=f"{me} is to listen on port {port}, as the cluster says",
                found=f"that port can't be had here ({error.strerror})",
                remedy=f"End the program that listens on port {port} (ss -ltnp names it), or choose another port",
            ) from error
        listeners.append(listener)
    return listeners


def ports_are_shared() -> bool:
    """Whether a launcher holds the ports for its tasks, so that several processes can have the same one."""
    return bool(os.environ.get("TF_GRPC_REUSE_PORT"))


def reason(error: OSError) -> str:
    """Returns why a call failed, in words."""
    if isinstance(error, socket.gaierror):
        return "its name has no address"
    return (error.strerror or str(error)).lower()
