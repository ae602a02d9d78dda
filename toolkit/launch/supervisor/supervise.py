"""A job from its start to its end: attempts, restarts, and what is said and kept of it."""

import os
import signal
import time
from collections.abc import Callable, Mapping

from toolkit.errors import TaskFailed, ToolkitError
from toolkit.launch.display.display import Display
from toolkit.launch.job import checks
from toolkit.launch.job.hosts import Host
from toolkit.launch.job.spec import JobSpec
from toolkit.launch.records import jobs
from toolkit.launch.records.record import Record, log_name
from toolkit.launch.supervisor.agents import AgentLike, Agents, Place
from toolkit.launch.supervisor.attempt import Attempt
from toolkit.launch.supervisor.budget import Budget, attempts
from toolkit.launch.supervisor.crew import Crew
from toolkit.support import signals
from toolkit.support.words import counted

__all__ = ["supervise"]


def supervise(
    spec: JobSpec,
    place: Callable[[], Place],
    *,
    received: list[int],
    record: Record | None = None,
    retries: Callable[[TaskFailed], bool] = lambda _: True,
    goes_on: Callable[[ToolkitError], bool] = lambda _: False,
) -> None:
    """Runs a job to its end: starts its tasks, shows what they do, and starts them again as often as it may.

    Args:
        spec: What is asked.
        place: Returns where it runs.
        received: Signals to the launcher are appended to it, by whoever made it.
        record: What has been begun of it; None for a new one.
        retries: Returns whether a failure may be mended by another attempt here.
        goes_on: Returns whether what has ended the job here isn't its end.

    Raises:
        RequestError: What was asked can't be done.
        TaskFailed: A task failed, a host is gone, or no task made progress.
        JobStopped: The launcher received a signal to stop.
    """
    # From the beginning: a job that is queued again is asked where it is while it connects, and would die of it.
    with signals.recorded((signal.SIGUSR2,)) as asked_for_stacks:
        _supervise(spec, place, received, record, retries, goes_on, asked_for_stacks)


def _supervise(
    spec: JobSpec,
    place: Callable[[], Place],
    received: list[int],
    record: Record | None,
    retries: Callable[[TaskFailed], bool],
    goes_on: Callable[[ToolkitError], bool],
    asked_for_stacks: list[int],
) -> None:
    agents: Agents | None = None
    ended: ToolkitError | None = None
    display: Display | None = None
    try:
        where = place()
        agents = Agents(spec, where, received)
        connected = agents.connect(again=False)
        _, tasks = agents.cluster()
        checks.only(spec.only, [str(task) for task in tasks])
        if record is None:
            record = Record.begin(spec, [log_name(task, 1) for task in tasks])
            jobs.add(record, pid=os.getpid())
        display = Display(tee=spec.tee, only=spec.only, native_logs=spec.native_logs, joined=spec.show != "all")
        job = _Job(spec, agents, record, display, received, where=where.where)
        before = record.new()
        budget = Budget(spec.max_restarts, used=sum(event["event"] == "restart" for event in before))
        first = 1 + sum(event["event"] == "attempt" for event in before)
        job.asked_for_stacks = asked_for_stacks
        job.run(connected, first=first, budget=budget, retries=retries)
    except ToolkitError as error:
        ended = error
        if record is not None and not goes_on(error):
            record.end(error)
        raise
    finally:
        if display is not None:
            display.close()
        if agents is not None:
            agents.close(ended)


class _Job:
    def __init__(
        self,
        spec: JobSpec,
        agents: Agents,
        record: Record,
        display: Display,
        received: list[int],
        *,
        where: str,
    ) -> None:
        self.spec = spec
        self.agents = agents
        self.record = record
        self.display = display
        self.received = received
        self.where = where
        self.asked_for_stacks: list[int] = []  # Signals that ask where the tasks are: `toolkit stacks`.

    def run(
        self,
        connected: Mapping[Host, AgentLike],
        *,
        first: int,
        budget: Budget,
        retries: Callable[[TaskFailed], bool],
    ) -> None:
        began, restarts = time.monotonic(), 0
        if first == 1:
            self.record.forget_failure()

        def attempt(number: int) -> bool:
            nonlocal connected
            if number > first:
                connected = self.agents.connect(again=True)
            return self._attempt(number, connected, budget, first=number == first)

        def say(message: str) -> None:
            nonlocal restarts
            restarts += 1
            self.record.add("restart", text=message)
            self.display.say(message)

        attempts(attempt, first=first, budget=budget, say=say, wait=self.agents.wait, retries=retries)
        self.record.forget_failure()
        again = f", after {restarts} restart{'s' * (restarts > 1)}" if restarts else ""
        text = f"launch: done in {_duration(time.monotonic() - began)}{again}; logs in {self.record.logs}"
        self.display.say(text)
        self.record.end(None, text)

    def _attempt(self, number: int, connected: Mapping[Host, AgentLike], budget: Budget, *, first: bool) -> bool:
        cluster, tasks = self.agents.cluster()
        self.display.expect(list(tasks))
        names = [str(task) for task in tasks]
        self.record.add("attempt", number=number, tasks=names, begins=self.record.log_sizes(names, number))
        crew = Crew(
            self.spec,
            connected,
            tasks,
            cluster,
            number=number,
            record=self.record,
            display=self.display,
            received=self.received,
        )
        logs = f"logs in {self.record.logs}"
        if self.spec.place == "local" and not self.spec.rendezvous:
            others = len(cluster.tasks) - len(tasks)
            elsewhere = f", {others} elsewhere" if others else ""
            if first:
                crew.say(
                    f"launch: {counted(len(tasks), 'task')} here{elsewhere}{' ' * bool(self.where)}{self.where}; {logs}"
                )
        else:
            missing = ", ".join(host.name for host in self.agents.missing)
            without = f", without {missing}" if missing else ""
            crew.say(f"launch: {counted(len(tasks), 'task')} on {counted(len(connected), 'host')}{without}; {logs}")
        back = self.agents.back if self.agents.missing else lambda: ""
        return Attempt(
            self.spec, crew, received=self.received, asked_for_stacks=self.asked_for_stacks, budget=budget, back=back
        ).run()


def _duration(seconds: float) -> str:
    """Returns a length of time in words: "9 s", "4 min 9 s", "2 h 4 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
