"""The state of a job's tasks, computed from their events, and the message about the one that failed first.

Nothing here acts.
"""

import collections
import math
import pathlib
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from toolkit.cluster import Task
from toolkit.errors import TaskFailed
from toolkit.launch.display import Chatter, Output
from toolkit.launch.events import Event
from toolkit.launch.supervisor import stacks
from toolkit.support import signals, status

_WAITS = 240  # How many reports of waiting time are kept. Tasks send one or two a second, so this covers some minutes.
_LATELY = 20.0  # The seconds of reports that are needed for a judgement.
_MUCH = 0.2  # The share of waiting from which the slowest task is named.
_BUSY = 50.0  # Percent of a core. Tracing and compilation use a whole one, and threads that wait for a GPU a tenth.
_TIMES = 5  # How many times as long as the longest of its kind a phase may take.
_UNKNOWN = 1800.0  # Seconds that anything may take of which none has been seen.
_RARELY = 5  # How many times the shortest limit a callback may take: now and then one saves or uploads something.
JITTER = 1.0  # Seconds by which two reports of the same moment differ at most.
_QUIET = 30.0  # After this many seconds without a step, the table shows it.
_REFUSED = 2  # The exit code of what can't be done as it was asked.
_TAIL = 20  # How many lines of a task's output a message has.


class Stall(NamedTuple):
    """How close a job is to being stalled.

    Attributes:
        limit: The seconds without progress that end it.
        last: When the last progress was, of the monotonic clock.
        why: How the limit was learnt; "" if it wasn't.
    """

    limit: float
    last: float
    why: str


