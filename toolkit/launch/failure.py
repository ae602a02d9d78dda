"""Finding the task whose failure is the cause of the others', and the message about it."""

import pathlib
import re
import signal
import time
from collections.abc import Iterable

from toolkit.errors import TaskFailed
from toolkit.launch.running import RunningTask

__all__ = ["cause", "dying", "error"]

_EXITING = 0x4  # PF_EXITING of Linux's include/linux/sched.h, in proc(5)'s "flags".
_TAIL = 20  # Lines of a task's output in a message.


def cause(running: Iterable[RunningTask]) -> RunningTask:
    """Returns whose failure came first; but a SIGKILL that isn't the launcher's own never follows from another.

    Nor does a task follow that something has stopped: the others waited for it.

    A killed process closes its connections, and its peers fail, before the system lets its end be seen.

    Args:
        running: The job's tasks, one of which has failed, before the launcher has signalled any.
    """
    stopped = [task for task in running if task.found_stopped]
    if stopped:
        return stopped[0]
    tasks = [task for task in running if task.failed_at is not None and not task.given_up]
    killed = [task for task in tasks if task.code == -signal.SIGKILL]
    return min(killed or tasks, key=lambda task: task.failed_at or 0.0)


def dying(pid: int) -> bool:
    """Returns whether a process is ending, or has a SIGKILL pending; a large one takes seconds to. Linux only."""
    try:
        flags = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])
        pending = re.findall(r"^S\w+Pnd:\t(\w+)", pathlib.Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except (OSError, IndexError, ValueError):
        return False
    return bool(flags & _EXITING) or any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in pending)


def error(first: RunningTask, running: Iterable[RunningTask]) -> TaskFailed:
    """Returns the error that says who failed first, what became of the others, and its last lines.

    Args:
        first: The cause.
        running: All tasks of the job, after their end.
    """
    others = [task for task in running if task is not first and task.code]
    # Leaving TensorFlow takes a while: by then the others have noticed.
    gone = [
        str(task.task)
        for task in running
        if task.code == 0 and (task.done_at or task.ended or 0) < (first.failed_at or 0)
    ]
    also = f" {', '.join(gone[:8])} had come to the end of the script before." if gone else ""
    also += f" Then: {', '.join(f'{task.task} {task.words()}' for task in others[:8])}." if others else ""
    seconds = (first.ended or time.monotonic()) - first.started
    return TaskFailed(
        f"{first.task} failed first: it {first.words()} after {seconds:.0f} s."
        f"{also}\nIts last lines, from {first.output.log}:\n" + _tail(first),
        code=_exit_code(first.code),
    )


def _tail(task: RunningTask) -> str:
    lines = task.output.last_lines()
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    lines = lines[starts[-1] :] if starts else lines[-_TAIL:]
    if len(lines) > 2 * _TAIL:  # The user's own lines come first, the reason last.
        lines = [*lines[: _TAIL // 2], "...", *lines[-_TAIL:]]
    return "\n".join(f"  {line}" for line in lines) or "  (it wrote nothing)"


def _exit_code(code: int | None) -> int:
    if code is None:
        return 1
    return 128 - code if code < 0 else code
