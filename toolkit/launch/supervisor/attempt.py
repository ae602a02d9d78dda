"""One start of a job: starts its tasks, watches them, and ends all of them when one fails."""

import signal
import socket
import time
from collections.abc import Callable, Sequence

from toolkit.cluster import Task
from toolkit.errors import JobStopped, LaunchError, RequestError, TaskFailed
from toolkit.launch.agent import descendants
from toolkit.launch.events import BEAT
from toolkit.launch.job.spec import JobSpec
from toolkit.launch.records.record import Failure
from toolkit.launch.supervisor import failure, stacks, state
from toolkit.launch.supervisor.crew import Crew
from toolkit.launch.supervisor.decide import Budget, Next, What, decide
from toolkit.launch.supervisor.state import TaskState
from toolkit.support import goodput
from toolkit.support.words import counted

__all__ = ["Attempt", "HostLost", "Preempted"]

# Seconds that the other tasks get after a failure. They wait in a collective for the failed task and can't save.
_STRANDED = 5.0
# Seconds that a task gets to end when its script has failed, if the grace is shorter. Output of others is held back.
_ENDING = 10.0
_SPENT = 600.0  # Seconds between two events that say what time was spent on.
_KEPT = 20  # How many last lines failure.json has.
_STACKS = "--- Python stacks, asked for by the launcher ---"  # The log line that introduces them.


class HostLost(TaskFailed):
    """A host no longer answers."""


class Preempted(JobStopped):
    """A host is about to be taken away, and all tasks have ended as after SIGTERM."""


