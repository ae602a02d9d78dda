"""What tasks leave behind: programs that they have started and that run on, whatever session or group they are in."""

import contextlib
import os
import shutil
import time

import psutil

from toolkit.support import status

__all__ = ["end", "end_of"]

_ROUNDS = 100  # A process may start another while it is looked for.


def end_of(scratch: str) -> None:
    """Ends what an agent that was killed has left: processes of its tasks, by their variables, and its directory."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(status.SOCKET, "").partition("@")[2].startswith(scratch):
                process.kill()
    shutil.rmtree(scratch, ignore_errors=True)


def end(*, but: set[int]) -> list[str]:
    """Ends all processes below this one; returns the names of these programs.

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
