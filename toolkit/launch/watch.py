"""Watching a job that something else supervises, and stopping it."""

import os
import signal
import time
from collections.abc import Iterator, Sequence

from toolkit.cluster import Task
from toolkit.errors import JobStopped, LaunchError, TaskFailed
from toolkit.launch.backends import slurm
from toolkit.launch.display.display import Display
from toolkit.launch.display.follow import Follower
from toolkit.launch.display.output import visible_lines
from toolkit.launch.records import controller
from toolkit.launch.records.jobs import Entry
from toolkit.launch.records.record import Record, log_name
from toolkit.support import signals

__all__ = ["attempts", "chosen", "log_of", "show", "stacks", "stop", "watch"]

_SECONDS = 0.2  # Between two looks at the logs.
_QUESTION = 2.0  # Between two questions to Slurm's controller, which is everybody's.
_ANSWER = 15.0  # Seconds in which a launcher answers.
_LATE = 3.0  # Seconds after which a supervisor that is gone has written all that it will.


def attempts(job: Entry) -> dict[int, list[str]]:
    """Returns the tasks of each attempt that a job has started, by its number."""
    return {event["number"]: event["tasks"] for event in job.record.new() if event["event"] == "attempt"}


def chosen(job: Entry, attempt: int | None, tasks: Sequence[str]) -> tuple[int, list[str]]:
    """Returns an attempt's number, the last for None, and its tasks.

    Raises:
        LaunchError: The job has no such attempt, or it none of these tasks.
    """
    starts = attempts(job)
    number = max(starts, default=0) if attempt is None else attempt
    if number not in starts:
        found = f"its last attempt is {max(starts)}" if starts else "the job hasn't started any"
        asked = f"attempt {number} of job {job.id} was asked for"
        raise LaunchError(asked=asked, found=found, remedy="See `toolkit jobs`")
    for task in tasks:
        if task not in starts[number]:
            asked, found = f"--task={task}", f"the tasks are {', '.join(starts[number][:12])}"
            raise LaunchError(asked=asked, found=found, remedy="Name one of them")
    return number, starts[number]


def log_of(job: Entry, task: str, attempt: int | None) -> bytes:
    """Returns what a task, "" for the first, has written in an attempt, as `chosen` finds it."""
    number, tasks = chosen(job, attempt, [task] if task else [])
    return b"".join(_read_log(job.record, task or tasks[0], number))


def show(record: Record, display: Display, tasks: Sequence[str], attempt: int) -> None:
    """Shows what tasks have written in one attempt."""
    display.expect([Task.parse(name) for name in tasks])
    for name in tasks:
        for lines in _read_log(record, name, attempt):
            display.lines(Task.parse(name), visible_lines(lines.removesuffix(b"\n").split(b"\n")))
            display.wait()


def _read_log(record: Record, task: str, attempt: int) -> Iterator[bytes]:
    """Yields what a task has written in an attempt, lines by lines, without what other jobs have in the same file."""
    sizes = {event["event"]: event for event in Record(record.directory).new() if event.get("number") == attempt}
    begin = sizes["attempt"].get("begins", {}).get(task, 0)
    left = sizes["logs"]["ends"].get(task, 0) - begin if "logs" in sizes else float("inf")
    path = record.logs / log_name(task, attempt)
    try:
        with path.open("rb") as file:
            file.seek(begin)
            while left > 0 and (lines := b"".join(file.readlines(int(min(left, 1 << 20))))):
                lines = lines[: int(min(left, len(lines)))]
                left -= len(lines)
                yield lines
    except OSError as error:
        raise LaunchError(
            asked=f"the log of {task}",
            found=f"{path} can't be read ({(error.strerror or '').lower()})",
            remedy="See `toolkit jobs`",
        ) from error


def watch(job: Entry, *, only: Sequence[str] = (), native_logs: bool = False, lines: int | None) -> None:
    """Shows what a job does until its end.

    Args:
        job: The job.
        only: Tasks whose lines are shown; () for all.
        native_logs: Whether to show TensorFlow's notes.
        lines: How many of each task's last ones are shown at first; None for all of the attempt's.

    Raises:
        TaskFailed: It failed, or its supervisor is gone.
        JobStopped: It was stopped, or this process received a signal: the job runs on.
    """
    with signals.recorded() as received, Display(only=only, native_logs=native_logs) as display:
        follower = Follower(job.record, display)
        follower.catch_up(lines)
        try:
            if job.slurm:
                controller.check(job.slurm)
                slurm.follow_job(job.slurm, follower, display, received, cancels=False)
                return
            _watch(job, follower, received)
        except JobStopped:
            if not received:  # It was stopped by somebody else.
                raise
            raise JobStopped(received[0], then=f"job {job.id} runs on, and `toolkit stop {job.id}` ends it") from None
        finally:
            follower.look()
        follower.conclude()


def _watch(job: Entry, follower: Follower, received: Sequence[int]) -> None:
    gone = 0.0
    while follower.end is None:
        follower.look()
        if received:
            raise JobStopped(received[0])
        gone = 0.0 if job.runs else gone or time.monotonic()
        if gone and follower.end is None and time.monotonic() - gone > _LATE:
            raise TaskFailed(
                f"Job {job.id} is dead: its launcher on {job.host} is gone. Its logs are in {job.logs}", code=1
            )
        time.sleep(_SECONDS)


def stacks(job: Entry) -> tuple[str, dict[str, str]]:
    """Returns a sentence about whom a job's tasks wait for, and each task's Python stacks, as they are now.

    Raises:
        LaunchError: The job doesn't run, runs on another machine, or doesn't answer.
    """
    _check_here(job, f"`toolkit stacks {job.id}`")
    begun = [event["event"] for event in job.record.new() if event["event"] in ("attempt", "requeue")]
    if not job.alive or begun[-1:] != ["attempt"]:  # Queued again, it has no tasks yet.
        raise LaunchError(
            asked=f"`toolkit stacks {job.id}` asks where its tasks are",
            found=f"the job is {job.state()}",
            remedy="See `toolkit jobs`",
        )
    record = job.record
    record.new()
    if job.slurm:
        controller.stacks(job.slurm)
    elif signals.is_in(
        job.pid, signal.SIGUSR2, "SigCgt"
    ):  # A launcher in a thread of a notebook doesn't, and its process would end.
        os.kill(job.pid, signal.SIGUSR2)
    deadline = time.monotonic() + _ANSWER
    while time.monotonic() < deadline and job.alive:
        for event in record.new():
            if event["event"] == "stacks":
                return event["text"], event["tasks"]
        time.sleep(_SECONDS)
    raise LaunchError(
        asked=f"the stacks of job {job.id}",
        found=f"its launcher hasn't answered for {_ANSWER:g} s",
        remedy=f"See whether it still runs: `toolkit jobs`; its logs are in {job.logs}",
    )


def _check_here(job: Entry, command: str) -> None:
    if job.slurm and not job.over:
        controller.check(job.slurm)
    if job.state().startswith("on "):
        raise LaunchError(
            asked=f"{command} asks its launcher",
            found=f"it was launched on {job.host}",
            remedy=f"Run it there: ssh {job.host} {command.strip('`')}",
        )


def stop(job: Entry) -> str:
    """Ends a job, and waits for its end; returns how it is then.

    Raises:
        LaunchError: It runs on another machine.
    """
    _check_here(job, f"`toolkit stop {job.id}`")
    if job.alive:
        if job.slurm:
            controller.stop(job.slurm)
        else:
            os.kill(job.pid, signal.SIGTERM)
    while job.alive:
        time.sleep(_QUESTION if job.slurm else _SECONDS)
    return job.state()
