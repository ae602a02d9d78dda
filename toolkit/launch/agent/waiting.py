"""Finds the files that a process's threads wait for, whatever language they are written in. Linux only; see proc(5)."""

import contextlib
import os
import platform
import re

__all__ = ["files"]

# Numbers of read and pread64, whose first argument is a descriptor, and of openat, whose second is a path, of Linux's
# arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
_CALLS = {"x86_64": ((0, 17), 257), "aarch64": ((63, 67), 56)}
_LONGEST = 4096  # The most bytes of a path.
_NO_FILES = re.compile(r"/(dev|proc|sys)/")


def files(process: int) -> list[str]:
    """Returns the paths of files that threads of a process are about to open or to read."""
    reading, opening = _CALLS.get(platform.machine(), ((), -1))
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{process}/task/{thread}/syscall", encoding="ascii") as file:
                    number, *arguments = file.read().split()
                if number == "running":
                    continue
                if int(number) in reading:
                    found.add(os.readlink(f"/proc/{process}/fd/{int(arguments[0], 16)}"))
                elif int(number) == opening:
                    named = _text(process, int(arguments[1], 16))
                    found.add(os.path.join(os.readlink(f"/proc/{process}/cwd"), named))
    return sorted(path for path in found if path.startswith("/") and not _NO_FILES.match(path))


def _text(process: int, address: int) -> str:
    """Returns the text at an address of a process's memory."""
    with open(f"/proc/{process}/mem", "rb", buffering=0) as file:
        file.seek(address)
        return file.read(_LONGEST).partition(b"\0")[0].decode(errors="replace")
