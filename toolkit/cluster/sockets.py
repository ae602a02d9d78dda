"""The sockets of a rendezvous: a task listens on its port, connects to its peers, and sends them one line."""

import dataclasses
import errno
import os
import socket
import time

from toolkit.cluster.addresses import is_loopback, split
from toolkit.cluster.spec import Task
from toolkit.errors import ClusterError

__all__ = ["Incoming", "Outgoing", "ask", "listen", "ports_are_shared", "reason"]

_PATIENCE = 5.0  # Seconds in which a peer must answer.


class Outgoing:
    """A connection to a peer, perhaps still being made; raises OSError if that fails at once."""

    def __init__(self, task: Task, address: str) -> None:
        host, port = split(address)
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.task = task
        self.greeted = False
        self.text = b""
        self.socket = socket.socket(family, kind, protocol)
        self.socket.setblocking(False)
        self._until = time.monotonic() + _PATIENCE
        code = self.socket.connect_ex(where)
        if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            self.socket.close()
            raise OSError(code, os.strerror(code))

    def overdue(self, now: float) -> bool:
        """Returns whether the peer's time to answer is over, by the monotonic clock."""
        return now > self._until


@dataclasses.dataclass(eq=False)
class Incoming:
    """A connection to this task, and the bytes received over it."""

    socket: socket.socket
    text: bytes = b""


def ask(address: str, greeting: bytes) -> bytes:
    """Returns the line that answers a greeting; b"" if none arrives."""
    try:
        with socket.create_connection(split(address), timeout=2) as connection:
            connection.sendall(greeting)
            return connection.makefile("rb").readline(1 << 16)
    except OSError:
        return b""


def listen(address: str, own: Task) -> list[socket.socket]:
    """Returns sockets that listen on this task's port, by IPv4 and, if the machine has it, IPv6.

    Raises:
        ClusterError: The port can't be had.
    """
    host, port = split(address)
    # TensorFlow will listen on all interfaces, but for a local job that isn't needed now.
    interfaces = ("127.0.0.1", "::1") if is_loopback(host) else ("0.0.0.0", "::")
    listeners: list[socket.socket] = []
    for family, interface in zip((socket.AF_INET, socket.AF_INET6), interfaces, strict=True):
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
            listener.bind((interface, port))
            listener.listen(min(4096, socket.SOMAXCONN))
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            if family == socket.AF_INET6:
                continue
            raise ClusterError(  # IPv4 comes first: nothing else is open yet.
                asked=f"the cluster says that {own} listens on port {port}",
                found=f"this process can't open that port ({error.strerror})",
                remedy=f"End the program that listens on port {port} (ss -ltnp names it), or choose another port",
            ) from error
        listeners.append(listener)
    return listeners


def ports_are_shared() -> bool:
    """Returns whether a launcher reserves the ports for its tasks, so that several processes may bind the same one."""
    return bool(os.environ.get("TF_GRPC_REUSE_PORT"))


def reason(error: OSError) -> str:
    """Returns in words why a connection failed."""
    if isinstance(error, socket.gaierror):
        return "its name has no address"
    return (error.strerror or str(error)).lower()