class Attempt:
    """The tasks of one start of a job.

    Args:
        spec: What was asked.
        crew: The tasks, not started yet.
        received: The caller appends signals to the launcher to it.
        asked_for_stacks: Likewise those that ask where the tasks are.
        budget: Restarts that are left.
        since: When the attempt before has ended, or the job begun, of the monotonic clock.
        first: Whether none was before.
        back: Returns the name of a host that is to be taken in again, "" while there is none.
    """

    def __init__(
        self,
        spec: JobSpec,
        crew: Crew,
        *,
        received: list[int],
        asked_for_stacks: list[int],
        budget: Budget,
        since: float = 0.0,
        first: bool = True,
        back: Callable[[], str] = lambda: "",
    ) -> None:
        self.spec = spec
        self.crew = crew
        self.tasks = crew.tasks
        self.budget = budget
        self.since, self.first = since or time.monotonic(), first
        self._accounted = time.monotonic()
        self.back = back
        self._received = received
        self._asked_for_stacks = asked_for_stacks
        self._ending = max(_ENDING, spec.grace)
        self._said_who_is_slow = self._said_who_trains_alone = self._said_who_lingers = False
        self._warned = 0.0  # The time of progress for which a warning was printed last.
        self._passed = 0.0  # The time of progress for which the learnt limit turned out not to apply.

    def spent(self, *, done: bool) -> dict[str, float]:
        """Returns what time was spent on, as the first of the tasks that trains has it.

        Args:
            done: Whether all steps count that were made.
        """
        facts = next((task.facts for task in self.tasks if "spent" in task.facts), {})
        return goodput.of_attempt(facts, seconds=time.monotonic() - self.since, first=self.first, done=done)

    def run(self) -> bool:
        """Returns True when the job is done, False when it should restart on a host that has come back.

        Nothing of it is left when this returns or raises.

        Raises:
            LaunchError: An agent can't do what was asked for.
            TaskFailed: A task failed, a host is gone, or nobody made progress.
            JobStopped: The launcher received a signal to stop.
        """
        try:
            self.crew.start()
            while not state.is_done(self.tasks):
                self.crew.turn()
                self._act()
                if time.monotonic() - self._accounted > _SPENT:
                    self._accounted = time.monotonic()
                    self.crew.record.add("spent", attempt=self.crew.number, seconds=self.spent(done=True))
                if name := self.back():
                    self.crew.say(f"launch: {name} is back; the tasks write a checkpoint and start again with it")
                    self.crew.end(signal.SIGTERM)
                    return False
            self._finish()
            return True
        finally:
            self.budget.advance(state.reached(self.tasks))
            self.crew.clear()

    def _act(self) -> None:
        """Acts on the events that have happened."""
        if self._received:
            self._stop_on_signal()
        if self.crew.refused is not None:
            self.crew.end(signal.SIGTERM)
            raise LaunchError(**{key: self.crew.refused[key] for key in ("asked", "found", "remedy")})
        if self.crew.told_to_stop is not None:
            host, number = self.crew.told_to_stop
            cancelled = self.spec.place == "slurm"
            self.crew.end(number, told_twice=cancelled)
            if cancelled:
                raise JobStopped(number)
            raise TaskFailed(
                f"{host} received {signal.Signals(number).name}, so the job was stopped.", code=128 + number
            )
        if self.crew.preempted:
            self.crew.say(
                f"launch: {self.crew.preempted} is about to be taken away (--preempt_when); asking all tasks to end "
                f"within {self.spec.grace:g} s"
            )
            self.crew.end(signal.SIGTERM)
            raise Preempted(signal.SIGTERM)
        if self.crew.unheard is not None:
            self._end_after_silence(*self.crew.unheard)
        self._look_for_lost_hosts()
        for task in self.tasks:
            if state.stopped_for(task, self.spec.heartbeat_timeout):
                self._take_stopped(task)
        failed = [task for task in self.tasks if not task.alive and task.code != 0 and not task.given_up]
        fatal = [task for task in failed if not self._do_without(task)]
        lingering = [task for task in self.tasks if state.lingers(task, self._ending)]
        if fatal or any(task.found_stopped for task in self.tasks) or any(task.script_code for task in lingering):
            self._fail()
        self._say_who_lingers(lingering)
        if not any(task.alive and time.monotonic() - (task.failed_at or 0.0) < self._ending for task in self.tasks):
            self.crew.display.release()
        self._look_for_stall()
        self._look_for_the_slowest()
        if all(task.facts["state"] == "training" for task in self.tasks):
            self._say_who_trains_alone()
        if self._asked_for_stacks:
            self._asked_for_stacks.clear()
            where = self._where_tasks_are()
            found = {str(task.task): task.stacks for task in self.tasks if task.alive}
            self.crew.record.add("stacks", tasks=found, text=where)

    def _finish(self) -> None:
        """Ends the tasks that never end by themselves. If one reports an error meanwhile, the job has failed."""
        if self._say_who_trains_alone():
            # A task that is about to report an error while the chief ends still gets time for it.
            self.crew.read_for(1.0, until=lambda: not any(task.alive for task in self.tasks))
        # A task that reported a failure is about to exit; wait for its code. Servers end with the chief.
        self.crew.read_for(10.0, until=lambda: not any(task.alive and task.failed_at for task in self.tasks))
        self.crew.end(signal.SIGTERM)
        refused = [task for task in self.tasks if task.code == RequestError.exit_code and not task.given_up]
        if self.crew.lost_result:
            raise TaskFailed(self.crew.lost_result, code=1)
        if refused:  # No task served the chief, and it ended alone.
            raise self._failure(refused[0])

    def _say_who_lingers(self, lingering: Sequence[TaskState]) -> None:
        """Says once which task goes on in its own threads after the end of its script: that may be meant."""
        found = next((task for task in lingering if task.threads), None)
        if found is not None and not self._said_who_lingers:
            self._said_who_lingers = True
            self.crew.say(
                f"note: {found.task} has finished its script, but its thread {found.threads} still runs, and the job "
                "waits for it"
            )

    def _say_who_trains_alone(self) -> bool:
        """Warns once if no task has a strategy of several processes; returns whether that is so."""
        # With --as_is, tasks don't report their strategy.
        alone = not self.spec.as_is and state.train_alone(self.tasks)
        if alone and not self._said_who_trains_alone:
            self._said_who_trains_alone = True
            self.crew.say(
                "note: no task has created a multi-process strategy, for example with toolkit.strategies.create(), "
                "so each task runs alone"
            )
        return alone

    def _do_without(self, task: TaskState) -> bool:
        """Restarts a worker that served the chief, or gives it up; returns whether the job goes on."""
        if not (state.serves(task, self.tasks) and (task.code or 0) < 0):
            return False
        others = [other for other in self.tasks if other.task.job == "worker" and other is not task]
        last = self.crew.whole and not any(other.alive and other.served for other in others)
        self.budget.advance(state.reached(self.tasks))
        follows = decide(What.LAST if last else What.SERVING, self.budget)
        if follows is Next.REPLACE:
            self.crew.say(f"{task.task} {task.words()}; starting it again, {self.budget.words}")
            self.crew.restart(task)
        elif follows is Next.WITHOUT:
            task.given_up = True
            self.crew.say(f"{task.task} {task.words()}; the job goes on without it")
        else:
            self.crew.say("No worker is left")
        return follows is not Next.FAIL

    def _take_stopped(self, task: TaskState) -> None:
        """Kills a suspended worker if the job can do without it; otherwise notes that the job waits for it."""
        if not state.serves(task, self.tasks):
            task.found_stopped = True
            return
        self.crew.say(f"{task.task} was stopped for longer than --heartbeat_timeout; ending it")
        self.crew.kill(task)
        self.crew.read_for(1.0, until=lambda: not task.alive)

    def _look_for_lost_hosts(self) -> None:
        for host, agent in self.crew.agents.items():
            why = self.crew.lost(agent)
            if not why:
                continue
            self.crew.end(signal.SIGTERM, within=_STRANDED)
            self._drop_held()
            names = ", ".join(str(task.task) for task in self.crew.tasks_of(agent))
            if agent.here and agent.scratch:  # Tasks end with the launcher; programs that they started don't.
                descendants.end_of(agent.scratch)
            raise HostLost(f"The agent on {host.name} is gone: {why}. Its tasks were {names}.", code=1)

    def _end_after_silence(self, host: str, seconds: int) -> None:
        """This launcher was suspended for so long that the others have given it up."""
        self.crew.end(signal.SIGTERM, within=_STRANDED)
        raise TaskFailed(
            f"This launcher was suspended: {host} heard nothing from it for {seconds} s (--heartbeat_timeout), and "
            "ended its tasks as if the launcher were lost. SIGSTOP suspends it, and so does a sleeping machine.",
            code=1,
        )

    def _fail(self) -> None:
        self.crew.display.hold()
        self.crew.read_for(1.0)  # Another task's report may arrive now and have happened earlier.
        self.crew.look()
        # When a host is lost, tasks on other hosts report failures before that host's heartbeat times out. A host whose
        # tasks have ended may have left on purpose.
        quiet = [agent for agent in self.crew.agents.values() if agent.silence > 3 * BEAT]
        quiet = [agent for agent in quiet if any(task.alive for task in self.crew.tasks_of(agent))]
        if quiet:
            settled = lambda: all(agent.silence < BEAT or self.crew.lost(agent) for agent in quiet)  # noqa: E731
            self.crew.read_for(self.spec.silence, until=settled)
        self._look_for_lost_hosts()  # One may also have gone with what it had to tell.
        for task in self.tasks:
            task.found_stopped = task.found_stopped or (task.alive and task.stopped_since is not None)
        dying = [task for task in self.tasks if task.alive and task.dying]
        self.crew.read_for(10.0, until=lambda: not any(task.alive for task in dying))
        first = state.cause(self.tasks)
        if first.alive and not first.found_stopped:
            left = (first.failed_at or 0.0) + self._ending - time.monotonic()
            self.crew.read_for(left, until=lambda: not state.cause(self.tasks).alive)
            first = state.cause(self.tasks)
        self.crew.end(signal.SIGTERM, within=_STRANDED)
        self._drop_held([first.task])
        raise self._failure(first)

    def _drop_held(self, but: Sequence[Task] = ()) -> None:
        """Says how many lines of other tasks were held back, because they follow from this task's failure."""
        for task, count in self.crew.display.release(of=but).items():
            self.crew.display.say(f"launch: {counted(count, 'line')} that {task} wrote after that: see its log")

    def _failure(self, first: TaskState) -> TaskFailed:
        self._keep(first, first.words(), first.code)
        return failure.error(first, self.tasks)

    def _keep(self, first: TaskState, words: str, code: int | None) -> None:
        self.crew.record.keep_failure(
            Failure(
                task=str(first.task),
                host=first.host or socket.gethostname(),
                at=round(time.time(), 3),
                exit_code=code if code is None or code >= 0 else None,
                signal=-code if code is not None and code < 0 else None,
                words=words,
                last_lines=failure.last_lines(first)[-_KEPT:],
            )
        )

    def _look_for_stall(self) -> None:
        alive = [task for task in self.tasks if task.alive]
        found = self._stall() if alive else None
        quiet = time.monotonic() - found.last if found else 0.0
        if found is None or quiet < found.limit / 2 or found.last <= self._passed:
            return
        if quiet < found.limit:
            if self._warned < found.last:
                self._warned = found.last
                self._warn_of_stall(found, quiet)
            return
        where = self._where_tasks_are()
        again = self._stall()
        if again is None or again.last > found.last:  # The machine was suspended, and this launcher continued first.
            return
        if found.why and not any(stacks.in_training(task.stacks) for task in alive):
            self._passed = found.last  # Its phase was left by an exception.
            return
        first = next((task for task in alive if not stacks.in_a_collective(task.stacks)), alive[0])
        self.crew.end(signal.SIGTERM, within=_STRANDED)
        why = f" {found.why} (--stall_timeout sets another)." if found.why else ""
        text = f"No task made progress for {found.limit:.4g} s, so the job was stopped.{why} {where}"
        self._keep(first, text, None)
        raise TaskFailed(
            f"{text}\nEach task's Python stacks are at the end of its log in {self.crew.record.directory}", code=1
        )

    def _stall(self) -> state.Stall | None:
        return state.stall(self.tasks, limit=self.spec.stall_timeout, floor=self.spec.stall_floor)

    def _warn_of_stall(self, found: state.Stall, quiet: float) -> None:
        begins = f"note: no task has written a line, taken a step or computed for {quiet:.0f} s"
        ends = f"the job is ended after {found.limit:.4g} s of that (--stall_timeout)"
        if found.why:
            self.crew.say(f"{begins}. {found.why}; {ends}. {self._where_tasks_are()}")
        else:
            self.crew.say(f"{begins}; {ends}. `toolkit stacks {self.crew.record.id}` says where they are")

    def _look_for_the_slowest(self) -> None:
        """Says once which task the others wait for."""
        if self._said_who_is_slow or (found := state.slowest(self.tasks)) is None:
            return
        self._said_who_is_slow = True
        task, share = found
        self.crew.record.add("waits", task=task.task, pid=task.pid, share=round(share, 3))
        self.crew.say(
            f"note: {task.task} keeps the others waiting for {share:.0%} of their time: by its input, or by what it "
            "does between steps"
        )

    def _where_tasks_are(self) -> str:
        """Has tasks log their Python stacks; returns a sentence that names the task the others wait for."""
        alive = [task for task in self.tasks if task.alive]
        for task in alive:
            task.stacks = ""
        self.crew.ask_for_stacks()
        for task in alive:
            if task.stacks:
                task.output.write(f"\n{_STACKS}\n{task.stacks}\n".encode())
        return stacks.culprits({str(task.task): stacks.locate(task.stacks) for task in alive})

    def _stop_on_signal(self) -> None:
        number = self._received[0]
        name = signal.Signals(number).name
        self.crew.say(
            f"{name}: asking all tasks to end within {self.spec.grace:g} s; send it again to end them at once"
        )
        self.crew.end(number)
        raise JobStopped(number)
