"""What runs in a Slurm allocation: the supervisor, in the batch script, with an agent on each node by srun.

    python -m toolkit.launch.backends.allocation DIRECTORY

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
from collections.abc import Mapping, Sequence

from toolkit.cluster import Cluster, Task
from toolkit.cluster.sources.hostlist import expand
from toolkit.errors import JobStopped, LaunchError, TaskFailed, ToolkitError
from toolkit.launch.backends.remote import RemoteAgent
from toolkit.launch.backends.slurm import rooms
from toolkit.launch.job.hosts import Host
from toolkit.launch.job.spec import JobSpec
from toolkit.launch.records import controller
from toolkit.launch.records.record import Record
from toolkit.launch.supervisor.agents import AgentLike
from toolkit.launch.supervisor.attempt import HostLost
from toolkit.launch.supervisor.layout import assign
from toolkit.launch.supervisor.supervise import supervise
from toolkit.support import signals

__all__: list[str] = []

_ANSWER = 20  # Seconds that a node gets to run a program.


class SlurmPlace:
    """The nodes of the allocation that this process is in.

    Args:
        spec: What was asked.

    Attributes:
        hosts, addresses, remedy, where: As `toolkit.launch.supervisor.agents.Place` has them.
    """

    where = ""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        nodes = expand(os.environ["SLURM_JOB_NODELIST"])
        self.hosts = tuple(Host(node, room) for node, room in zip(nodes, rooms(spec), strict=True))
        self.addresses = {host: host.name for host in self.hosts}
        self.remedy = f"Install this interpreter, with this toolkit, on {{host}} as well: {sys.executable}"

    def call(self, host: Host) -> AgentLike:
        """Returns a new agent on this node."""
        # A step has all of the job on its node, whatever else runs there, but for what --exact would leave out.
        where = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--cpu-bind=none", "--mpi=none"]
        return RemoteAgent(
            ["srun", *where, "--unbuffered", sys.executable, "-m", "toolkit.launch.agent.program"],
            directory=os.getcwd(),
            command=list(self._spec.command),
            number=host.tasks,
            mark=f"slurm-{os.environ['SLURM_JOB_ID']}",
            first=host == self.hosts[0],
            silence=self._spec.silence,
            grace=self._spec.grace,
        )

    def cluster(self, ports: Mapping[Host, Sequence[int]]) -> tuple[Cluster, dict[Task, Host]]:
        """Returns the cluster of the nodes, and each task's node."""
        return assign(self._spec.counts, self.hosts, self.addresses, ports)

    def close(self, ended: ToolkitError | None) -> None:
        """Holds nothing."""


def _nodes_answer() -> bool:
    """Whether a program can be run on every node of the job.

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
    # Who is told to end has the whole notice for a checkpoint.
    spec = dataclasses.replace(spec, grace=math.ceil(max(spec.grace, spec.notice)))
    notice: list[int] = []
    gone: list[HostLost] = []  # A node that Slurm can't run a program on either.
    with signals.recorded((signal.SIGTERM, signal.SIGINT)) as received:

        def nearly_up(*_: object) -> None:
            notice.append(1)
            received.append(signal.SIGTERM)

        def may_try(error: TaskFailed) -> bool:
            if isinstance(error, HostLost) and not _nodes_answer():
                gone.append(error)
            return error not in gone

        with signals.handle((signal.SIGUSR1,), nearly_up):
            why = ""
            try:
                supervise(
                    spec,
                    lambda: SlurmPlace(spec),
                    received=received,
                    record=record,
                    retries=may_try,
                    goes_on=lambda error: error in gone or (bool(notice) and not isinstance(error, LaunchError)),
                )
                return 0
            except (JobStopped, TaskFailed, LaunchError) as error:
                code = error.exit_code
                if error in gone:
                    why = "a node doesn't answer"
                elif notice and not isinstance(error, LaunchError):
                    why = "its time was nearly up" + (
                        f", and a task failed: {error}" if isinstance(error, TaskFailed) else ""
                    )
                elif isinstance(error, JobStopped):
                    controller.cancelled(number)
                else:
                    sys.stderr.write(f"error: {error}\n")
        if why:
            _requeue(number, record, why)
        return code


def _requeue(job: str, record: Record, why: str) -> None:
    record.add("note", text=f"launch: queueing the job again: {why}")
    record.add("requeue")
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode:
        record.add("note", text=f"launch: Slurm can't queue the job again: {done.stderr.strip()}")
        record.end(TaskFailed(f"Slurm job {job} ended and couldn't be queued again: {why}.", code=1))
    else:
        signal.pause()  # Slurm ends this process.


if __name__ == "__main__":
    sys.exit(_main())
