"""Watching a job that something else supervises, and stopping it."""

import os
import signal
import time
from collections.abc import Sequence

from toolkit.cluster import Task
from toolkit.errors import JobStopped, LaunchError, TaskFailed
from toolkit.launch.backends import slurm
from toolkit.launch.display.display import Display
from toolkit.launch.display.follow import Follower
from toolkit.launch.records import controller
from toolkit.launch.records.jobs import Job
from toolkit.launch.records.record import Record, log_name
from toolkit.support import signals

__all__ = ["show", "stop", "watch"]

_SECONDS = 0.2  # Between two looks at the logs.
_QUESTION = 2.0  # Between two questions to Slurm's controller, which is everybody's.
_LATE = 3.0  # Seconds after which a supervisor that is gone has written all that it will.


def show(record: Record, display: Display, tasks: Sequence[str], attempt: int) -> None:
    """Shows what tasks have written in one attempt."""
    display.expect([Task.parse(name) for name in tasks])
    for name in tasks:
        path = record.directory / log_name(name, attempt)
        try:
            with path.open("rb") as file:
                while lines := file.readlines(1 << 20):
                    display.lines(Task.parse(name), [line.rstrip(b"\r\n") for line in lines if line.strip()])
                    display.wait()
        except OSError as error:
            raise LaunchError(
                asked=f"the log of {name}",
                found=f"{path} can't be read ({(error.strerror or '').lower()})",
                remedy="See `toolkit jobs`",
            ) from error


def watch(job: Job, *, only: Sequence[str] = (), native_logs: bool = False, lines: int | None) -> None:
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
                slurm.follow_job(job.slurm, follower, display, received, cancels=False)
                return
            _watch(job, follower, received)
        except JobStopped:
            raise JobStopped(received[0], then=f"job {job.id} runs on, and `toolkit stop {job.id}` ends it") from None
        finally:
            follower.look()
        follower.conclude()


def _watch(job: Job, follower: Follower, received: Sequence[int]) -> None:
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


def stop(job: Job) -> str:
    """Ends a job, and waits for its end; returns how it is then.

    Raises:
        LaunchError: It runs on another machine.
    """
    if job.alive:
        if job.slurm:
            controller.stop(job.slurm)
        else:
            os.kill(job.pid, signal.SIGTERM)
    elif job.state().startswith("on "):
        raise LaunchError(
            asked=f"`toolkit stop` ends job {job.id}",
            found=f"it was launched on {job.host}",
            remedy=f"Run it there: ssh {job.host} toolkit stop {job.id}",
        )
    while job.alive:
        time.sleep(_QUESTION if job.slurm else _SECONDS)
    return job.state()
