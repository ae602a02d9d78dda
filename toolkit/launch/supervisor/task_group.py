"""The tasks of one start of a job: starts them together, watches them, and ends all of them when one fails."""

import base64
import contextlib
import selectors
import shlex
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolkit.cluster import Cluster, Task
from toolkit.errors import JobStopped, LaunchError, RequestError, TaskFailed
from toolkit.launch import nccl
from toolkit.launch.agent.connection import ConnectedAgent
from toolkit.launch.agent.ports import few
from toolkit.launch.agent.process import end_left_by
from toolkit.launch.display import Display
from toolkit.launch.events import BEAT, Event
from toolkit.launch.record import Failure, Record
from toolkit.launch.spec import Host, JobSpec
from toolkit.launch.supervisor import stacks, state
from toolkit.launch.supervisor.decide import Budget, Next, What, decide
from toolkit.launch.supervisor.state import TaskState
from toolkit.support import files, goodput, signals
from toolkit.support.words import counted

_TICK = 0.05  # Seconds between two checks of signals and of incomplete lines.
_LOOK = 0.25  # Seconds between two looks for what has not happened for too long.
_DRAIN = 1.0  # Seconds to wait for a process's last output: a grandchild can hold the pipe open for ever.
_LEEWAY = 5.0  # Seconds that the event of a task's end may take from another host.
_ANSWER = 2.0  # Seconds that tasks get to report their state and to write their stacks.
_LATE = 10.0  # Seconds that answers of other hosts may take.
_HINT = 60.0  # Seconds without progress after which a first hint says where tasks are, unless the limit is near.
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


