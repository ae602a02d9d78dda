"""A network namespace for the tasks of this machine: nobody else reaches the servers that they open.

TensorFlow's servers listen on every interface, whatever address they are given, and obey whoever connects. In a
namespace of their own, which has nothing but loopback, that is the tasks themselves and nobody else; nor do they
reach anybody. See network_namespaces(7) and user_namespaces(7).
"""

import contextlib
import ctypes
import fcntl
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

from toolkit.errors import LaunchError
from toolkit.launch.job.spec import JobSpec

__all__ = ["enter", "wanted_out"]

_NO_WAY = re.compile(
    r"Network is unreachable|Temporary failure in name resolution|Name or service not known|[Cc]ould not resolve host"
    r"|NameResolutionError|No address associated with hostname"
)
_UVM = "/dev/nvidia-uvm"
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>.
_CONNECTED = 3.0  # Seconds that a way out may take to be there.
_NEWUSER, _NEWNET = 0x10000000, 0x40000000  # <linux/sched.h>
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # <linux/sockios.h>, <net/if.h>


def enter(spec: JobSpec) -> str:
    """Moves this process, and all that it will start, into a network namespace of its own, if that is asked for.

    Returns:
        A clause for the launcher's first message, which may be "".

    Raises:
        LaunchError: It can't be done.
    """
    if spec.isolate == "no":
        return ""
    asked = f"--isolate={spec.isolate} gives the tasks a network of their own"
    reason = f"{_UVM} isn't there yet, and only outside can it be made" if _waits_for_a_device() else _impossible()
    if reason:
        raise LaunchError(
            asked=asked,
            found=f"this system doesn't allow it ({reason})",
            remedy="Launch without it behind a firewall, or have user namespaces allowed",
        )
    way_out = None if spec.isolate == "fully" else _way_out()
    _move()
    if way_out is not None and way_out():
        return "in a network of their own, closed to others"
    why = "install slirp4netns to have them" if way_out is None else "setting them up failed"
    return "in a network of their own without connections to other machines" + (
        f" ({why})" if spec.isolate == "yes" else ""
    )


def _waits_for_a_device() -> bool:
    """CUDA makes its device files by a program that runs as root, which it can't in a user's namespace.

    See nvidia-modprobe(1).
    """
    return os.geteuid() != 0 and os.path.exists("/proc/driver/nvidia/version") and not os.path.exists(_UVM)


def wanted_out(message: str) -> bool:
    """Returns whether the last lines of a failed task read as if it wanted to reach another machine."""
    return _NO_WAY.search(message) is not None


def _way_out() -> Callable[[], bool] | None:
    """Starts a process outside that will connect this one's new network; returns what has it do so, None without one.

    See pasta(1) and slirp4netns(1): user-mode networks, in which nobody outside opens a connection. It ends with this
    process.
    """
    me = str(os.getpid())
    shut = ["--tcp-ports=none", "--udp-ports=none", "--tcp-ns=none", "--udp-ns=none"]
    commands = {
        "pasta": ["--foreground", "--quiet", "--config-net", "--no-map-gw", *shut, me],
        "slirp4netns": ["--configure", "--mtu=65520", "--disable-host-loopback", me, "tap0"],
    }
    if os.geteuid() == 0:  # Who drops root's rights to a network that root has made, as pasta does, can't join it.
        del commands["pasta"]
    name = next((name for name in commands if shutil.which(name)), None)
    if name is None:
        return None
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(writing)
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        os.read(reading, 1)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        try:
            os.execvp(name, [name, *commands[name]])
        finally:
            os._exit(1)
    os.close(reading)

    def connect() -> bool:
        os.write(writing, b".")
        os.close(writing)
        deadline = time.monotonic() + _CONNECTED
        while time.monotonic() < deadline:
            if len(pathlib.Path("/proc/net/route").read_text().splitlines()) > 1:
                return True
            time.sleep(0.02)
        return False

    return connect


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
