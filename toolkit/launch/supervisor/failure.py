"""The message about the task that failed first."""

import math
import time
from collections.abc import Iterable

from toolkit.errors import TaskFailed
from toolkit.launch.display.lines import Chatter
from toolkit.launch.supervisor.state import TaskState

__all__ = ["error", "exit_code", "last_lines"]

_TAIL = 20  # How many lines of a task's output a message has.


def error(first: TaskState, tasks: Iterable[TaskState]) -> TaskFailed:
    """Returns the error that names the task that failed first, the state of the others, and its last lines.

    Args:
        first: The cause.
        tasks: All tasks of the job, after their end.
    """
    others = [task for task in tasks if task is not first and task.code]
    # TensorFlow takes a while to shut down. By then the other tasks have noticed, and their calls may crash it.
    gone = [
        str(task.task)
        for task in tasks
        if (task.done_at or (task.ended if task.code == 0 else None) or math.inf) < (first.failed_at or 0)
    ]
    also = f" Before that, {', '.join(gone[:8])} had finished the script." if gone else ""
    also += f" After that, {', '.join(f'{task.task} {task.words()}' for task in others[:8])}." if others else ""
    seconds = (first.ended or time.monotonic()) - first.started
    where = f"On {first.host}: " if first.host else ""
    return TaskFailed(
        f"{where}{first.task} failed first: it {first.words()} after {seconds:.0f} s."
        f"{also}\nIts last lines, from {first.output.log}:\n{_tail(first)}",
        code=exit_code(first.code),
        advice=_resume(tasks),
    )


def _resume(tasks: Iterable[TaskState]) -> str:
    """Returns where the job's newest checkpoint is, and how to continue from it."""
    newest = max((task.facts for task in tasks), key=lambda facts: facts.get("checkpoint", -1), default={})
    if "checkpoint" not in newest:
        return ""
    by_itself = any(task.facts.get("resumes") for task in tasks)
    how = "" if by_itself else ' with Run(resume="auto") in the script, or with --resume for a recipe'
    return (
        f"\nThe newest checkpoint, of step {newest['checkpoint']:,}, is in {newest['checkpoints']}. To continue "
        f"from it, start the job again{how}."
    )


def last_lines(task: TaskState) -> list[str]:
    """Returns a task's last lines without TensorFlow's log lines, or with them if there are no others."""
    lines = task.output.last_lines()
    return [line.decode() for line in Chatter().without([line.encode() for line in lines])] or lines


def _tail(task: TaskState) -> str:
    lines = last_lines(task)
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    lines = lines[starts[-1] :] if starts else lines[-_TAIL:]
    if len(lines) > 2 * _TAIL:  # The user's own frames come first and the exception last.
        lines = [*lines[: _TAIL // 2], "...", *lines[-_TAIL:]]
    return "\n".join(f"  {line}" for line in lines) or "  (it wrote nothing)"


def exit_code(code: int | None) -> int:
    """Returns the job's exit code for a task's exit code as in Popen."""
    if code is None:
        return 1
    return 128 - code if code < 0 else code
