"""A task's process on this machine, and its process group."""

import contextlib
import os
import pathlib
import signal
import subprocess
from collections.abc import Mapping
from typing import Any

from toolkit.launch.agent.activity import Activity
from toolkit.launch.agent.tasks import TaskSpec
from toolkit.support import signals

__all__ = ["TaskProcess", "dying"]

_EXITING = 0x4  # PF_EXITING of Linux's include/linux/sched.h, in proc(5)'s "flags".


class TaskProcess:
    """One process, which the constructor starts.

    Args:
        spec: What to start.
        environ: The environment that its own is added to.
        stacks: A file for its stacks, removed with the job.

    Attributes:
        descriptor: The reading end of what it writes, non-blocking.
        code: Exit code as Popen has it, None while it runs.
        ended: Whether all that it writes has come.
        left: Programs that still ran in its group when it had ended.
    """

    def __init__(self, spec: TaskSpec, *, environ: Mapping[str, str], stacks: pathlib.Path) -> None:
        self.spec = spec
        self.task = spec.task
        self.code: int | None = None
        self.ended = False
        self.left: list[str] = []
        self._stacks = stacks
        self._stacks_read = 0
        self._activity = Activity()
        self._watched: Any = None
        self.descriptor, writing = os.pipe()
        os.set_blocking(self.descriptor, False)
        try:
            self._process = subprocess.Popen(
                spec.arguments(str(stacks)),
                env={**environ, **spec.environment},
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,  # So that its whole group can be killed; Ctrl-C is passed on.
            )
        except BaseException:
            os.close(self.descriptor)
            raise
        finally:
            os.close(writing)
        self.pid = self._process.pid
        self._main = 0 if spec.prefix else self.pid

    @property
    def main(self) -> int:
        """The id of the process that is the task itself."""
        return self._main or self.pid

    def is_main(self, pid: int | None) -> bool:
        """Returns whether a process is the task itself. Behind a prefix, that is the first process asked about."""
        self._main = self._main or pid or 0
        return pid == self._main

    def poll(self) -> bool:
        """Checks whether it has ended; returns True the first time."""
        if self.code is not None or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.left = _programs(self.pid)
        # Kills what the task left in its group, while the group's number still belongs to it.
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.code = self._process.returncode
        return True

    def read(self) -> bytes:
        """Returns its new output, unchanged."""
        try:
            written = os.read(self.descriptor, 1 << 18)
        except BlockingIOError:
            return b""
        except OSError:
            written = b""
        if not written:
            self.ended = True
        return written

    def sample(self) -> dict[str, Any]:
        """Returns its CPU use in percent of a core, its memory in bytes, and its state.

        `computes`: whether it has since the last time; `stopped`: SIGSTOP or a debugger holds it; `dying`: see below.
        """
        import psutil

        try:
            # Created once, because psutil measures CPU since the previous call.
            self._watched = self._watched or psutil.Process(self.main)
            with self._watched.oneshot():
                stopped = self._watched.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
                used = sum(self._watched.cpu_times()[:2])
                return {
                    "cpu": self._watched.cpu_percent(),
                    "memory": self._watched.memory_info().rss,
                    "computes": self._activity.computes(used),
                    "stopped": stopped,
                    "dying": dying(self.pid),
                }
        except psutil.Error:
            return {"cpu": 0.0, "memory": 0, "computes": False, "stopped": False, "dying": dying(self.pid)}

    def signal(self, number: int) -> None:
        """Signals the task itself. It handles its own child processes."""
        if self.code is None:
            # Popen isn't used here: it would reap a process that has just ended before its end was reported.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.main, number)

    def kill(self) -> None:
        """Kills the whole process group; nothing is left of a task that has ended."""
        if self.code is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def new_stacks(self) -> str:
        """Returns the Python stacks written since the last call, "" if there are none."""
        try:
            with open(self._stacks, encoding="utf-8", errors="replace") as file:
                file.seek(self._stacks_read)
                text = file.read()
                self._stacks_read = file.tell()
        except OSError:
            return ""
        return text

    def close(self) -> None:
        """Kills it and waits for its end."""
        self.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


def _programs(group: int) -> list[str]:
    """Returns the names of the other programs in a process group. Linux only."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        with contextlib.suppress(OSError, ValueError):
            if int(name) != group and os.getpgid(int(name)) == group:
                found.append(pathlib.Path(f"/proc/{name}/comm").read_text().strip())
    return found


def dying(pid: int) -> bool:
    """Returns whether a process is exiting or has a SIGKILL pending; a large one takes seconds to exit. Linux only."""
    try:
        flags = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])
    except (OSError, IndexError, ValueError):
        return False
    return bool(flags & _EXITING) or signals.is_in(pid, signal.SIGKILL, "SigPnd", "ShdPnd")
