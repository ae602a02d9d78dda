"""Reserves ports from their choice until the job ends, and finds out which machines can reach them.

A port that is found free and let go can be taken by another program before TensorFlow binds it. So
the launcher keeps each one bound, without listening, and TensorFlow shares it: Linux lets sockets of
one user share a port when all of them set SO_REUSEPORT, and connections go to the one that listens.
"""

import ipaddress
import socket
from collections.abc import Mapping, Sequence

from toolkit.errors import ClusterError, LaunchError

ENVIRONMENT: Mapping[str, str] = {"TF_GRPC_REUSE_PORT": "1"}  # TensorFlow's servers set SO_REUSEPORT, too.
_NAMED = 4  # The most tasks and addresses that a message names.


class HeldPorts:
    """Reserves ports until it is closed."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    @property
    def numbers(self) -> set[int]:
        """The reserved ports."""
        return {held.getsockname()[1] for held in self._sockets}

    def __enter__(self) -> "HeldPorts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def free(self) -> int:
        """Reserves a free port and returns it.

        Raises:
            LaunchError: There is none.
        """
        try:
            held = _socket()
            self._sockets.append(held)
            held.bind(("0.0.0.0", 0))
        except OSError as error:
            raise LaunchError(
                asked=f"{len(self._sockets)} tasks or more listen on a port each",
                found=f"this machine has no more to give ({(error.strerror or str(error)).lower()})",
                remedy="Start fewer, or raise the limit that `ulimit -n` shows",
            ) from error
        return held.getsockname()[1]

    def given(self, port: int, *, task: str) -> None:
        """Reserves a port that the cluster names; one that is reserved already stays so.

        Args:
            port: Its number, from 1 to 65535.
            task: The task that will listen there, for the message.

        Raises:
            ClusterError: Somebody uses it.
        """
        if port in self.numbers:
            return
        held = _socket()
        try:
            with socket.socket() as probe:  # Without SO_REUSEPORT, so that another job's reserved ports count as taken.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("0.0.0.0", port))
            held.bind(("0.0.0.0", port))
        except OSError as error:
            held.close()
            reason = (error.strerror or str(error)).lower() + _holder(port)
            raise ClusterError(
                asked=f"{task} is to listen on port {port}",
                found=f"that port can't be had on this machine ({reason})",
                remedy="End the program that uses it, or give the task another port",
            ) from error
        self._sockets.append(held)

    def close(self) -> None:
        """Releases all ports."""
        while self._sockets:
            self._sockets.pop().close()


def _socket() -> socket.socket:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return held


def _holder(port: int) -> str:
    """Names the program that listens on a port, if this user may see it."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f"; process {connection.pid}, {psutil.Process(connection.pid).name()}, has it"
    except psutil.Error:
        pass
    return ""


def open_ports(processes: Mapping[str, int]) -> tuple[list[str], list[str]] | None:
    """Returns which ports other machines can reach, and at which addresses; None if none can be reached.

    Args:
        processes: The process id of each task, whose servers listen by now.

    Returns:
        Such as ["worker:0's port 2222"] and ["10.0.0.7"].
    """
    import psutil

    addresses = [
        entry.address.partition("%")[0]
        for each in psutil.net_if_addrs().values()
        for entry in each
        if entry.family.name in ("AF_INET", "AF_INET6")
    ]
    outside = [address for address in addresses if not _stays(address)]
    if not outside:
        return None
    found = []
    for task, process in processes.items():
        try:
            sockets = psutil.Process(process).net_connections("tcp")
        except psutil.Error:
            continue
        ports = {s.laddr.port for s in sockets if s.status == psutil.CONN_LISTEN and not _stays(s.laddr.ip)}
        found += [f"{task}'s port {port}" for port in sorted(ports)]
    return (found, outside) if found else None


def few(names: Sequence[str]) -> str:
    """Returns the first few names of a list, and how many more there are."""
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest


def _stays(address: str) -> bool:
    """Returns whether only this machine can reach an address; 0.0.0.0 means all of a machine's addresses."""
    found = ipaddress.ip_address(address)
    return found.is_loopback or (found.version == 6 and found.is_link_local)
