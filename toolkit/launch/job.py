"""Starting the tasks, watching them, and ending all of them with the first that fails."""

import functools
import pathlib
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.errors import JobStopped, RequestError, TaskFailed
from toolkit.launch import failure, stacks
from toolkit.launch.budget import Budget
from toolkit.launch.display import Display
from toolkit.launch.guard import Guard
from toolkit.launch.masking import Masker
from toolkit.launch.ports import exposed
from toolkit.launch.record import Record
from toolkit.launch.reports import Reports
from toolkit.launch.running import RunningTask
from toolkit.launch.spec import JobOptions
from toolkit.launch.tasks import TaskSpec
from toolkit.support import redaction, status

__all__ = ["Job"]

_TICK = 0.05  # Seconds between two looks at the processes.
_DRAIN = 1.0  # Seconds that a process's last output may take: a grandchild can hold the pipe open for ever.
_STRANDED = 5.0  # Seconds that the others get when a task has failed: they wait for it in a collective, and can't save.
_KEPT = 20  # Last lines in failure.json.
_ANSWER = 2.0  # Seconds that tasks get to write their stacks.


class Job:
    """The tasks started here, from start to end.

    Args:
        spec: What was asked.
        tasks: What to start.
        tag: The process tag, in the environment of all that belongs to the job.
        environ: The launcher's environment.
        reports: What tasks report, and the directory for what goes with the job.
        logs: Directory for a log file per task.
        display: Where lines and messages go.
        received: Signals to the launcher are appended to it, by whoever made it.
        budget: Restarts that are left.
        whole: Whether all tasks of the cluster are started here.
    """

    def __init__(
        self,
        spec: JobOptions,
        tasks: Sequence[TaskSpec],
        *,
        tag: str,
        environ: Mapping[str, str],
        reports: Reports,
        logs: pathlib.Path,
        display: Display,
        received: list[int],
        budget: Budget,
        whole: bool,
    ) -> None:
        self.spec = spec
        self.tasks = tasks
        self.tag = tag
        self.environ = environ
        self.reports = reports
        self.logs = logs
        self.record = Record(logs)
        self.scratch = pathlib.Path(reports.scratch)
        self.display = display
        self.budget = budget
        self.whole = whole
        self.running: list[RunningTask] = []
        self._replaced: list[RunningTask] = []
        self._received = received
        self._secrets = redaction.values(environ)
        self._selector = selectors.DefaultSelector()
        self._guard: Any = None
        self._partial: dict[RunningTask, float] = {}
        self._looked = False

    def run(self) -> None:
        """Runs the job to its end; nothing of it is left when this returns or raises.

        Raises:
            TaskFailed: A task failed, or made no progress.
            JobStopped: The launcher received a signal to stop.
        """
        try:
            self._start()
            self._watch()
        finally:
            self._clear()

    def _start(self) -> None:
        self._guard = Guard(self.tag, self.scratch)
        self.reports.watch(self._selector, self._take_report)
        for task in self.tasks:
            self.running.append(self._started(task))

    def _started(self, spec: TaskSpec) -> RunningTask:
        log, stacks_ = self.logs / f"{spec.file_name}.log", self.scratch / f"{spec.file_name}.stacks"
        task = RunningTask(spec, environ=self.environ, log=log, stacks=stacks_, masker=Masker(self._secrets))
        self._guard.add(task.process.pid)
        self._selector.register(task.output.descriptor, selectors.EVENT_READ, functools.partial(self._read, task))
        self.record.task_event("started", task.task, pid=task.process.pid, attempt=int(self.environ[status.ATTEMPT]))
        return task

    def _watch(self) -> None:
        while not self._done():
            self._turn()
            failed = [task for task in self.running if not task.alive and task.code != 0 and not task.given_up]
            if self._received:
                self._stop_on_signal()
            if any(not self._can_do_without(task) for task in failed) or any(map(self._waits_for, self.running)):
                self._fail()
            self._look_for_stall()
            self._say_what_is_open()
        self._say_if_alone()
        # Who has reported a failure ends with a code that says why. Servers wait for ever; the chief's end is theirs.
        self._read_for(10.0, until=lambda: not any(task.alive and task.failed_at for task in self.running))
        self._end(signal.SIGTERM)
        if refused := [task for task in self.running if task.code == RequestError.exit_code and not task.given_up]:
            raise failure.error(refused[0], self.running)  # Nobody served the chief, which came to its end alone.

    def _done(self) -> bool:
        """Returns whether all that end by themselves have: beside parameter servers the chief, and who follows it."""
        ends = {"chief"} if self._has_servers else {"chief", "worker", "evaluator"}
        waited = [task for task in self.running if task.task.job in ends or task.facts.get("follows")]
        return all(task.code == 0 for task in waited or self.running)

    @property
    def _has_servers(self) -> bool:
        return {"ps", "chief"} <= {task.task.job for task in self.running}

    def _can_do_without(self, task: RunningTask) -> bool:
        """Starts a worker that served its chief again, or gives it up; returns whether the job goes on."""
        if not (self._has_servers and task.task.job == "worker" and task.served and (task.code or 0) < 0):
            return False
        others = [other for other in self.running if other.task.job == "worker" and other is not task]
        if self.budget.take():
            self.display.say(f"{task.task} {task.words()}; starting it again, {self.budget.words}")
            # TensorFlow takes one back only when all are there: those that were done without start again, too.
            for lost in (task, *(other for other in others if other.given_up)):
                lost.given_up = True
                self._replaced.append(lost)
                self.running[self.running.index(lost)] = self._started(lost.spec)
            return True
        if self.whole and not any(other.alive and other.served for other in others):
            self.display.say("No worker is left")
            return False
        task.given_up = True
        self.display.say(f"{task.task} {task.words()}; the job goes on without it")
        return True

    def _waits_for(self, task: RunningTask) -> bool:
        """Returns whether the job waits for a task that is stopped; kills a worker that is, if it served its chief."""
        served = self._has_servers and task.task.job == "worker" and task.served
        task.found_stopped = task.found_stopped or (task.frozen() and not served)
        if served and task.frozen():
            self.display.say(f"{task.task} was stopped for longer than --heartbeat_timeout; ending it")
            task.kill()
            self._read_for(1.0, until=lambda: not task.alive)
        return task.found_stopped

    def _say_if_alone(self) -> None:
        """Warns of a script without a strategy, or with one of a single process: every task trains by itself."""
        training = [task for task in self.running if task.task.job in ("chief", "worker")]
        if len(training) > 1 and not any("strategy" in task.facts for task in training):
            self.display.say(
                "note: no task made a strategy of several processes, such as toolkit.strategies.create(); "
                "each ran by itself"
            )

    def _say_what_is_open(self) -> None:
        """Looks once, when the servers listen."""
        if not self._looked and any("strategy" in task.facts or task.served for task in self.running):
            self._looked = True
            if note := exposed({task.task: task.process.pid for task in self.running if task.alive}):
                self.display.say(note)

    def _turn(self, seconds: float = _TICK) -> None:
        """Reads what has come once: output, reports, ends of processes."""
        for key, _ in self._selector.select(seconds):
            key.data()
        for task in self.running:
            if task.poll():
                facts = {"pid": task.process.pid, "code": task.code, "dismissed": task.asked_to_end}
                self.record.task_event("ended", task.task, **facts)
                if task.code == 0:
                    task.facts["state"] = "done"
            task.worked()
        now = time.monotonic()
        for task, since in list(self._partial.items()):
            patience = task.output.patience
            if patience is None:
                del self._partial[task]
            elif now - since > patience:
                del self._partial[task]
                self.display.lines(task.task, task.output.flush(held=now - task.progressed > patience))
                if task.output.patience is not None:
                    self._partial[task] = now
        self.display.draw(lambda: [task.row() for task in self.running])

    def _take_report(self, facts: Mapping[str, Any]) -> None:
        for task in self.running:
            if str(task.task) == facts["task"]:
                task.take_report(facts)

    def _read(self, task: RunningTask) -> None:
        lines = task.output.read()
        task.progressed = time.monotonic()
        self.display.lines(task.task, lines)
        if task.output.patience is not None:
            self._partial.setdefault(task, time.monotonic())
        if task.output.ended:
            self._selector.unregister(task.output.descriptor)

    def _stop_on_signal(self) -> None:
        number = self._received[0]
        name = signal.Signals(number).name
        self.display.say(f"{name}: asking all tasks to end, {self.spec.grace:g} s; once more ends them at once")
        self._end(number)
        raise JobStopped(number)

    def _fail(self) -> None:
        self._read_for(1.0)  # What the others report in the meantime may have come first.
        for task in self.running:
            task.found_stopped = task.found_stopped or task.stopped
        dying = [task for task in self.running if task.alive and failure.dying(task.process.pid)]
        self._read_for(10.0, until=lambda: not any(task.alive for task in dying))
        first = failure.cause(self.running)
        if first.alive and not first.found_stopped:
            self._read_for(self.spec.grace, until=lambda: not failure.cause(self.running).alive)
            first = failure.cause(self.running)
        self._end(signal.SIGTERM, within=_STRANDED)
        lines = first.output.last_lines()[-_KEPT:]
        self.record.task_failed(first.task, code=first.code, words=first.words(), lines=lines)
        raise failure.error(first, self.running)

    def _look_for_stall(self) -> None:
        alive = [task for task in self.running if task.alive]
        latest = max((task.progressed for task in self.running), default=0.0)
        if not self.spec.stall_timeout or not alive or time.monotonic() - latest < self.spec.stall_timeout:
            return
        for task in alive:
            task.ask_for_stacks()
        self._read_for(_ANSWER)
        where = stacks.culprits({str(task.task): task.stacks() for task in alive})
        self._end(signal.SIGTERM, within=_STRANDED)
        raise TaskFailed(
            f"No task made progress for {self.spec.stall_timeout:g} s, so the job was stopped. {where}\n"
            f"Each task's Python stacks are at the end of its log in {self.logs}",
            code=1,
        )

    def _read_for(self, seconds: float, until: Any = None) -> None:
        """Reads what tasks write and report for so long, or until `until` returns true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not (until and until()):
            self._turn(min(_TICK, seconds))

    def _end(self, number: int, *, within: float = float("inf")) -> None:
        """Asks all tasks to end, waits, and ends those that haven't; a further signal to the launcher cuts it short."""
        known = len(self._received)
        for task in self.running:
            task.asked_to_end = task.alive
            if task.found_stopped:
                task.kill()
            task.signal(number)
        self._read_for(
            min(self.spec.grace, within),
            until=lambda: not any(task.alive for task in self.running) or len(self._received) > known,
        )
        for task in self.running:
            task.kill()
        self._read_for(_DRAIN * 5, until=lambda: not any(task.alive for task in self.running))
        self._read_for(_DRAIN, until=lambda: all(task.output.ended for task in self.running))

    def _clear(self) -> None:
        for task in self.running:
            task.kill()
            task.process.wait()
        if self._guard is not None:
            self._guard.close()
        for task in (*self.running, *self._replaced):
            self.display.lines(task.task, task.output.flush())
            task.output.close()
        self._selector.close()
