"""A task's process on this machine, with its process group and whatever it leaves behind.

What its state is, whether it computes, and which files its threads wait for, is asked of the system.
"""

import contextlib
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from toolkit.launch.agent.tasks import TaskSpec
from toolkit.support import signals, status

# A hung task's other threads (TensorFlow's and gRPC's, which keep connections alive) use 2.5 s of processor time in
# 1,800 s: far less than this share of a core. What computes uses most of one.
_COMPUTING = 0.05
_JUDGED_BY = 1.0  # Seconds of processor time to judge by.
# Numbers of read and pread64, whose first argument is a descriptor, and of openat, whose second is a path, of Linux's
# arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
_SYSTEM_CALLS = {"x86_64": ((0, 17), 257), "aarch64": ((63, 67), 56)}
_LONGEST_PATH = 4096  # The most bytes of a path.
_NO_FILES = re.compile(r"/(dev|proc|sys)/")
_ROUNDS = 100  # A process may start another one during the search.
_EXITING = 0x4  # PF_EXITING of Linux's include/linux/sched.h, in proc(5)'s "flags".


class Activity:
    """Distinguishes a task that computes from one with idle threads.

    Args:
        clock: Returns the time, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._used = 0.0

    def computes(self, used: float) -> bool:
        """Returns whether the task has computed since the last call.

        Args:
            used: Processor time of the task so far, of all its threads, in seconds.
        """
        if used - self._used < _JUDGED_BY:
            return False
        now = self._clock()
        busy = used - self._used > _COMPUTING * (now - self._since)
        self._since, self._used = now, used
        return busy


def files_waited_for(process: int) -> list[str]:
    """Returns the paths of files that threads of a process are about to open or to read."""
    reading, opening = _SYSTEM_CALLS.get(platform.machine(), ((), -1))
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
                    named = _text_at(process, int(arguments[1], 16))
                    found.add(os.path.join(os.readlink(f"/proc/{process}/cwd"), named))
    return sorted(path for path in found if path.startswith("/") and not _NO_FILES.match(path))


def _text_at(process: int, address: int) -> str:
    """Returns the text at an address of a process's memory."""
    with open(f"/proc/{process}/mem", "rb", buffering=0) as file:
        file.seek(address)
        return file.read(_LONGEST_PATH).partition(b"\0")[0].decode(errors="replace")


def end_left_by(scratch: str) -> None:
    """Kills what a killed agent left: its tasks' processes, found by their variables, and its directory."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(status.SOCKET, "").partition("@")[2].startswith(scratch):
                process.kill()
    shutil.rmtree(scratch, ignore_errors=True)


def end_descendants(*, but: set[int]) -> list[str]:
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
