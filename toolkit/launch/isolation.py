"""A network namespace for the tasks of this machine: nobody else reaches the servers that they open.

TensorFlow's servers listen on every interface, whatever address they are given, and obey whoever connects. In a
namespace of their own, which has nothing but loopback, that is the tasks themselves and nobody else; nor do they
reach anybody. See network_namespaces(7) and user_namespaces(7).
"""

import contextlib
import ctypes
import fcntl
import os
import re
import socket
import struct
import sys
from collections.abc import Sequence

from toolkit.errors import LaunchError

__all__ = ["MODES", "enter", "wanted_out"]

MODES = ("auto", "always", "never")

_NO_WAY = re.compile(
    r"Network is unreachable|Temporary failure in name resolution|Name or service not known|[Cc]ould not resolve host"
    r"|NameResolutionError|No address associated with hostname"
)
_UVM = "/dev/nvidia-uvm"
_NEWUSER, _NEWNET = 0x10000000, 0x40000000  # <linux/sched.h>
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # <linux/sockios.h>, <net/if.h>


def enter(mode: str, *, command: Sequence[str]) -> tuple[bool, str]:
    """Moves this process, and all that it will start, into a network namespace of its own, where that is wanted.

    Args:
        mode: "always"; "never"; or "auto": where the system allows it, and no argument names an address elsewhere.
        command: What the tasks run.

    Returns:
        Whether it was done; and a clause for the launcher's first message, which may be "".

    Raises:
        LaunchError: It is to be done always, and can't be.
    """
    if mode not in MODES:
        raise LaunchError(
            asked=f"--isolate={mode}", found="there is no such choice", remedy=f"Choose {', '.join(MODES)}"
        )
    if mode == "never":
        return False, ""
    url = next((argument for argument in command if "://" in argument), None)
    if mode == "auto" and url is not None:
        return False, f"in this machine's network, because {url[:80]} may be elsewhere"
    if mode == "auto" and os.geteuid() and _waits_for_a_device():
        return False, f"in this machine's network, because {_UVM} isn't there yet, and only outside can it be made"
    reason = _impossible()
    if reason and mode == "always":
        raise LaunchError(
            asked="--isolate=always gives the tasks a network of their own",
            found=f"this system doesn't allow it ({reason})",
            remedy="Launch with --isolate=never behind a firewall, or have user namespaces allowed",
        )
    if reason:
        return False, f"in this machine's network, because one of their own isn't possible here ({reason})"
    _move()
    return True, "in a network of their own without a way out (--isolate=never: this machine's)"


def _waits_for_a_device() -> bool:
    """CUDA makes its device files by a program that runs as root, which it can't in a user's namespace.

    See nvidia-modprobe(1).
    """
    return os.path.exists("/proc/driver/nvidia/version") and not os.path.exists(_UVM)


def wanted_out(message: str) -> bool:
    """Returns whether the last lines of a failed task read as if it wanted to reach another machine."""
    return _NO_WAY.search(message) is not None


def _impossible() -> str:
    """Tries it in a child, because there is no way back; returns why it fails, "" if it doesn't."""
    if not sys.platform.startswith("linux"):
        return "it takes Linux"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        reason = ""
        try:
            _move()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
        finally:
            with contextlib.suppress(OSError):
                os.write(writing, reason.encode())
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as answer:
        reason = answer.read()
    os.waitpid(child, 0)
    return reason


def _move() -> None:
    user, group = os.geteuid(), os.getegid()
    try:
        _unshare(_NEWNET)  # As root, or in a container that may.
    except OSError:
        _unshare(_NEWUSER | _NEWNET)
        # The same ids inside as outside. Groups beyond the first stay, and can't be changed.
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "wb", buffering=0) as file:
                file.write(text.encode())
    _bring_loopback_up()


def _unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _GET_FLAGS, asked))[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
