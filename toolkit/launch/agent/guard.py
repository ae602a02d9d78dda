"""Ends what a launcher has left behind: a program of its own, with nothing but the standard library, and its starter.

    python -I -S guard.py TAG SCRATCH

It waits for its standard input to end, which it does when the launcher ends in whatever way, kill -9
included. Then it kills the process groups that its input named, one number a line, and every process
of this user that has TAG in its TOOLKIT_PROCESS_TAG: tasks, and whatever they started, launchers too; and it
removes the directory SCRATCH, unless a line says that the launcher, which still lives, will do so.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

__all__ = ["TAG", "Guard"]

# In the environment of all that belongs to a job and of nothing else: its tag, behind those of jobs that it is part of.
TAG = "TOOLKIT_PROCESS_TAG"
_KEEP = b"keep"


class Guard:
    """The program, started by a launcher that still lives.

    Args:
        tag: The process tag, in the environment of all that belongs to the job.
        scratch: A directory that goes with the job.
    """

    def __init__(self, tag: str, scratch: pathlib.Path) -> None:
        self._tag = tag
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, tag, str(scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Names a process group that is to end with the launcher."""
        self._send(b"%d" % group)

    def sweep(self) -> list[str]:
        """Ends what is left of the job; returns the names of these programs."""
        left = _tagged(self._tag)
        names = [_program(process) for process in left]
        _kill(left)
        return names

    def close(self) -> None:
        """Ends what is left of the job, and the program; the launcher, which still lives, removes the directory."""
        self.sweep()
        self._send(_KEEP)
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.wait()

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()


def _tagged(tag: str) -> list[int]:
    """Returns the ids of this user's other processes with the tag in the environment that they started with."""
    start, wanted = f"{TAG}=".encode(), tag.encode()
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            held = [each for each in file.read().split(b"\0") if each.startswith(start)]
            if held and wanted in held[0].removeprefix(start).split(b","):
                found.append(int(name))
    return found


def _program(process: int) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{process}/comm").read_text().strip()
    return str(process)


def _kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    tag, scratch = sys.argv[1:]
    lines = [line.strip() for line in sys.stdin.buffer]
    for group in [int(line) for line in lines if line.isdigit()]:
        with contextlib.suppress(OSError):
            if os.getpgid(group) == group:  # The leader is still there, so the number is still its own.
                os.killpg(group, signal.SIGKILL)
    for _ in range(100):  # A process may start another while it is looked for.
        left = _tagged(tag)
        if not left:
            break
        _kill(left)
        time.sleep(0.02)
    if _KEEP not in lines:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    _main()