class TaskState:
    """One task of an attempt. Times are of the monotonic clock.

    Args:
        task: The task.
        host: What its machine is called where there are several; "" for this one.
        log: Its log file.

    Attributes:
        code: Exit code as Popen has it, None while it runs.
        alive: Whether it still runs, as far as its events say.
        done_at: When its script had come to its end.
        failed_at: When it reported that it fails, or was seen to have.
        said_so: Whether it reported that it fails.
        script_ended_at: When its script had ended, well or not; its process may go on for a thread of the script's.
        ended_late: Whether the launcher has ended the process because its script had failed and it went on.
        facts: What it reported last: state, step, images_per_second.
        progressed: When it last did anything that can be seen.
        stepped: When it last reported another step.
        served: Whether it has reported that it serves a chief.
        given_up: Whether the job goes on without it.
        asked_to_end: Whether the launcher has asked it to end.
        found_stopped: Whether the job has failed because something has stopped it.
        stopped_since: Since when something has held it, None while nothing does.
        dying: Whether the system is ending it.
        phase: What it is doing, as `toolkit.support.status.read_phase` has it; {} if that isn't known.
        phase_since: Since when.
        busy_at: When it last used more than half of a core.
        stacks: What it wrote of its Python stacks when it was last asked.
        waits: What it reported of waiting for the others, as "seconds" and "words", until the launcher says so.
    """

    def __init__(self, task: Task, *, host: str, log: pathlib.Path) -> None:
        self.task = task
        self.host = host
        self.output = Output(log)
        self.restart()

    def restart(self) -> None:
        """Called when the task starts, for the first time or again."""
        self.pid = 0
        self.started = self.progressed = self.stepped = time.monotonic()
        self.ended: float | None = None
        self.code: int | None = None
        self.alive = True
        self.done_at: float | None = None
        self.failed_at: float | None = None
        self.script_ended_at: float | None = None
        self.stopped_since: float | None = None
        self.facts: dict[str, Any] = {"state": "starting"}
        self.said_so = self.ended_late = False
        self.served = self.given_up = self.asked_to_end = self.found_stopped = self.dying = False
        self.looks = 0
        self.stacks = ""
        self.waits: dict[str, Any] = {}
        self._waits: collections.deque[tuple[float, float]] = collections.deque(maxlen=_WAITS)
        self._cpu, self._memory = 0.0, 0
        self.phase: dict[str, Any] = {}
        self.phase_since = self.busy_at = self.started
        self.output.ended = False

    @property
    def place(self) -> stacks.Location | None:
        """Where it is; None if it didn't answer when it was asked."""
        if self.done_at is not None and self.stacks:
            return stacks.Location(in_tensorflow=False, words="the end of its script")
        return stacks.locate(self.stacks)

    @property
    def script_code(self) -> int | None:
        """The exit code that its script has ended with; None if the script runs or hasn't said."""
        return self.facts.get("exit_code")

    @property
    def threads(self) -> str:
        """The threads that keep its process running though its script has ended; "" if there are none."""
        return ", ".join(self.facts.get("threads", []))

    def take(self, event: Event) -> list[bytes]:
        """Takes an event; returns the lines of output that it completes."""
        now = time.monotonic() - event.get("late", 0.0)
        kind = event["event"]
        if kind == "started":
            self.pid = event["pid"]
        elif kind == "output":
            self.progressed = now
            return self.output.take(event["text"])
        elif kind == "report":
            self._take_report(event["facts"], now - event["ago"])
        elif kind == "sample":
            self._take_sample(event, now)
        elif kind == "stacks":
            self.stacks += event["text"]
        elif kind == "ended" and event["pid"] == self.pid:
            self.code, self.ended, self.alive = event["code"], now, False
            if self.asked_to_end and self.script_code:  # The signal that ended it says nothing of why it failed.
                self.code, self.ended_late = self.script_code, True
            if self.code:
                self.failed_at = min(self.failed_at or now, now)
        return []

    def _take_report(self, facts: Mapping[str, Any], at: float) -> None:
        if "waits" in facts:
            self.waits = facts["waits"]
            if not set(facts) - {"task", "pid", "waits"}:
                return  # To wait is no progress.
            facts = {name: value for name, value in facts.items() if name != "waits"}
        if facts.get("state") == "ending":
            self.done_at = self.done_at or at
        if facts.get("state") == "failed":
            self.failed_at = self.failed_at or at
            self.said_so = True
        if "exit_code" in facts:
            self.script_ended_at = self.script_ended_at or at
        if "waited" in facts:
            self._waits.append((time.monotonic(), facts["waited"]))
        if facts.get("state") != self.facts["state"] or facts.get("step") != self.facts.get("step"):
            self.stepped = time.monotonic()
        self.facts.update(facts)
        self.served = self.served or facts.get("state") == "serving"
        self.progressed = time.monotonic()

    def _take_sample(self, event: Event, now: float) -> None:
        self.looks += 1
        self._cpu, self._memory, self.dying = event["cpu"], event["memory"], event["dying"]
        self.stopped_since = (self.stopped_since or now) if event["stopped"] else None
        kind, self.phase = self.phase.get("kind"), event.get("phase") or {}
        since = now - self.phase.get("seconds", 0.0)
        if kind != self.phase.get("kind") or abs(since - self.phase_since) > JITTER:
            self.phase_since = since
        if event["cpu"] > _BUSY:
            self.busy_at = now
        if event["computes"] and self.facts["state"] != "training":  # Later only steps are progress.
            self.progressed = now

    @property
    def waiting(self) -> float | None:
        """The share of recent time in which its steps waited for other tasks; None if unknown."""
        if not self._waits or self._waits[-1][0] - self._waits[0][0] < _LATELY:
            return None
        (since, before), (now, waited) = self._waits[0], self._waits[-1]
        return (waited - before) / (now - since)

    def words(self) -> str:
        """Returns how it ended, in words."""
        if self.found_stopped:
            return "was stopped by a signal (SIGSTOP or the like)"
        if self.code is None:
            return "still runs"
        if self.ended_late:
            where = f"its thread {self.threads} ran on" if self.threads else "its process ran on"
            return f"failed with exit code {self.code}; {where} and had to be ended"
        if self.code < 0:
            return f"was ended by {signals.name(-self.code)}"
        return f"ended with exit code {self.code}"

    def _how(self) -> str:
        quiet = time.monotonic() - self.stepped
        return (
            f"no step for {quiet:.0f} s"
            if self.facts["state"] == "training" and quiet > _QUIET
            else self.facts["state"]
        )

    def row(self) -> tuple[str, ...]:
        """Returns the table's row: task, state, pid, step, images per second, CPU in percent of one core, memory."""
        rate, step = self.facts.get("images_per_second"), self.facts.get("step")
        return (
            str(self.task),
            self._how() if self.alive else self.words(),
            str(self.pid),
            "" if step is None else str(step),
            f"{rate:,.0f}" if rate else "",
            f"{self._cpu:.0f} %" if self.alive else "",
            f"{self._memory / 2**20:,.0f} MiB" if self.alive else "",
        )


