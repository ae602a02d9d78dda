"""Two network namespaces as two hosts: each its own addresses, no loopback between them."""

import contextlib
import os
import subprocess

ADDRESSES = ("10.177.0.1", "10.177.0.2")


class Impossible(Exception):
    """Namespaces can't be made here; says why."""


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=True)


@contextlib.contextmanager
def two_hosts():
    """Yields the names of two namespaces that reach each other; each one's network device has its name, too."""
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
            raise Impossible(
                f"network namespaces can't be made here: {getattr(error, 'stderr', '') or error}"
            ) from None
        yield names
