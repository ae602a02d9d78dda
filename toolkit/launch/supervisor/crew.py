"""The tasks of one start of a job, together: takes their events, shows their output, signals and ends them."""

import base64
import contextlib
import selectors
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.cluster import Cluster, Task
from toolkit.launch.agent.connection import ConnectedAgent
from toolkit.launch.agent.ports import few
from toolkit.launch.display.display import Display
from toolkit.launch.events import BEAT, Event, data
from toolkit.launch.job.hosts import Host
from toolkit.launch.job.spec import JobSpec
from toolkit.launch.records.record import Record
from toolkit.launch.supervisor.state import TaskState
from toolkit.support import files

__all__ = ["Crew"]

_TICK = 0.05  # Seconds between two checks of timeouts.
_DRAIN = 1.0  # Seconds to wait for a process's last output: a grandchild can hold the pipe open for ever.
_LEEWAY = 5.0  # Seconds that the event of a task's end may take from another host.
_ANSWER = 2.0  # Seconds that tasks get to report their state and to write their stacks.
_LATE = 10.0  # Seconds that answers of other hosts may take.


class Crew:
    """The tasks and their agents.

    Args:
        spec: What was asked.
        agents: Those that start the tasks, by host.
        tasks: The host of each task to start.
        cluster: All tasks.
        number: The attempt's number, from 1.
        record: Keeps what happens, and knows the job's id and its directory.
        display: Where lines and messages go.
        received: The caller appends signals to the launcher to it.
        spent: What earlier attempts have spent their time on.

    Attributes:
        tasks: What is known of each.
        homes: The agent of each.
        whole: Whether all tasks of the cluster are started here.
        refused: What an agent said that couldn't do what it was asked for.
        told_to_stop: A host whose agent was told to stop, and the signal.
        preempted: A host that is about to be taken away.
        unheard: A host whose agent ended its tasks because it heard nothing of this launcher, and for how many seconds.
        lost_result: Why what a function has returned is lost; "" where nothing is.
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
        spent: Mapping[str, float],
    ) -> None:
        self.spec = spec
        self.agents = agents
        self.cluster = cluster
        self.number = number
        self.record = record
        self.display = display
        self.whole = len(tasks) == len(cluster.tasks)
        several = len(agents) > 1
        self.tasks = [
            TaskState(
                task,
                host=host.name if several else "",
                log=record.log(task, number),
            )
            for task, host in tasks.items()
        ]
        self._by_name = {str(task.task): task for task in self.tasks}
        self.homes = {task: agents[host] for task, host in tasks.items()}
        self._received = received
        self._spent = dict(spent)
        self.refused: Event | None = None
        self._refusing: list[ConnectedAgent] = []  # Agents that have no task.
        self._said_what_is_open = number > 1
        self.told_to_stop: tuple[str, int] | None = None
        self.preempted = ""
        self.unheard: tuple[str, int] | None = None
        self.lost_result = ""
        self._looks = 0
        self._looked: dict[ConnectedAgent, int] = {}
        self._selector = selectors.DefaultSelector()
        self._watched = list(agents.values())
        for agent in self._watched:
            self._selector.register(agent, selectors.EVENT_READ)

    def start(self) -> None:
        """Starts the tasks."""
        options = {
            "as_is": self.spec.as_is,
            "start_timeout": self.spec.start_timeout,
            "heartbeat_timeout": self.spec.heartbeat_timeout,
            "partial": not self.whole,
            "spent": self._spent,
        }
        work = base64.b64encode(self.record.call()).decode()
        for agent in self.agents.values():
            agent.send(
                "start",
                call=work,
                cluster=self.cluster.as_dict(),
                here=[str(task.task) for task in self.tasks_of(agent)],
                command=list(self.spec.command),
                prefix=shlex.split(self.spec.prefix),
                preempt_when=self.spec.preempt_when,
                environment=self.spec.environment,
                options=options,
                job_id=self.record.id,
                attempt=self.number,
                logs=str(self.record.directory.absolute()),
            )

    def say(self, message: str) -> None:
        """Shows a message and logs it."""
        self.display.say(message)
        self.record.add("note", text=message)

    def turn(self, seconds: float = _TICK) -> None:
        """Takes new events."""
        self._selector.select(seconds)
        for host, agent in self.agents.items():
            # Output is taken last: whether it is shown depends on which task failed.
            for event in sorted(agent.read(), key=lambda event: event["event"] == "output"):
                self._take(host, event)
            if agent.gone and agent in self._watched:
                self._watched.remove(agent)
                self._selector.unregister(agent)
        for task in self.tasks:
            self._show(task, task.output.flush(late=True))
        self.display.draw(lambda: [task.row() for task in self.tasks])

    def _take(self, host: Host, event: Event) -> None:
        task = self._by_name.get(event.get("task", ""))
        if task is None:
            self._take_hosts_own(host, event)
        elif self.homes[task.task] is self.agents[host]:  # Events about a task count only from the agent of its host.
            self._take_of_task(task, event)

    def _take_hosts_own(self, host: Host, event: Event) -> None:
        kind = event["event"]
        if kind == "note":
            self.say(f"{host.name}: {event['text']}" if len(self.agents) > 1 else event["text"])
        elif kind == "refused":
            self.refused = event
            self._refusing.append(self.agents[host])
        elif kind == "signal":
            self.told_to_stop = host.name, event["number"]
        elif kind == "preempted":
            self.preempted = host.name
        elif kind == "looked":
            self._looked[self.agents[host]] = event["number"]
        elif kind == "unheard":
            self.unheard = host.name, event["seconds"]
        elif kind == "open":
            self._say_what_is_open(host, event)

    def _take_of_task(self, task: TaskState, event: Event) -> None:
        kind = event["event"]
        task.take(event)
        if task.failed_at is not None and not task.given_up:
            # Output of other tasks follows from the failure. It would fill pages before the cause is named.
            self.display.hold()
        if kind == "output":
            self._show(task, task.output.take(data(event["text"])))
            if fault := task.output.fault:
                task.output.fault = ""
                self.say(fault)
        elif kind == "result":
            try:
                self.record.keep_result(task.task, base64.b64decode(event["data"]))
            except OSError as error:
                self.lost_result = f"The result of {task.task} can't be written to {self.record.directory}: {error}"
        elif kind == "started":
            self.record.forget_result(task.task)
            self.record.add("started", task=task.task, host=task.host, pid=task.pid, attempt=self.number)
        elif kind == "ended":
            code, dismissed = (task.code, False) if task.ended_late else (event["code"], task.asked_to_end)
            facts = {"pid": event["pid"], "code": code, "dismissed": dismissed}
            self.record.add("ended", task=task.task, host=task.host, **facts)

    def _show(self, task: TaskState, lines: Sequence[bytes]) -> None:
        if lines:
            self.display.lines(task.task, lines)

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
        where = "this machine" if len(self.agents) == 1 else host.name
        close = "Close these ports to other machines (SECURITY.md says how)"
        if len(self.agents) > 1:
            close = f"Let a firewall admit these hosts only: {few([h.name for h in self.agents])}"
        self.say(
            f"note: other machines can reach {few(event['ports'])} of {where} at {few(event['addresses'])}. "
            f"TensorFlow's servers there accept commands without a password. {close}. This is said once on a machine."
        )

    def tasks_of(self, agent: ConnectedAgent) -> list[TaskState]:
        """Returns the tasks that an agent has started."""
        return [task for task in self.tasks if self.homes[task.task] is agent]

    def restart(self, task: TaskState) -> None:
        """Starts a task in place of one that has ended."""
        self._show(task, task.output.flush())
        task.restart()
        self.homes[task.task].send("again", task=str(task.task))

    def kill(self, task: TaskState) -> None:
        """Kills a task."""
        self.homes[task.task].send("kill", task=str(task.task))

    def ask_for_stacks(self) -> None:
        """Has tasks write their stacks, and waits for them."""
        for agent in self.agents.values():
            agent.send("stacks")
        self.read_for(_ANSWER)
        if len(self.agents) > 1:
            self.read_for(_LATE, until=lambda: not any(task.alive and not task.stacks for task in self.tasks))

    def lost(self, agent: ConnectedAgent) -> str:
        """Returns why an agent counts as lost; "" if it doesn't."""
        # On this machine, an agent is silent only if the machine is busy.
        quiet = agent.silence > self.spec.silence and not agent.here
        if not (quiet or agent.gone) or not any(task.alive for task in self.tasks_of(agent)):
            return ""
        # ssh also gives up after a while.
        if quiet or (agent.gone and agent.silence > 3 * BEAT):
            return f"nothing was heard of it for {agent.silence:.0f} s"
        return agent.last_line()

    def look(self) -> None:
        """Has every agent report the state of its tasks, and waits for that, and so for all that happened before."""
        self._looks += 1
        for agent in self.agents.values():
            agent.send("look", number=self._looks)
        waited = [agent for agent in self.agents.values() if agent not in self._refusing]
        seconds = _LATE if len(self.agents) > 1 else _ANSWER
        self.read_for(seconds, until=lambda: all(a.gone or self._looked.get(a) == self._looks for a in waited))

    def read_for(self, seconds: float, until: Any = None) -> None:
        """Takes events for this many seconds, or until `until` returns true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not (until and until()):
            self.turn(min(_TICK, seconds))

    def end(self, number: int, *, within: float = float("inf"), told_twice: bool = False) -> None:
        """Asks all tasks to end, waits, and kills the rest; another signal to the launcher shortens the wait.

        Args:
            number: The signal that asks them.
            within: Seconds that they get at most, if the job's grace is longer.
            told_twice: Whether a first signal to the launcher is still to come, of the same cause: Slurm tells every
                process of a cancelled job, in no order.
        """
        known = max(len(self._received), int(told_twice))
        for task in self.tasks:
            task.asked_to_end = task.alive
            if task.found_stopped:
                self.kill(task)
        for agent in self.agents.values():
            agent.send("signal", number=int(number))
        self.read_for(
            min(self.spec.grace, within),
            until=lambda: not self._waited_for() or len(self._received) > known,
        )
        for agent in self.agents.values():
            agent.send("finish")
        leeway = _LEEWAY if len(self.agents) > 1 else 0.0
        self.read_for(_DRAIN * 5 + leeway, until=lambda: not self._waited_for())
        self.read_for(_DRAIN, until=lambda: all(task.output.ended for task in self.tasks))

    def _waited_for(self) -> bool:
        """Returns whether a task still runs on a host that isn't lost."""
        homes = [self.homes[task.task] for task in self.tasks if task.alive]
        return any(home not in self._refusing and not self.lost(home) for home in homes)

    def clear(self) -> None:
        """Kills all tasks that still run, and closes the logs."""
        for agent in self.agents.values():
            agent.send("finish")
        for task in self.tasks:
            self._show(task, task.output.flush())
            task.output.close()
        self.display.release()
        self._selector.close()
