"""Supervises a job inside what a queue gave it: runs in the batch script, with an agent on each node.

    python .../alone.py toolkit.launch.backends.allocation DIRECTORY

Restarts stay inside the allocation. The job is queued again when its time is nearly up, of which the queue tells the
batch script, and when a node no longer answers; it then goes on in the same directory, from the last checkpoint.
"""

import dataclasses
import math
import os
import pathlib
import signal
import sys
import time
from collections.abc import Sequence

from toolkit.errors import JobStopped, LaunchError, TaskFailed, ToolkitError
from toolkit.launch import queues
from toolkit.launch.agent.connection import ConnectedAgent, StartedAgent
from toolkit.launch.record import Record
from toolkit.launch.spec import Host, JobSpec
from toolkit.launch.supervisor.agents import Backend
from toolkit.launch.supervisor.supervise import supervise
from toolkit.launch.supervisor.task_group import HostLost, Preempted
from toolkit.support import signals
from toolkit.support.words import counted

_TICK = 0.2
_ANSWER = 20  # Seconds in which a node must start a program.


class QueueBackend(Backend):
    """The nodes that a queue gave this process's job.

    Args:
        spec: What was asked.
        notice: Not empty once the job's time is nearly up.

    Attributes:
        hosts, addresses, remedy: As `toolkit.launch.supervisor.agents.Backend` has them.

    Raises:
        LaunchError: It gave another number of nodes than was asked for.
    """

    def __init__(self, spec: JobSpec, notice: Sequence[int]) -> None:
        self.spec = spec
        self._notice = notice
        self._queue = queues.find(spec.place)
        nodes = self._queue.nodes(os.environ)
        if len(nodes) != spec.nodes:
            raise LaunchError(
                asked=f"--nodes={spec.nodes}",
                found=f"{self._queue.name} gave the job {counted(len(nodes), 'node')}: {', '.join(nodes)[:200]}",
                remedy=f"Ask {self._queue.submits} for that many nodes",
            )
        self.hosts = tuple(Host(node, room) for node, room in zip(nodes, spec.rooms, strict=True))
        self.addresses = {host: host.name for host in self.hosts}
        self.remedy = f"Install this interpreter, with this toolkit, on {{host}} as well: {sys.executable}"

    def call(self, host: Host) -> ConnectedAgent:
        """Returns a new agent on this node."""
        return StartedAgent(
            self._queue.on_node(host.name, [sys.executable, "-m", "toolkit.launch.agent.program"]),
            directory=os.getcwd(),
            command=list(self.spec.command),
            number=host.tasks,
            mark=f"{self.spec.place}-{self._queue.own_number(os.environ)}",
            first=host == self.hosts[0],
            silence=self.spec.silence,
            grace=self.spec.grace,
        )

    def out(self, error: ToolkitError) -> str:
        """Returns why the queue must take the job again after this error; "" if it need not."""
        if isinstance(error, Preempted):
            return "a node is about to be taken away"
        if self._notice and not isinstance(error, LaunchError):
            return "its time was nearly up" + (f", and a task failed: {error}" if isinstance(error, TaskFailed) else "")
        lost = isinstance(error, HostLost) and not self._queue.nodes_answer(os.environ, _ANSWER)
        return "a node doesn't answer" if lost else ""


def _main() -> int:
    """Supervises the job in its allocation; returns its exit code."""
    record = Record(pathlib.Path(sys.argv[1]))
    spec: JobSpec = record.job()["spec"]
    queue = queues.find(spec.place)
    number = queue.own_number(os.environ)
    # A job that is told to end has the whole notice for a checkpoint.
    spec = dataclasses.replace(spec, grace=math.ceil(max(spec.grace, spec.notice)))
    notice: list[int] = []
    received: list[int] = []

    def nearly_up(*_: object) -> None:
        notice.append(1)
        received.append(signal.SIGTERM)

    def told_to_stop(told: int, _: object) -> None:
        received.append(signal.SIGINT if told == signal.SIGINT else signal.SIGTERM)

    with (
        signals.handle(queue.stops, told_to_stop),
        signals.handle((signal.SIGALRM, *queue.notices), nearly_up),
    ):
        signal.setitimer(signal.ITIMER_REAL, queue.clock(spec) or 0)
        try:
            why = supervise(
                spec,
                lambda: QueueBackend(spec, notice),
                received=received,
                record=record,
                asks_where=queue.asks_where,
            )
        except JobStopped as error:
            queue.cancelled(number)
            return error.exit_code
        except (TaskFailed, LaunchError) as error:
            sys.stderr.write(f"error: {error}\n")
            return error.exit_code
        return _requeue(queue, number, record, why, received) if why else 0


def _requeue(queue: queues.Queue, job: str, record: Record, why: str, received: Sequence[int]) -> int:
    """Has the queue take the job again, and returns the exit code of the batch script, unless a signal ends it."""
    record.add("note", text=f"launch: queueing the job again: {why}")
    record.add("requeue")
    known = len(received)
    try:
        code = queue.requeue(job)
    except LaunchError as error:
        record.add("note", text=f"launch: {queue.name} can't queue the job again: {error.found}")
        record.end(TaskFailed(f"{queue.name} job {job} ended and couldn't be queued again: {why}.", code=1))
        return 1
    while code is None and len(received) == known:
        time.sleep(_TICK)
    return 1 if code is None else code


if __name__ == "__main__":
    sys.exit(_main())
