"""Runs a job from its start to its end: attempts, restarts, messages and records."""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Mapping

from toolkit.cluster import Cluster, Task
from toolkit.errors import ToolkitError
from toolkit.launch import checks, events, jobs
from toolkit.launch.agent.connection import ConnectedAgent
from toolkit.launch.display import Display
from toolkit.launch.record import Record
from toolkit.launch.spec import Host, JobSpec
from toolkit.launch.supervisor.agents import Agents, Backend
from toolkit.launch.supervisor.decide import Budget, Next, What, decide, what_ended
from toolkit.launch.supervisor.task_group import TaskGroup
from toolkit.support import goodput, signals
from toolkit.support.words import counted


def supervise(
    spec: JobSpec,
    backend: Callable[[], Backend],
    *,
    received: list[int],
    record: Record | None = None,
    asks_where: int | None = signal.SIGUSR2,
) -> str:
    """Runs a job to its end: starts its tasks, shows their output, and restarts them as `decide` says.

    Args:
        spec: What is asked.
        backend: Returns where it runs.
        received: The caller appends signals to the launcher to it.
        record: What has been begun of it; None for a new one.
        asks_where: The signal that asks for the tasks' stacks; None for none.

    Returns:
        "" where it is done; else why it is to be queued again.

    Raises:
        RequestError: What was asked can't be done.
        TaskFailed: A task failed, a host is gone, no task made progress, or the launcher itself broke.
        JobStopped: The launcher received a signal to stop.
    """
    # Set from the beginning: somebody may ask a requeued job for its state while it connects, and the signal would kill
    # it.
    with signals.recorded([] if asks_where is None else [asks_where]) as asked_for_stacks:
        return _Job(spec, received, asked_for_stacks, record).run(backend)


class _Job:
    """One job, from its start to its end.

    Args:
        spec, received, record: As `supervise` has them.
        asked_for_stacks: Signals that ask where the tasks are are appended to it.
    """

    agents: Agents
    display: Display
    since: float  # When the last attempt ended.
    spent: dict[str, float]  # What attempts have spent time on.

    def __init__(self, spec: JobSpec, received: list[int], asked_for_stacks: list[int], record: Record | None) -> None:
        self.spec = spec
        self.received = received
        self.asked_for_stacks = asked_for_stacks
        self.record = record

    def run(self, backend: Callable[[], Backend]) -> str:
        """Runs the job; see `supervise`."""
        ended: BaseException | None = None
        try:
            with contextlib.ExitStack() as close:
                try:
                    where = backend()
                    self.agents = Agents(self.spec, where, self.received)
                    close.callback(lambda: self.agents.close(ended))
                    return self._attempts(where, close)
                except BaseException as error:
                    ended = error
                    raise
        except BaseException as error:
            # Once the agents are closed: a launcher that broke for want of descriptors can open the record again.
            if self.record is not None:
                self.record.end(error)
            if isinstance(error, OSError):  # The machine's fault: a sentence says more than where in this code it was.
                raise events.as_failure(error) from error
            raise

    def _begin(self, tasks: Mapping[Task, Host], close: contextlib.ExitStack) -> Record:
        """Begins, now that its hosts have answered."""
        checks.shown(self.spec.show, [str(task) for task in tasks])
        if self.record is None:
            self.record = Record.begin(self.spec)
            jobs.add(self.record, pid=os.getpid())
            self.spec = self.record.spec or self.spec
        self.display = close.enter_context(Display(show=self.spec.show, native_logs=self.spec.native_logs))
        return self.record

    def _attempts(self, where: Backend, close: contextlib.ExitStack) -> str:
        began, before = time.monotonic(), self.record.new() if self.record else []
        self.since, self.spent = began, goodput.of_events(before)
        first = 1 + sum(event["event"] == "attempt" for event in before)
        known = next((event for event in reversed(before) if event["event"] == "restart"), {})
        known = {name: known[name] for name in ("used", "in_vain", "reached") if name in known}
        budget = Budget(self.spec.max_restarts, in_all=self.spec.max_total_restarts, **known)
        used, pause = budget.used, 0.0
        record: Record | None = None
        for number in itertools.count(first):
            error: ToolkitError | None = None
            out, done = "", False
            try:
                self.agents.wait(pause)
                connected = self.agents.connect(again=number > first)
                cluster, tasks = self.agents.cluster()
                record = record or self._begin(tasks, close)
                done = self._attempt(record, number, connected, cluster, tasks, budget, says=number == first)
            except ToolkitError as found:
                error = found
                out = where.out(error)
            follows = decide(what_ended(error, out=bool(out)) if error or done else What.BACK, budget)
            if follows is Next.REQUEUE:
                return out
            if follows is Next.RESTART and record is not None:
                later = f" in {budget.delay:.0f} s" if budget.delay else ""
                text = f"{getattr(error, 'words', error)}\nlaunch: starting the job again{later}, {budget.words}"
                record.add("restart", text=text, **budget.facts)
                self.display.say(text)
                pause = budget.delay
            elif error is not None:
                if follows is Next.FAIL and record is not None:
                    self._say_why_not_again(record, error, budget)
                raise error
            elif follows is Next.END:
                break
            else:
                pause = 0.0
        assert record is not None
        record.forget_failure()
        restarts = budget.used - used
        again = f", after {counted(restarts, 'restart')}" if restarts else ""
        text = f"launch: done in {_duration(time.monotonic() - began)}{again}; logs in {record.directory}"
        self.display.say(text)
        record.end(None, text)
        return ""

    def _say_why_not_again(self, record: Record, error: ToolkitError, budget: Budget) -> None:
        """Says why a job that failed doesn't start again, though it was asked for restarts."""
        if budget.why_none and what_ended(error, out=False) is What.FAILED:
            text = f"launch: the job doesn't start again: {budget.why_none}"
            record.add("note", text=text)
            self.display.say(text)

    def _attempt(
        self,
        record: Record,
        number: int,
        connected: Mapping[Host, ConnectedAgent],
        cluster: Cluster,
        tasks: Mapping[Task, Host],
        budget: Budget,
        *,
        says: bool,
    ) -> bool:
        self.display.expect(list(tasks))
        record.add("attempt", number=number, tasks=[str(task) for task in tasks])
        group = TaskGroup(
            self.spec,
            connected,
            tasks,
            cluster,
            number=number,
            record=record,
            display=self.display,
            received=self.received,
            asked_for_stacks=self.asked_for_stacks,
            budget=budget,
            since=self.since,
            before=self.spent,
            back=self.agents.back if self.agents.missing else None,
        )
        logs = f"logs in {record.directory}"
        if self.spec.place == "local" and not self.spec.rendezvous:
            others = len(cluster.tasks) - len(tasks)
            if says:
                group.say(
                    f"launch: {counted(len(tasks), 'task')} here{f', {others} elsewhere' if others else ''}; {logs}"
                )
        else:
            missing = ", ".join(host.name for host in self.agents.missing)
            without = f", without {missing}" if missing else ""
            group.say(f"launch: {counted(len(tasks), 'task')} on {counted(len(connected), 'host')}{without}; {logs}")
        done = False
        try:
            done = group.run()
            return done
        finally:
            spent = group.spent(done=done)
            record.add("spent", attempt=number, seconds=spent)
            self.since, self.spent = time.monotonic(), goodput.summed(self.spent, spent)


def _duration(seconds: float) -> str:
    """Returns a duration in words: "9 s", "4 min 9 s", "2 h 4 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