def has_servers(tasks: Sequence[TaskState]) -> bool:
    """Returns whether this job has a chief with parameter servers."""
    return {"ps", "chief"} <= {task.task.job for task in tasks}


def is_done(tasks: Sequence[TaskState]) -> bool:
    """Returns whether the job is done: all workers have ended, or with parameter servers, the chief has."""
    ends = {"chief"} if has_servers(tasks) else {"chief", "worker", "evaluator"}
    waited = [task for task in tasks if task.task.job in ends or task.facts.get("follows")]
    return all(task.code == 0 for task in waited or tasks)


def serves(task: TaskState, tasks: Sequence[TaskState]) -> bool:
    """Returns whether it is a worker of a chief, which the job can do without."""
    return has_servers(tasks) and task.task.job == "worker" and task.served


def stopped_for(tasks: Sequence[TaskState], seconds: float) -> list[TaskState]:
    """Returns the tasks that have been suspended for longer than this."""
    since = time.monotonic() - seconds
    return [task for task in tasks if task.alive and task.stopped_since is not None and task.stopped_since < since]


def reached(tasks: Sequence[TaskState]) -> dict[str, float]:
    """Returns how far the job has come, as its tasks report: the step, the epoch, and the newest checkpoint's step."""
    found: dict[str, float] = {}
    for task in tasks:
        for name, number in reached_by(task.facts).items():
            found[name] = max(number, found.get(name, 0))
    return found


def reached_by(facts: Mapping[str, Any]) -> dict[str, float]:
    """Returns those facts of a task's that say how far it has come."""
    return {name: facts[name] for name in ("step", "epoch", "checkpoint") if isinstance(facts.get(name), (int, float))}


def stall(tasks: Sequence[TaskState], *, limit: float | None, floor: float) -> Stall | None:
    """Returns how close the job is to being stalled; None if it may take any time.

    Args:
        tasks: The job's tasks, one of which runs.
        limit: Seconds that the user has set, 0 for any number; None: the limit is learnt.
        floor: The shortest limit that is learnt.
    """
    last = max(task.progressed for task in tasks)
    learnt = _learnt(tasks, floor) if limit is None else None
    set_or_unknown = _UNKNOWN if limit is None else limit
    if not set_or_unknown:
        return None
    if learnt is None:
        return Stall(set_or_unknown, last, "")
    # A thread that waits in a loop computes: then only this limit, the longer one, ends the job.
    longer = Stall(max(set_or_unknown, learnt.limit), last, "")
    return min(learnt, longer, key=lambda each: each.last + each.limit)


def _learnt(tasks: Sequence[TaskState], floor: float) -> Stall | None:
    """Returns the limit for the phase that tasks are in; None unless one like it has been seen to end."""
    concerned = [task for task in tasks if task.alive and task.done_at is None]
    concerned = [task for task in concerned if task.facts["state"] not in ("serving", "following")]
    longest: dict[str, float] = {}
    for task in tasks:
        for kind, seconds in task.phase.get("longest", {}).items():
            longest[kind] = max(seconds, longest.get(kind, 0.0))
    # A process that waits for the others takes as long as they do.
    kinds = {task.phase.get("kind", "") for task in concerned} - {status.WAITING}
    if not kinds or not all(longest.get(kind) for kind in kinds):
        return None
    limits = {kind: max(floor * (_RARELY if kind in status.HOOKS else 1), _TIMES * longest[kind]) for kind in kinds}
    slowest, limit = max(limits.items(), key=lambda each: each[1])
    last = max(max(task.phase_since, task.progressed, task.busy_at) for task in concerned)
    why = f"The longest {slowest} so far took {longest[slowest]:.3g} s, and {_TIMES} times that is the limit"
    return Stall(limit, last, why + (f", but at least {limit:g} s" if limit > _TIMES * longest[slowest] else ""))