class TaskGroup:
    """The tasks of one attempt and their agents.

    Args:
        spec: What was asked.
        agents: Those that start the tasks, by host.
        tasks: The host of each task to start.
        cluster: All tasks.
        number: The attempt's number, from 1.
        record: Keeps what happens, and knows the job's id and its directory.
        display: Where lines and messages go.
        received: The caller appends signals to the launcher to it.
        asked_for_stacks: Likewise those that ask where the tasks are.
        budget: Restarts that are left.
        since: When the attempt before has ended, or the job begun, of the monotonic clock.
        before: What earlier attempts have spent their time on.
        back: Returns the name of a host that is to be taken in again, "" while there is none; None if none is missing.
    """

    def __init__(
        self,
        spec: JobSpec,
        agents: Mapping[Host, ConnectedAgent],
        tasks: Mapping[Task, Host],
        cluster: Cluster,
        *,
        number: int,
        record: Record,
        display: Display,
        received: list[int],
        asked_for_stacks: list[int],
        budget: Budget,
        since: float,
        before: Mapping[str, float],
        back: Callable[[], str] | None = None,
    ) -> None:
        self._spec, self._silence = spec, spec.silence
        self._agents, self._cluster = agents, cluster
        self._number, self._record, self._display = number, record, display
        self._received, self._asked_for_stacks = received, asked_for_stacks
        self._budget, self._back = budget, back
        self._since, self._before = since, dict(before)
        self._whole = len(tasks) == len(cluster.tasks)  # Whether all tasks of the cluster are started here.
        self._several = len(agents) > 1
        self._tasks = [
            TaskState(task, host=host.name if self._several else "", log=record.log(task, number))
            for task, host in tasks.items()
        ]
        self._by_name = {str(task.task): task for task in self._tasks}
        self._homes = {task: agents[host] for task, host in tasks.items()}  # The agent of each task.
        # What agents have said of themselves: that they can't do what they were asked for, and have no task; the host
        # whose agent was told to stop, by which signal; the host that is about to be taken away; the host whose agent
        # ended its tasks because it heard nothing of this launcher, and for how many seconds.
        self._refused: Event | None = None
        self._refusing: list[ConnectedAgent] = []
        self._told_to_stop: tuple[str, int] | None = None
        self._preempted = ""
        self._unheard: tuple[str, int] | None = None
        self._lost_result = ""  # Why what a function has returned is lost.
        self._looks = 0
        self._nccl: list[str] = []  # What agents have heard of NCCL since they were last asked.
        self._looked: dict[ConnectedAgent, int] = {}
        self._accounted = time.monotonic()
        self._ending = max(_ENDING, spec.grace)
        self._holds = False  # Whether the display holds lines back.
        self._said_what_is_open = number > 1
        self._said_who_is_slow = self._said_who_trains_alone = self._said_who_lingers = False
        # The time of progress since which the job stands still, as far as a hint has said where tasks are; the seconds
        # of that after which the next hint is due; and those of the first hint of another standstill.
        self._hinted, self._hint_at, self._patience = float("-inf"), 0.0, _HINT
        self._hinted_at = float("-inf")  # When the last hint was given.
        self._passed = 0.0  # The time of progress for which the learnt limit turned out not to apply.
        self._selector = selectors.DefaultSelector()
        self._connected = list(agents.values())
        for agent in self._connected:
            self._selector.register(agent, selectors.EVENT_READ)

    def run(self) -> bool:
        """Returns True when the job is done, False when it should restart on a host that has come back.

        Nothing of it is left when this returns or raises.

        Raises:
            LaunchError: An agent can't do what was asked for.
            TaskFailed: A task failed, a host is gone, or nobody made progress.
            JobStopped: The launcher received a signal to stop.
        """
        look_at = 0.0
        try:
            self._start()
            while True:
                happened = self._turn() or self._received or self._asked_for_stacks
                if not happened and time.monotonic() < look_at:
                    continue
                look_at = time.monotonic() + _LOOK
                self._act()
                if time.monotonic() - self._accounted > _SPENT:
                    self._accounted = time.monotonic()
                    self._record.add("spent", attempt=self._number, seconds=self.spent(done=True))
                if state.is_done(self._tasks):
                    self._finish()
                    return True
                if self._back and (name := self._back()):
                    self.say(f"launch: {name} is back; the tasks write a checkpoint and start again with it")
                    self._end(signal.SIGTERM)
                    return False
        finally:
            self._budget.advance(state.reached(self._tasks))
            self._clear()

    def spent(self, *, done: bool) -> dict[str, float]:
        """Returns what time was spent on, as the first of the tasks that trains has it.

        Args:
            done: Whether all steps count that were made.
        """
        facts = next((task.facts for task in self._tasks if "spent" in task.facts), {})
        first = self._number == 1
        return goodput.of_attempt(facts, seconds=time.monotonic() - self._since, first=first, done=done)

    def say(self, message: str) -> None:
        """Shows a message and logs it."""
        self._display.say(message)
        self._record.add("note", text=message)

    # What is done about what happens.

    def _act(self) -> None:
        """Acts on what has happened, and on what has not for too long."""
        if self._received:
            self._stop_on_signal()
        if self._refused is not None:
            self._end(signal.SIGTERM)
            raise LaunchError(**{key: self._refused[key] for key in ("asked", "found", "remedy")})
        if self._told_to_stop is not None:
            self._stop_as_told(*self._told_to_stop)
        if self._preempted:
            self.say(
                f"launch: {self._preempted} is about to be taken away (--preempt_when); asking all tasks to end "
                f"within {self._spec.grace:g} s"
            )
            self._end(signal.SIGTERM)
            raise Preempted(signal.SIGTERM)
        if self._unheard is not None:
            self._end_after_silence(*self._unheard)
        self._look_for_lost_hosts()
        for task in state.stopped_for(self._tasks, self._spec.heartbeat_timeout):
            self._take_stopped(task)
        fatal = [task for task in self._tasks if task.code and not task.given_up and not self._do_without(task)]
        lingering = state.lingering(self._tasks, self._ending)
        if fatal or any(task.found_stopped for task in self._tasks) or any(task.script_code for task in lingering):
            self._fail()
        self._say_who_lingers(lingering)
        recently = time.monotonic() - self._ending
        if self._holds and not any(task.alive and (task.failed_at or 0.0) > recently for task in self._tasks):
            self._display.release()
            self._holds = False
        self._look_for_stall()
        self._look_for_the_slowest()
        if all(task.facts["state"] == "training" for task in self._tasks):
            self._say_who_trains_alone()
        if self._asked_for_stacks:
            self._asked_for_stacks.clear()
            where = self._where_tasks_are()
            found = {str(task.task): task.stacks for task in self._tasks if task.alive}
            self._record.add("stacks", tasks=found, text=where)

    def _stop_on_signal(self) -> None:
        number = self._received[0]
        name = signal.Signals(number).name
        self.say(f"{name}: asking all tasks to end within {self._spec.grace:g} s; send it again to end them at once")
        self._end(number)
        raise JobStopped(number)

    def _stop_as_told(self, host: str, number: int) -> None:
        """The agent of this host received a signal: the queue cancels the job, or somebody stops what runs there."""
        cancelled = self._spec.queued
        self._end(number, told_twice=cancelled)
        if cancelled:
            raise JobStopped(number)
        raise TaskFailed(f"{host} received {signal.Signals(number).name}, so the job was stopped.", code=128 + number)

    def _end_after_silence(self, host: str, seconds: int) -> None:
        """This launcher was suspended for so long that the others have given it up."""
        self._end(signal.SIGTERM, within=_STRANDED)
        raise TaskFailed(
            f"This launcher was suspended: {host} heard nothing from it for {seconds} s (--heartbeat_timeout), and "
            "ended its tasks as if the launcher were lost. SIGSTOP suspends it, and so does a sleeping machine.",
            code=1,
        )

    def _look_for_lost_hosts(self) -> None:
        for host, agent in self._agents.items():
            why = self._lost(agent)
            if not why:
                continue
            self._end(signal.SIGTERM, within=_STRANDED)
            self._drop_held()
            names = ", ".join(str(task.task) for task in self._tasks_of(agent))
            if agent.local and agent.scratch:  # Tasks end with the launcher; programs that they started don't.
                end_left_by(agent.scratch)
            raise HostLost(f"The agent on {host.name} is gone: {why}. Its tasks were {names}.", code=1)

    def _take_stopped(self, task: TaskState) -> None:
        """Kills a suspended worker if the job can do without it; otherwise notes that the job waits for it."""
        if not state.serves(task, self._tasks):
            task.found_stopped = True
            return
        self.say(f"{task.task} was stopped for longer than --heartbeat_timeout; ending it")
        self._kill(task)
        self._read_for(1.0, until=lambda: not task.alive)

    def _do_without(self, task: TaskState) -> bool:
        """Restarts a worker that served the chief, or gives it up; returns whether the job goes on."""
        if not (state.serves(task, self._tasks) and (task.code or 0) < 0):
            return False
        others = [other for other in self._tasks if other.task.job == "worker" and other is not task]
        last = self._whole and not any(other.alive and other.served for other in others)
        self._budget.advance(state.reached(self._tasks))
        follows = decide(What.LAST if last else What.SERVING, self._budget)
        if follows is Next.REPLACE:
            self.say(f"{task.task} {task.words()}; starting it again, {self._budget.words}")
            self._restart(task)
        elif follows is Next.WITHOUT:
            task.given_up = True
            self.say(f"{task.task} {task.words()}; the job goes on without it")
        else:
            self.say("No worker is left")
        return follows is not Next.FAIL

    def _fail(self) -> None:
        self._display.hold()
        self._read_for(1.0)  # Another task's report may arrive now and have happened earlier.
        self._look()
        # When a host is lost, tasks on other hosts report failures before that host's heartbeat times out. A host whose
        # tasks have ended may have left on purpose.
        # What such a host had sent before may come when the network is back: what counts is that it answers.
        quiet = [agent for agent in self._agents.values() if agent.silence > 3 * BEAT or not self._answered(agent)]
        quiet = [agent for agent in quiet if any(task.alive for task in self._tasks_of(agent))]
        if quiet:
            heard = lambda agent: agent.silence < BEAT and self._answered(agent)  # noqa: E731
            settled = lambda: all(heard(agent) or self._lost(agent) for agent in quiet)  # noqa: E731
            self._read_for(self._silence, until=settled)
        self._look_for_lost_hosts()  # One may also have gone with what it had to tell.
        for task in self._tasks:
            task.found_stopped = task.found_stopped or (task.alive and task.stopped_since is not None)
        dying = [task for task in self._tasks if task.alive and task.dying]
        self._read_for(10.0, until=lambda: not any(task.alive for task in dying))
        first = state.cause(self._tasks)
        if first.alive and not first.found_stopped:
            left = (first.failed_at or 0.0) + self._ending - time.monotonic()
            self._read_for(left, until=lambda: not state.cause(self._tasks).alive)
            first = state.cause(self._tasks)
        self._end(signal.SIGTERM, within=_STRANDED)
        self._drop_held([first.task])
        raise self._failure(first)

    def _drop_held(self, but: Sequence[Task] = ()) -> None:
        """Says how many lines of other tasks were held back, because they follow from this task's failure."""
        failed = f"{but[0]} had failed" if but else "a task had failed"
        for task, count in self._display.release(of=but).items():
            self._display.say(f"launch: {counted(count, 'line')} that {task} wrote after {failed}: see its log")

    def _failure(self, first: TaskState) -> TaskFailed:
        self._keep(first, first.words(), first.code)
        return state.failed_first(first, self._tasks)

    def _keep(self, first: TaskState, words: str, code: int | None) -> None:
        self._record.keep_failure(
            Failure(
                task=str(first.task),
                host=first.host or socket.gethostname(),
                at=round(time.time(), 3),
                exit_code=code if code is None or code >= 0 else None,
                signal=-code if code is not None and code < 0 else None,
                words=words,
                last_lines=state.last_lines(first)[-_KEPT:],
            )
        )

    def _look_for_stall(self) -> None:
        alive = [task for task in self._tasks if task.alive]
        found = self._stall() if alive else None
        quiet = time.monotonic() - found.last if found else 0.0
        self._hint_at_who_waits()
        if found is None or found.last <= self._passed:
            return
        if quiet < found.limit:
            same = found.last - self._hinted < state.JITTER
            due = quiet >= (self._hint_at if same else min(found.limit / 2, self._patience))
            if due and time.monotonic() - self._hinted_at >= quiet / 2:
                self._hinted, self._hint_at = found.last, 2 * quiet
                # A job that goes on after so long may do it again: each hint takes twice as long as the one before.
                self._patience = max(self._patience, self._hint_at)
                self._hint_at_stall(found, quiet)
            return
        where = self._where_tasks_are()
        again = self._stall()
        if again is None or again.last > found.last:  # The machine was suspended, and this launcher continued first.
            return
        if found.why and not any(stacks.in_training(task.stacks) for task in alive):
            self._passed = found.last  # Its phase was left by an exception.
            return
        first = next((task for task in alive if not stacks.in_a_collective(task.stacks)), alive[0])
        self._end(signal.SIGTERM, within=_STRANDED)
        why = f" {found.why} (--stall_timeout sets another)." if found.why else ""
        text = f"No task made progress for {found.limit:.4g} s, so the job was stopped.{why} {where}"
        self._keep(first, text, None)
        raise TaskFailed(
            f"{text}\nEach task's Python stacks are at the end of its log in {self._record.directory}", code=1
        )

    def _stall(self) -> state.Stall | None:
        return state.stall(self._tasks, limit=self._spec.stall_timeout, floor=self._spec.stall_floor)

    def _hint_at_stall(self, found: state.Stall, quiet: float) -> None:
        self._hinted_at = time.monotonic()
        begins = f"note: no task has written a line, taken a step or computed for {quiet:.0f} s"
        why = f". {found.why}" if found.why else ""
        ends = f"the job is ended after {found.limit:.4g} s of that; --stall_timeout sets another limit"
        self.say(f"{begins}{why}; {ends}. {self._where_tasks_are(each=True)}")

    def _hint_at_who_waits(self) -> None:
        """Says where all tasks are as soon as one reports that it waits long for the others."""
        waiting = [task for task in self._tasks if task.alive and task.waits]
        if not waiting:
            return
        name, seconds, said = waiting[0].task, waiting[0].waits["seconds"], waiting[0].waits["words"]
        for task in waiting:
            task.waits = {}
        if time.monotonic() - self._hinted_at >= seconds / 2:  # The others wait as long, and report it as well.
            self._hinted_at = time.monotonic()
            self.say(f"note: {name} has waited {said}. {self._where_tasks_are(each=True)}")

    def _look_for_the_slowest(self) -> None:
        """Says once which task the others wait for."""
        if self._said_who_is_slow or (found := state.slowest(self._tasks)) is None:
            return
        self._said_who_is_slow = True
        task, share = found
        self._record.add("waits", task=task.task, pid=task.pid, share=round(share, 3))
        self.say(
            f"note: {task.task} keeps the others waiting for {share:.0%} of their time: by its input, or by what it "
            "does between steps"
        )

    def _where_tasks_are(self, *, each: bool = False) -> str:
        """Has tasks log their Python stacks; returns a sentence that names the task the others wait for.

        What NCCL says of its ranks follows in further lines, where tasks use it. Each host's knows of all.

        Args:
            each: Whether lines follow that say where each task is.
        """
        alive = [task for task in self._tasks if task.alive]
        for task in alive:
            task.stacks = ""
        self._send("stacks")
        in_nccl = [task for task in self._tasks if task.facts.get("communication") == "nccl"]
        asked = {self._homes[task.task] for task in in_nccl[:1] + in_nccl[-1:]}
        self._nccl = []
        for agent in asked:
            agent.send("nccl")
        self._read_for(_ANSWER)
        heard = lambda: any(self._nccl) or len(self._nccl) >= len(asked)  # noqa: E731
        silent = lambda task: task.alive and not task.stacks and task.stopped_since is None  # noqa: E731
        self._read_for(_LATE, until=lambda: heard() and not any(map(silent, self._tasks)))
        for task in alive:
            if task.stacks:
                task.output.write(f"\n{_STACKS}\n{task.stacks}\n".encode())
        found = {str(task.task): task.place for task in alive}
        cause = stacks.culprits(found)
        table = stacks.places(found) if each else ""
        witness = nccl.findings(next(filter(None, self._nccl), ""), {str(task.task): task.pid for task in in_nccl})
        return "\n".join(filter(None, [cause, table, witness]))

    def _say_who_lingers(self, lingering: Sequence[TaskState]) -> None:
        """Says once which task goes on in its own threads after the end of its script: that may be meant."""
        found = next((task for task in lingering if task.threads), None)
        if found is not None and not self._said_who_lingers:
            self._said_who_lingers = True
            self.say(
                f"note: {found.task} has finished its script, but its thread {found.threads} still runs, and the job "
                "waits for it"
            )

    def _say_who_trains_alone(self) -> bool:
        """Warns once if no task has a strategy of several processes; returns whether that is so."""
        # With --as_is, tasks don't report their strategy.
        alone = not self._spec.as_is and state.train_alone(self._tasks)
        if alone and not self._said_who_trains_alone:
            self._said_who_trains_alone = True
            self.say(
                "note: no task has created a multi-process strategy, for example with toolkit.strategies.create(), "
                "so each task runs alone"
            )
        return alone

    def _finish(self) -> None:
        """Ends the tasks that never end by themselves. If one reports an error meanwhile, the job has failed."""
        if self._say_who_trains_alone():
            # A task that is about to report an error while the chief ends still gets time for it.
            self._read_for(1.0, until=lambda: not any(task.alive for task in self._tasks))
        # A task that reported a failure is about to exit; wait for its code. Servers end with the chief.
        self._read_for(10.0, until=lambda: not any(task.alive and task.failed_at for task in self._tasks))
        self._end(signal.SIGTERM)
        refused = [task for task in self._tasks if task.code == RequestError.exit_code and not task.given_up]
        if self._lost_result:
            raise TaskFailed(self._lost_result, code=1)
        if refused:  # No task served the chief, and it ended alone.
            raise self._failure(refused[0])

    # What the tasks and their agents are asked for.

    def _start(self) -> None:
        """Starts the tasks."""
        options = {
            "as_is": self._spec.as_is,
            "start_timeout": self._spec.start_timeout,
            "heartbeat_timeout": self._spec.heartbeat_timeout,
            "grace": self._spec.grace,
            "partial": not self._whole,
            "spent": self._before,
        }
        work = base64.b64encode(self._record.call()).decode()
        for agent in self._agents.values():
            agent.send(
                "start",
                call=work,
                cluster=self._cluster.as_dict(),
                tasks=[str(task.task) for task in self._tasks_of(agent)],
                command=list(self._spec.command),
                prefix=shlex.split(self._spec.prefix),
                preempt_when=self._spec.preempt_when,
                environment=self._spec.environment,
                options=options,
                job_id=self._record.id,
                attempt=self._number,
                logs=str(self._record.directory.absolute()),
            )

    def _send(self, kind: str, **facts: Any) -> None:
        for agent in self._agents.values():
            agent.send(kind, **facts)

    def _restart(self, task: TaskState) -> None:
        """Starts a task in place of one that has ended."""
        self._show(task, task.output.flush())
        task.restart()
        self._homes[task.task].send("again", task=str(task.task))

    def _kill(self, task: TaskState) -> None:
        """Kills a task."""
        self._homes[task.task].send("kill", task=str(task.task))

    def _look(self) -> None:
        """Has every agent report the state of its tasks, and waits for that, and so for all that happened before."""
        self._looks += 1
        self._send("look", number=self._looks)
        answered = lambda: all(self._answered(agent) for agent in self._connected)  # noqa: E731
        self._read_for(_LATE if self._several else _ANSWER, until=answered)

    def _answered(self, agent: ConnectedAgent) -> bool:
        """Whether an agent has reported its tasks' state since it was last asked, or has no task."""
        return self._looked.get(agent) == self._looks or agent in self._refusing

    def _end(self, number: int, *, within: float = float("inf"), told_twice: bool = False) -> None:
        """Asks all tasks to end, waits, and kills the rest; another signal to the launcher shortens the wait.

        Args:
            number: The signal that asks them.
            within: Seconds that they get at most, if the job's grace is longer.
            told_twice: Whether a first signal to the launcher is still to come, of the same cause: a queue tells every
                process of a cancelled job, in no order.
        """
        known, began = max(len(self._received), int(told_twice)), time.monotonic()

        def told_again() -> bool:
            nonlocal known
            again = set(self._received[known - 1 :]) if known else set()
            if again == {signal.SIGTERM} and time.monotonic() - began < signals.SAME:
                known = max(known, len(self._received))  # Two `toolkit stop` at once ask for the same.
            return len(self._received) > known

        for task in self._tasks:
            task.asked_to_end = task.alive
            if task.found_stopped:
                self._kill(task)
        self._send("signal", number=int(number))
        self._read_for(
            min(self._spec.grace, within),
            until=lambda: not self._waited_for() or told_again(),
        )
        self._send("finish")
        leeway = _LEEWAY if self._several else 0.0
        self._read_for(_DRAIN * 5 + leeway, until=lambda: not self._waited_for())
        self._read_for(_DRAIN, until=lambda: all(task.output.ended for task in self._tasks))

    def _waited_for(self) -> bool:
        """Returns whether a task still runs on a host that isn't lost."""
        homes = [self._homes[task.task] for task in self._tasks if task.alive]
        return any(home not in self._refusing and not self._lost(home) for home in homes)

    def _lost(self, agent: ConnectedAgent) -> str:
        """Returns why an agent counts as lost; "" if it doesn't."""
        gone = agent not in self._connected
        # On this machine, an agent is silent only if the machine is busy.
        quiet = not agent.local and agent.silence > self._silence
        if not (quiet or gone) or not any(task.alive for task in self._tasks_of(agent)):
            return ""
        # ssh also gives up after a while.
        if quiet or agent.silence > 3 * BEAT:
            return f"nothing was heard of it for {agent.silence:.0f} s"
        return agent.last_line()

    def _tasks_of(self, agent: ConnectedAgent) -> list[TaskState]:
        """Returns the tasks that an agent has started."""
        return [task for task in self._tasks if self._homes[task.task] is agent]

    def _clear(self) -> None:
        """Kills all tasks that still run, and closes the logs."""
        self._send("finish")
        for task in self._tasks:
            self._show(task, task.output.flush())
            task.output.close()
        self._display.release()
        self._selector.close()

    # What comes of them.

    def _turn(self, seconds: float = _TICK) -> bool:
        """Waits for events and takes them; returns whether there were others than output."""
        ready = [key.fileobj for key, _ in self._selector.select(seconds)]
        happened = False
        for host, agent in self._agents.items():
            if not (agent in ready or agent.polled or agent.unsent):
                continue
            # Output is taken last: whether it is shown depends on which task failed.
            for event in sorted(agent.read(), key=lambda event: event["event"] == "output"):
                self._take(host, event)
                happened = happened or event["event"] != "output"
            if agent.gone and agent in self._connected:
                self._connected.remove(agent)
                self._selector.unregister(agent)
                happened = True
        for task in self._tasks:
            if task.output.rest:
                self._show(task, task.output.flush(late=True))
        if self._display.live:
            self._display.draw(lambda: [task.row() for task in self._tasks])
        return happened

    def _read_for(self, seconds: float, until: Any = None) -> None:
        """Takes events for this many seconds, or until `until` returns true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not (until and until()):
            self._turn(min(_TICK, seconds))

    def _take(self, host: Host, event: Event) -> None:
        task = self._by_name.get(event.get("task", ""))
        if task is None:
            self._take_hosts_own(host, event)
        elif self._homes[task.task] is self._agents[host]:  # Events about a task count only from the agent of its host.
            self._take_of_task(task, event)

    def _take_hosts_own(self, host: Host, event: Event) -> None:
        kind = event["event"]
        if kind == "note":
            self.say(f"{host.name}: {event['text']}" if self._several else event["text"])
        elif kind == "refused":
            self._refused = event
            self._refusing.append(self._agents[host])
        elif kind == "signal":
            self._told_to_stop = host.name, event["number"]
        elif kind == "preempted":
            self._preempted = host.name
        elif kind == "looked":
            self._looked[self._agents[host]] = event["number"]
        elif kind == "nccl":
            self._nccl.append(event["text"])
        elif kind == "unheard":
            self._unheard = host.name, event["seconds"]
        elif kind == "open":
            self._say_what_is_open(host, event)

    def _take_of_task(self, task: TaskState, event: Event) -> None:
        kind, failed_before = event["event"], task.failed_at
        self._show(task, task.take(event))
        if failed_before is None and task.failed_at is not None and not task.given_up:
            # Output of other tasks follows from the failure. It would fill pages before the cause is named.
            self._display.hold()
            self._holds = True
        if kind == "output":
            if fault := task.output.fault:
                task.output.fault = ""
                self.say(fault)
        elif kind == "result":
            try:
                self._record.keep_result(task.task, base64.b64decode(event["data"]))
            except OSError as error:
                self._lost_result = f"The result of {task.task} can't be written to {self._record.directory}: {error}"
        elif kind == "started":
            self._record.forget_result(task.task)
            self._record.add("started", task=task.task, host=task.host, pid=task.pid, attempt=self._number)
        elif kind == "ended":
            code, dismissed = (task.code, False) if task.ended_late else (event["code"], task.asked_to_end)
            facts = {"pid": event["pid"], "code": code, "dismissed": dismissed}
            self._record.add("ended", task=task.task, host=task.host, **facts)

    def _show(self, task: TaskState, lines: Sequence[bytes]) -> None:
        if lines:
            self._display.lines(task.task, lines)

    def _say_what_is_open(self, host: Host, event: Event) -> None:
        """Says which ports other machines can reach. Once, because all hosts of a job are alike in this."""
        if self._said_what_is_open:
            return
        self._said_what_is_open = True
        marker = files.state_directory() / "open-ports-said"  # Once per machine, because it doesn't change.
        if marker.exists():
            return
        with contextlib.suppress(OSError):
            files.make_directory(marker.parent)
            marker.touch()
        where = "this machine" if len(self._agents) == 1 else host.name
        close = "Close these ports to other machines (SECURITY.md says how)"
        if self._several:
            close = f"Let a firewall admit these hosts only: {few([h.name for h in self._agents])}"
        self.say(
            f"note: other machines can reach {few(event['ports'])} of {where} at {few(event['addresses'])}. "
            f"TensorFlow's servers there accept commands without a password. {close}. This is said once on a machine."
        )
