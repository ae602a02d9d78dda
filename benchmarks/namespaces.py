"""Network namespaces as hosts that are joined by a link of a given rate; Linux, as root."""

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator

__all__ = ["HOSTS", "received", "two_hosts"]

HOSTS = ("10.178.0.1", "10.178.0.2")


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[tuple[str, str]]:
    """Makes two, and removes them.

    Args:
        rate: Of each direction, as `tc` writes it: "1gbit".

    Yields:
        Their names, for `ip netns exec NAME ...`; their addresses are HOSTS.

    Raises:
        subprocess.CalledProcessError: They can't be made here.
    """
    names = (f"bench{os.getpid()}a", f"bench{os.getpid()}b")
    with contextlib.ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        _run("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for name, address in zip(names, HOSTS, strict=True):
            _run("ip", "link", "set", name, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", name)
            for device in (name, "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")
            shaped = ("root", "tbf", "rate", rate, "burst", "256k", "latency", "50ms")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", name, *shaped)
        yield names


def received() -> int:
    """Bytes received on all interfaces but loopback."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[0]) for line in lines if not line.strip().startswith("lo:"))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)
