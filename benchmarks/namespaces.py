"""Network namespaces as hosts that are joined by a link of a given rate; Linux, as root."""

import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["HOSTS", "measured_on", "process_on", "received", "two_hosts"]

HOSTS = ("10.178.0.1", "10.178.0.2")

_SAME_FOR_ALL = {
    # On processors without AVX512 TensorFlow leaves oneDNN out, which PyTorch computes by everywhere.
    "TF_ENABLE_ONEDNN_OPTS": "1",
    # The C library keeps what a step has freed for the next one, where it may give it back to the system and have it
    # zeroed again: up to 10,000 page faults in a step, a tenth of its time, in some processes and not in others.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


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
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)))
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


def measured_on(names: tuple[str, str], module: str, arguments: Sequence[str], *, port: int, limit: float) -> dict:
    """Runs a module on both hosts, with --rank, --addresses and --out besides; each writes its figures as JSON.

    Returns:
        The means of both processes' numbers; of what else they wrote, the first one's.

    Raises:
        SystemExit: One of them failed: with the last lines of what it said.
        subprocess.TimeoutExpired: One of them took more than `limit` seconds.
    """
    addresses = ",".join(f"{host}:{port}" for host in HOSTS)
    with tempfile.TemporaryDirectory() as folder:
        outs = [pathlib.Path(folder, f"{rank}.json") for rank in (0, 1)]
        with contextlib.ExitStack() as stack:
            running = []
            for rank, (name, out) in enumerate(zip(names, outs, strict=True)):
                own = [f"--rank={rank}", f"--addresses={addresses}", f"--out={out}"]
                process = process_on(name, [module, *arguments, *own], None, GLOO_SOCKET_IFNAME=name)
                running.append(stack.enter_context(process))
            for process in running:
                said = process.communicate(timeout=limit)[0]
                if process.returncode:
                    raise SystemExit(f"{module} {' '.join(arguments)} failed:\n{said[-3000:]}")
        first, second = (json.loads(out.read_text()) for out in outs)
    return {
        key: statistics.mean((value, second[key])) if isinstance(value, int | float) else value
        for key, value in first.items()
    }


def process_on(name: str, module: Sequence[str], folder: str | None, **environ: str) -> subprocess.Popen:
    """Starts a module on a host; as a context, it is ended with it.

    Args:
        name: The host's.
        module: Its name and arguments.
        folder: The working directory; None for this process's.
        environ: More of its environment.

    Returns:
        The process; its input is a pipe, and what it says, on both streams, another.
    """
    kept = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    paths = {"PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    return _Ended(
        ["ip", "netns", "exec", name, sys.executable, "-m", *module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**_SAME_FOR_ALL, **kept, **paths, "TF_CPP_MIN_LOG_LEVEL": "3", **environ},
    )


class _Ended(subprocess.Popen):
    """Is killed at the end of its context."""

    def __exit__(self, *error: Any) -> None:
        self.kill()
        super().__exit__(*error)


def received() -> int:
    """Bytes received on all interfaces but loopback."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[0]) for line in lines if not line.strip().startswith("lo:"))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)
