"""Finds programs that tasks started and left running, in any session or process group."""

import contextlib
import os
import shutil
import time

import psutil

from toolkit.support import status

__all__ = ["end", "end_of"]

_ROUNDS = 100  # A process may start another one during the search.


def end_of(scratch: str) -> None:
    """Kills what a killed agent left: its tasks' processes, found by their variables, and its directory."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(status.SOCKET, "").partition("@")[2].startswith(scratch):
                process.kill()
    shutil.rmtree(scratch, ignore_errors=True)


def end(*, but: set[int]) -> list[str]:
    """Kills all processes below this one; returns their names.

    Args:
        but: Process ids of children that somebody else waits for.
    """
    names: dict[int, str] = {}
    for _ in range(_ROUNDS):
        left = [process for process in psutil.Process().children(recursive=True) if process.pid not in but]
        if not left:
            break
        for process in left:
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() != psutil.STATUS_ZOMBIE:
                    names.setdefault(process.pid, process.name())
                    process.kill()
                if process.ppid() == os.getpid():
                    os.waitpid(process.pid, os.WNOHANG)
        time.sleep(0.01)
    return list(names.values())
