"""Supervises a job inside a Slurm allocation: runs in the batch script, with an agent on each node by srun.

    python .../alone.py toolkit.launch.backends.allocation DIRECTORY

Restarts stay inside the allocation. The job is queued again when its time is nearly up, of which Slurm tells the batch
script by SIGUSR1, and when a node no longer answers; it then goes on in the same directory, from the last checkpoint.
"""

import dataclasses
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from toolkit.cluster.discovery import expand
from toolkit.errors import JobStopped, LaunchError, TaskFailed, ToolkitError
from toolkit.launch import controller
from toolkit.launch.agent.connection import ConnectedAgent, StartedAgent
from toolkit.launch.backends.slurm import rooms
from toolkit.launch.record import Record
from toolkit.launch.spec import Host, JobSpec
from toolkit.launch.supervisor.agents import Backend
from toolkit.launch.supervisor.supervise import supervise
from toolkit.launch.supervisor.task_group import HostLost, Preempted
from toolkit.support import signals

_TICK = 0.2
_ANSWER = 20  # Seconds in which a node must start a program.


class SlurmBackend(Backend):
    """The nodes of this process's allocation.

    Args:
        spec: What was asked.
        notice: Not empty once Slurm has told that the job's time is nearly up.

    Attributes:
        hosts, addresses, remedy: As `toolkit.launch.supervisor.agents.Backend` has them.
    """

    def __init__(self, spec: JobSpec, notice: Sequence[int]) -> None:
        self.spec = spec
        self._notice = notice
        nodes = expand(os.environ["SLURM_JOB_NODELIST"])
        self.hosts = tuple(Host(node, room) for node, room in zip(nodes, rooms(spec), strict=True))
        self.addresses = {host: host.name for host in self.hosts}
        self.remedy = f"Install this interpreter, with this toolkit, on {{host}} as well: {sys.executable}"

    def call(self, host: Host) -> ConnectedAgent:
        """Returns a new agent on this node."""
        # The step gets all of the job's resources on its node, except what --exact would leave out.
        where = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--cpu-bind=none", "--mpi=none"]
        return StartedAgent(
            ["srun", *where, "--unbuffered", sys.executable, "-m", "toolkit.launch.agent.program"],
            directory=os.getcwd(),
            command=list(self.spec.command),
            number=host.tasks,
            mark=f"slurm-{os.environ['SLURM_JOB_ID']}",
            first=host == self.hosts[0],
            silence=self.spec.silence,
            grace=self.spec.grace,
        )

    def out(self, error: ToolkitError) -> str:
        """Returns why Slurm must queue the job again after this error; "" if it need not."""
        if isinstance(error, Preempted):
            return "a node is about to be taken away"
        if self._notice and not isinstance(error, LaunchError):
            return "its time was nearly up" + (f", and a task failed: {error}" if isinstance(error, TaskFailed) else "")
        return "a node doesn't answer" if isinstance(error, HostLost) and not _nodes_answer() else ""


def _nodes_answer() -> bool:
    """Whether every node of the job can start a program.

    Slurm itself takes minutes to miss another node than this one: until then its failure looks like a task's.
    """
    nodes = os.environ.get("SLURM_NNODES", "1")
    command = ["srun", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=_ANSWER, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _main() -> int:
    """Supervises the job in its allocation; returns its exit code."""
    record, number = Record(pathlib.Path(sys.argv[1])), os.environ["SLURM_JOB_ID"]
    spec: JobSpec = record.job()["spec"]
    # A job that is told to end has the whole notice for a checkpoint.
    spec = dataclasses.replace(spec, grace=math.ceil(max(spec.grace, spec.notice)))
    notice: list[int] = []
    with signals.recorded((signal.SIGTERM, signal.SIGINT)) as received:

        def nearly_up(*_: object) -> None:
            notice.append(1)
            received.append(signal.SIGTERM)

        with signals.handle((signal.SIGUSR1,), nearly_up):
            try:
                why = supervise(spec, lambda: SlurmBackend(spec, notice), received=received, record=record)
            except JobStopped as error:
                controller.cancelled(number)
                return error.exit_code
            except (TaskFailed, LaunchError) as error:
                sys.stderr.write(f"error: {error}\n")
                return error.exit_code
        if why:
            _requeue(number, record, why, received)
        return int(bool(why))


def _requeue(job: str, record: Record, why: str, received: Sequence[int]) -> None:
    """Has Slurm queue the job again, and waits for the signal with which Slurm ends this process."""
    record.add("note", text=f"launch: queueing the job again: {why}")
    record.add("requeue")
    known = len(received)
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode:
        record.add("note", text=f"launch: Slurm can't queue the job again: {done.stderr.strip()}")
        record.end(TaskFailed(f"Slurm job {job} ended and couldn't be queued again: {why}.", code=1))
    else:
        while len(received) == known:
            time.sleep(_TICK)


if __name__ == "__main__":
    sys.exit(_main())
