"""The launcher's side of `guard`, the program that ends what a killed launcher leaves behind."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

from toolkit.launch import guard

__all__ = ["Guarding"]


class Guarding:
    """A guard that has been started.

    Args:
        mark: In the environment of all that belongs to the job.
        scratch: A directory that goes with the job.
    """

    def __init__(self, mark: str, scratch: pathlib.Path) -> None:
        self._mark = mark
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, mark, str(scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Tells it of a process group."""
        self._send(b"%d" % group)

    def close(self) -> None:
        """Ends what is left of the job, and the guard; the launcher, which still lives, removes the directory."""
        for process in guard.marked(self._mark):
            if process != os.getpid():
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
        self._send(guard.KEEP)
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.wait()

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
