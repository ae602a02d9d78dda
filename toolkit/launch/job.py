"""A started job, on this machine or in a queue: finds, watches, queries and stops it."""

import contextlib
import itertools
import os
import pathlib
import signal
import time
from collections.abc import Sequence
from typing import Any

from toolkit.cluster import Task
from toolkit.errors import JobStopped, LaunchError, TaskFailed
from toolkit.launch import jobs
from toolkit.launch.backends import queued
from toolkit.launch.checks import EVERYBODY
from toolkit.launch.display import Display, visible_lines
from toolkit.launch.events import Event, raise_ending
from toolkit.launch.follow import Follower
from toolkit.launch.record import Failure
from toolkit.support import signals

_SECONDS = 0.2  # Seconds between two checks of a job.
_RARELY = 25  # With a queue, every so many checks ask the queue, which all users share.
_ANSWER = 15.0  # Seconds in which a launcher answers.
_LEAVING = 5.0  # Seconds that it may take to exit.
_LATE = 3.0  # Seconds after which a launcher that is gone has written everything.


class Job:
    """A detached job on this machine, by ssh or in a queue.

    Args:
        found: Its id, the beginning of it, or its directory, as `toolkit attach` takes them; None for the newest that
            this user started in the present directory.

    Attributes:
        id: Its id.

    Raises:
        LaunchError: No such job is known on this machine.
    """

    def __init__(self, found: Any = None) -> None:
        self._entry = found if isinstance(found, jobs.Entry) else jobs.find(None if found is None else str(found))
        self.id: str = self._entry.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<Job {self.id}: {self.state}>"

    @property
    def state(self) -> str:
        """Its state: "running", "done", "exit code 1", "stopped", "dead"; in a queue also "pending" and the like."""
        return self._entry.state()

    @property
    def directory(self) -> pathlib.Path:
        """The directory of its logs."""
        return pathlib.Path(self._entry.directory)

    @property
    def failure(self) -> Failure | None:
        """The task that failed first in its last attempt; None if none failed or if it isn't known."""
        return self._entry.record.failure()

    def done(self) -> bool:
        """Returns whether it has ended in any way; for a job on another machine, whether its logs say so."""
        return self._entry.over or not (self._entry.alive or self._entry.elsewhere)

    def wait(self, timeout: float | None = None) -> str:
        """Waits for its end, and returns its state.

        Args:
            timeout: Seconds; None for as long as it takes.

        Raises:
            TimeoutError: It hasn't ended by then. It goes on.
        """
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        looks, every = itertools.count(), _RARELY if self._entry.queue else 1
        while not (self._entry.over or (next(looks) % every == 0 and self.done())):
            if time.monotonic() > deadline:
                raise TimeoutError(f"Job {self.id} hasn't ended within {timeout:g} s; it goes on.")
            time.sleep(_SECONDS)
        ended = time.monotonic()  # Its launcher reports the end a moment before it exits.
        while self._entry.runs and self._entry.pid != os.getpid() and time.monotonic() - ended < _LEAVING:
            time.sleep(_SECONDS / 10)
        return self.state

    def results(self, timeout: float | None = None) -> list[Any]:
        """Waits for its end; returns the function's result in each task, or None for each task of a script.

        They are in the order chief, workers, ps, evaluator. Beside parameter servers `create` returns in the chief
        alone, so the list is [the chief's result, None, None, ...].

        Args:
            timeout: As for `wait`.

        Raises:
            TaskFailed: It failed; the cause is what the function raised.
            JobStopped: It was stopped.
            TimeoutError: It hasn't ended by then.
        """
        from toolkit.launch import functions

        self.wait(timeout)
        record = self._entry.record
        end = next((event for event in record.new() if event["event"] == "end"), None)
        if end is None:
            last_lines = record.beginnings().splitlines()[-1:]
            words = "; its launcher wrote: " + last_lines[0] if last_lines else ""
            raise TaskFailed(f"Job {self.id} is {self.state}; its logs are in {record.directory}{words}", code=1)
        try:
            raise_ending(end)
        except TaskFailed as error:
            raise error from functions.cause(record)
        return functions.results(record)

    def attempts(self) -> dict[int, list[str]]:
        """Returns the tasks of each attempt, by the attempt's number."""
        return {event["number"]: event["tasks"] for event in self._events("attempt")}

    def logs(self, task: str = "", attempt: int | None = None) -> str:
        """Returns a task's output.

        Args:
            task: Such as "worker:1"; "" for the first.
            attempt: Its number, from 1; None for the last.

        Raises:
            LaunchError: There is no such task or attempt.
        """
        number, tasks = self._chosen(attempt, [task] if task else [])
        return b"".join(self._entry.record.written(task or tasks[0], number)).decode(errors="replace")

    def show(self, tasks: Sequence[str], *, attempt: int | None = None, native_logs: bool = False) -> None:
        """Prints the output of tasks.

        Args:
            tasks: Their names; () for all.
            attempt: As for `logs`.
            native_logs: TensorFlow's own notes, too.

        Raises:
            LaunchError: There is no such task or attempt.
        """
        number, every = self._chosen(attempt, tasks)
        with Display(show=tasks or ["all"], native_logs=native_logs) as display:
            display.expect([Task.parse(name) for name in every])
            for name in tasks or every:
                for lines in self._entry.record.written(name, number):
                    display.lines(Task.parse(name), visible_lines(lines.removesuffix(b"\n").split(b"\n")))
                    display.wait()

    def follow(self, *, show: Sequence[str] = (), native_logs: bool = False, lines: int | None = None) -> None:
        """Prints its output until it ends.

        Args:
            show: Names of the tasks whose lines are printed, or "all", or "none"; () for the first one that trains.
            native_logs: TensorFlow's own notes, too.
            lines: How many of each task's last ones are printed at first; None for all of the attempt's.

        Raises:
            LaunchError: The last attempt has no such task.
            TaskFailed: It failed, or its supervisor is gone.
            JobStopped: It was stopped, or this process received a signal: the job runs on.
        """
        if named := [name for name in show if name not in EVERYBODY]:
            self._chosen(None, named)
        with signals.recorded() as received, Display(show=show, native_logs=native_logs) as display:
            follower = Follower(self._entry.record, display)
            follower.catch_up(lines)
            try:
                if queue := self._entry.queue:
                    queue.check_reachable(self._entry.number)
                    queued.follow_job(queue, self._entry.number, follower, display, received, cancels=False)
                    return
                self._follow(follower, received)
            except JobStopped:
                if not received:  # Another program has stopped it.
                    raise
                then = f"job {self.id} runs on, and `toolkit stop {self.id}` ends it"
                raise JobStopped(received[0], then=then) from None
            finally:
                follower.look()
            follower.conclude()

    def stacks(self) -> dict[str, str]:
        """Returns each task's current Python stack.

        Raises:
            LaunchError: It doesn't run, or its launcher doesn't answer.
        """
        return self.where()[1]

    def where(self) -> tuple[str, dict[str, str]]:
        """Returns a text that names the task the others wait for, and all stacks; raises as `stacks` does."""
        self._check_here(f"`toolkit stacks {self.id}`")
        job = self._entry
        begun = [event["event"] for event in self._events("attempt", "requeue")]
        if not job.alive or begun[-1:] != ["attempt"]:  # A job that is queued again has no tasks yet.
            raise LaunchError(
                asked=f"`toolkit stacks {self.id}` asks where its tasks are",
                found=f"the job is {self.state}",
                remedy="See `toolkit jobs`",
            )
        record = job.record
        record.new()
        if job.queue:
            job.queue.ask_where(job.number)
        elif job.stopped:
            raise LaunchError(
                asked=f"the stacks of job {self.id}",
                found="its launcher is stopped, as by SIGSTOP or Ctrl-Z",
                remedy=f"Continue it: kill -CONT {job.pid}",
            )
        elif signals.is_in(job.pid, signal.SIGUSR2, "SigCgt"):  # Otherwise the signal would end a notebook's process.
            os.kill(job.pid, signal.SIGUSR2)
        deadline = time.monotonic() + _ANSWER
        while time.monotonic() < deadline and job.alive:
            for event in record.new():
                if event["event"] == "stacks":
                    return event["text"], event["tasks"]
            time.sleep(_SECONDS)
        raise LaunchError(
            asked=f"the stacks of job {self.id}",
            found=f"its launcher hasn't answered for {_ANSWER:g} s",
            remedy=f"See whether it still runs: `toolkit jobs`; its logs are in {self.directory}",
        )

    def stop(self) -> str:
        """Asks its tasks to end, waits for their end, and returns its state.

        Raises:
            LaunchError: It runs on another machine.
        """
        self._check_here(f"`toolkit stop {self.id}`")
        job = self._entry
        if job.alive:
            if job.queue:
                job.queue.stop(job.number)
            else:
                with contextlib.suppress(ProcessLookupError):  # It ends by itself, or of the first signal.
                    os.kill(job.pid, signal.SIGTERM)
                    os.kill(job.pid, signal.SIGCONT)  # If another program has stopped it.
        # A queue may take hours over a node that is gone; the job's processes have ended by then.
        while job.alive and self.state != "completing":
            time.sleep(_SECONDS * (_RARELY if job.queue else 1))
        return self.state

    def _events(self, *kinds: str) -> list[Event]:
        return [event for event in self._entry.record.new() if event["event"] in kinds]

    def _chosen(self, attempt: int | None, tasks: Sequence[str]) -> tuple[int, list[str]]:
        """Returns an attempt's number (None: the last) and its tasks, after checking that it has the named ones."""
        if not self.directory.is_dir():
            raise LaunchError(
                asked=f"the logs of job {self.id}",
                found=f"its directory {self.directory} is gone",
                remedy="`toolkit jobs` says whether it still runs",
            )
        starts = self.attempts()
        number = max(starts, default=0) if attempt is None else attempt
        if number not in starts:
            raise LaunchError(
                asked=f"attempt {number} of job {self.id} was asked for",
                found=f"its last attempt is {max(starts)}" if starts else "the job hasn't started any",
                remedy="See `toolkit jobs`",
            )
        for task in tasks:
            if task not in starts[number]:
                found = f"the tasks are {', '.join(starts[number][:12])}"
                raise LaunchError(asked=f"what {task} wrote", found=found, remedy="Name one of them")
        return number, starts[number]

    def _follow(self, follower: Follower, received: Sequence[int]) -> None:
        gone = 0.0
        while follower.end is None:
            follower.look()
            if received:
                raise JobStopped(received[0])
            gone = 0.0 if self._entry.runs else gone or time.monotonic()
            if gone and follower.end is None and time.monotonic() - gone > _LATE:
                dead = f"Job {self.id} is dead: its launcher on {self._entry.host} is gone."
                raise TaskFailed(f"{dead} Its logs are in {self.directory}", code=1)
            time.sleep(_SECONDS)

    def _check_here(self, command: str) -> None:
        if self._entry.queue and not self._entry.over:
            self._entry.queue.check_reachable(self._entry.number)
        if self.state.startswith("on "):
            raise LaunchError(
                asked=f"{command} asks its launcher",
                found=f"it was launched on {self._entry.host}",
                remedy=f"Run it there: ssh {self._entry.host} {command.strip('`')}",
            )
