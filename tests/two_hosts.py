"""Two network namespaces as two hosts: each its own addresses, no loopback between them."""

import contextlib
import json
import os
import subprocess
import sys

import processes
import pytest

ADDRESSES = ("10.177.0.1", "10.177.0.2")
_NOBODY = "02:00:00:00:00:99"  # A link-layer address that no interface has: what is sent there is lost without a word.


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=True)


@contextlib.contextmanager
def made():
    """The names of two namespaces that reach each other; skips the test where they can't be made."""
    names = [f"tk{os.getpid()}{letter}" for letter in "ab"]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("link", "set", name, "netns", name)
                ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
                ip("-n", name, "link", "set", name, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"network namespaces can't be made here: {getattr(error, 'stderr', '') or error}")
        yield names


def part(names):
    """Cuts the two off from each other, silently: nothing is refused."""
    for name, peer in zip(names, reversed(ADDRESSES), strict=True):
        ip("-n", name, "neigh", "replace", peer, "lladdr", _NOBODY, "nud", "permanent", "dev", name)


def heal(names):
    for name, peer in zip(names, reversed(ADDRESSES), strict=True):
        ip("-n", name, "neigh", "del", peer, "dev", name)


def start(name, folder, *command):
    """Starts a module in a namespace; its output is piped."""
    return subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-m", *command],
        env={
            **{key: value for key, value in os.environ.items() if "proxy" not in key.lower()},
            "PYTHONPATH": str(processes.ROOT),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    )


def finish(running, limit):
    """What each wrote, when all have ended."""
    try:
        return [process.communicate(timeout=limit)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()


def cluster_in(folder):
    """The flag that names a file with the two as a cluster."""
    file = folder / "two_hosts.json"
    file.write_text(json.dumps({"cluster": {"worker": [f"{host}:2222" for host in ADDRESSES]}}))
    return f"--cluster={file}"