def lingering(tasks: Sequence[TaskState], seconds: float) -> list[TaskState]:
    """Returns the tasks whose script ended more than this long ago, and whose process still runs."""
    since = time.monotonic() - seconds
    return [task for task in tasks if task.alive and task.script_ended_at is not None and task.script_ended_at < since]


def train_alone(tasks: Sequence[TaskState]) -> bool:
    """Returns whether several tasks train, each without a strategy or with a strategy of one process."""
    training = [task for task in tasks if task.task.job in ("chief", "worker")]
    return len(training) > 1 and not any("strategy" in task.facts for task in training)


def slowest(tasks: Sequence[TaskState]) -> tuple[TaskState, float] | None:
    """Returns the task that the others wait for in their steps and the share of their time, or None."""
    shares = {task: task.waiting for task in tasks if task.alive and task.waiting is not None}
    if len(shares) < 2:
        return None
    late = min(shares, key=lambda task: shares[task] or 0.0)
    others = min(share or 0.0 for task, share in shares.items() if task is not late)
    return (late, others) if others > _MUCH and (shares[late] or 0.0) < others / 3 else None


def cause(tasks: Sequence[TaskState]) -> TaskState:
    """Returns the task whose failure came first. A sudden end never counts as following from another failure.

    Nor does a task follow that something has stopped: the others waited for it.

    A process that ends suddenly closes its connections, and its peers fail, before the system lets its end be seen.

    Args:
        tasks: The job's tasks, one of which has failed, before the launcher has signalled any.
    """
    stopped = [task for task in tasks if task.found_stopped]
    if stopped:
        return stopped[0]
    failed = [task for task in tasks if task.failed_at is not None and not task.given_up]
    sudden = [task for task in failed if _ended_suddenly(task)]
    return min(sudden or failed, key=lambda task: task.failed_at or 0.0)


def _ended_suddenly(task: TaskState) -> bool:
    """Whether it was killed or ended without a report: by os._exit, or by a crash in native code."""
    if task.code == -signal.SIGKILL:
        return True
    # TensorFlow aborts a process whose peer is gone, also when a script has already ended.
    reported = task.said_so or task.done_at is not None
    return (
        not reported and task.code is not None and task.code not in (-signal.SIGABRT, -signal.SIGTERM, -signal.SIGINT)
    )


def failed_first(first: TaskState, tasks: Iterable[TaskState]) -> TaskFailed:
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
        f"{also}\nIts last lines, from {first.output.log}:\n{_tail(first)}{_same_moment(first, others)}",
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


def _same_moment(first: TaskState, others: Sequence[TaskState]) -> str:
    """Returns what another task says that was refused as the first was: which of both has to be mended isn't known."""
    own = _error_of(first)
    for each in others if first.code == _REFUSED else ():
        theirs = _error_of(each)
        if theirs and theirs.replace(str(each.task), "") != own.replace(str(first.task), ""):
            return f"\n{each.task} ended with:\n  {theirs}"
    return ""


def _error_of(task: TaskState) -> str:
    """Returns the last line with which a task said why it can't do what was asked; "" if it has said none."""
    said = [line for line in last_lines(task) if line.startswith("error: ")] if task.code == _REFUSED else []
    return said[-1] if said else ""


def exit_code(code: int | None) -> int:
    """Returns the job's exit code for a task's exit code as in Popen."""
    if code is None:
        return 1
    return 128 - code if code < 0 else code
