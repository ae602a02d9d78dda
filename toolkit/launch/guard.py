"""Ends what a launcher has left behind; run as a program of its own, with nothing but the standard library.

    python -I -S guard.py MARK SCRATCH

It waits for its standard input to end, which it does when the launcher ends in whatever way, kill -9
included. Then it kills the process groups that it was told of, one number a line, and every process
of this user that has TOOLKIT_JOB=MARK in its environment: tasks, and whatever they started; and it
removes the directory SCRATCH, unless a line says that the launcher, which still lives, will do so.
"""

import contextlib
import os
import shutil
import signal
import sys
import time

__all__ = ["KEEP", "VARIABLE", "marked"]

VARIABLE = "TOOLKIT_JOB"
KEEP = b"keep"


def marked(mark: str) -> list[int]:
    """Returns the ids of this user's processes with the mark in the environment that they started with."""
    wanted = f"{VARIABLE}={mark}".encode()
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if wanted in file.read().split(b"\0"):
                found.append(int(name))
    return found


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    mark, scratch = sys.argv[1:]
    lines = [line.strip() for line in sys.stdin.buffer]
    groups = [int(line) for line in lines if line.isdigit()]
    for group in groups:
        with contextlib.suppress(OSError):
            if os.getpgid(group) == group:  # The leader is still there, so the number is still its own.
                os.killpg(group, signal.SIGKILL)
    for _ in range(100):  # A process may start another while it is looked for.
        left = marked(mark)
        if not left:
            break
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    if KEEP not in lines:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    _main()
