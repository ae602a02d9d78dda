"""What the tasks' servers are open to, by the listening sockets themselves."""

import ipaddress
from collections.abc import Iterable

from toolkit.launch.running import Running

__all__ = ["exposed"]

_NAMED = 4  # Tasks and addresses in a message.


def exposed(running: Iterable[Running]) -> str:
    """Returns a sentence that says which ports are open to other machines; "" where none is.

    Args:
        running: Tasks whose servers listen by now.
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
        return ""
    found = []
    for task in running:
        try:
            sockets = psutil.Process(task.process.pid).net_connections("tcp")
        except psutil.Error:
            continue
        ports = {s.laddr.port for s in sockets if s.status == psutil.CONN_LISTEN and not _stays(s.laddr.ip)}
        found += [f"{task.task}'s port {port}" for port in sorted(ports)]
    if not found:
        return ""
    return (
        f"note: {_few(found)}: open to whoever reaches this machine at {_few(outside)}; "
        "TensorFlow's servers there take orders from anybody, so close them to others"
    )


def _stays(address: str) -> bool:
    """Whether an address is reached from this machine only. 0.0.0.0 stands for all of a machine's."""
    found = ipaddress.ip_address(address)
    return found.is_loopback or (found.version == 6 and found.is_link_local)


def _few(names: list[str]) -> str:
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest
