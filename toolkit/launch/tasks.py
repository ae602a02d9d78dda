"""A task as it will be started: its command and what is added to its environment."""

import dataclasses
import pathlib
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence

from toolkit import cluster as _cluster
from toolkit import devices
from toolkit.cluster import Cluster, Task
from toolkit.cluster.addresses import join
from toolkit.errors import LaunchError
from toolkit.launch import guard, ports
from toolkit.launch.spec import LaunchSpec
from toolkit.support import redaction, status

__all__ = ["CHILD", "TaskSpec", "own_addresses", "shell_line", "task_specs", "to_start"]

CHILD = str(pathlib.Path(__file__).resolve().with_name("child.py"))  # Runs the user's script in every task.
_STACKS = "{stacks}"  # Replaced by the file for the task's stacks.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One task to start here.

    Attributes:
        task: The task.
        environment: What is added to the launcher's own.
        command: Arguments after the Python interpreter; "{stacks}" is replaced by a file for its stacks.
    """

    task: Task
    environment: Mapping[str, str]
    command: tuple[str, ...]

    @property
    def file_name(self) -> str:
        """What its files are called, without their ends: "worker-0"."""
        return str(self.task).replace(":", "-")

    def arguments(self, stacks: str) -> list[str]:
        """Returns the whole command line."""
        return [sys.executable, *(stacks if argument == _STACKS else argument for argument in self.command)]


def to_start(spec: LaunchSpec, held: ports.HeldPorts) -> tuple[Cluster, tuple[Task, ...]]:
    """Returns the cluster and its tasks that are to be started here, their ports held.

    Raises:
        ClusterError: The file can't be used, or a port is taken.
        LaunchError: No task of the cluster belongs to this machine.
    """
    if spec.cluster is None and spec.cluster_file is None:
        if not _is_here(join(spec.host, 1), own_addresses()):
            raise LaunchError(
                asked=f"--host={spec.host} is where this machine's tasks reach one another",
                found="that is no address of this machine",
                remedy="Leave it out for loopback, or name one of the machine's own addresses",
            )
        cluster = Cluster.at({task: join(spec.host, held.free()) for task in _cluster.numbered(spec.jobs)})
        return cluster, cluster.tasks
    cluster = spec.cluster or _cluster.load(spec.cluster_file or "")
    if not spec.open_network:
        _cluster.refuse_public(cluster)
    if spec.tasks:
        here: Sequence[Task] = [Task.parse(name) for name in spec.tasks]
    else:
        own = own_addresses()
        here = [task for task in cluster.tasks if _is_here(cluster.address(task), own)]
    if not here:
        raise LaunchError(
            asked=f"launch starts this machine's tasks of {spec.cluster_file}",
            found="none of the addresses in it is this machine's",
            remedy="Name the task to start here: --task=worker:0",
        )
    for task in here:
        held.given(_cluster.split(cluster.address(task))[1], task=str(task))
    return cluster, tuple(here)


def task_specs(
    spec: LaunchSpec,
    cluster: Cluster,
    here: Sequence[Task],
    *,
    tag: str,
    socket_path: str,
    job_id: str,
    environ: Mapping[str, str],
) -> tuple[tuple[TaskSpec, ...], str]:
    """Returns how to start each task, and what the user should know of how GPUs are dealt, "" for nothing.

    Args:
        spec: What was asked.
        cluster: All tasks.
        here: The tasks to start here.
        tag: The process tag, in the environment of all processes of the job.
        socket_path: The socket that tasks report to.
        job_id: The id that the job's files are named by.
        environ: The launcher's environment: what the user has set there stays.
    """
    inventory = devices.inventory.take()
    # Beside parameter servers a chief schedules work, and does none.
    served = any(task.job == "ps" for task in cluster.tasks)
    training = [task for task in here if task.job in (("worker",) if served else ("chief", "worker"))]
    threads = str(max(1, inventory.cores // len(here)))
    gpus, said = _gpus(here, training, environ, [str(gpu.index) for gpu in inventory.gpus])
    specs = []
    for task in here:
        environment = {
            "TF_CONFIG": cluster.tf_config(task),
            "PYTHONUNBUFFERED": "1",
            **{name: threads for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS") if name not in environ},
            **gpus.get(task, {}),
            **_cluster.without_proxies(cluster, environ),
            **ports.ENVIRONMENT,
            status.SOCKET: f"{task}@{socket_path}",
            status.JOB_ID: job_id,
            **({status.PARTIAL: "1"} if len(here) < len(cluster.tasks) else {}),
            guard.TAG: ",".join(filter(None, (environ.get(guard.TAG), tag))),
            status.START_TIMEOUT: f"{spec.start_timeout:g}",
            status.HEARTBEAT_TIMEOUT: f"{spec.heartbeat_timeout:g}",
        }
        command = (CHILD, _STACKS, str(int(spec.as_is)), *spec.command)
        specs.append(TaskSpec(task=task, environment=environment, command=command))
    return tuple(specs), said


def shell_line(task: TaskSpec, environ: Mapping[str, str]) -> str:
    """Returns the task's start as a line for a shell.

    Args:
        task: What to start.
        environ: The environment whose secrets are masked.
    """
    shown = {name: redaction.masked(value, environ) for name, value in task.environment.items()}
    pairs = [f"{name}={shlex.quote(value)}" for name, value in shown.items()]
    command = [redaction.masked(part, environ) for part in task.arguments("/dev/null")]
    return f"env {' '.join(pairs)} {shlex.join(command)}"


def _gpus(
    here: Sequence[Task], training: Sequence[Task], environ: Mapping[str, str], every: Sequence[str]
) -> tuple[dict[Task, dict[str, str]], str]:
    """Deals this machine's GPUs, or those that the user left visible, to the tasks that train, as many to each.

    Returns:
        The variables of each task, and a sentence about GPUs that are left over, "" where there are none.
    """
    if not every:
        return {}, ""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    # Numbers of the user's own mean what they mean to CUDA without us; those of nvidia-smi are in the bus's order.
    order = {"CUDA_DEVICE_ORDER": environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")} if listed is None else {}
    every = every if listed is None else [name for name in listed.split(",") if name.strip()]
    dealt = {task: {**order, "CUDA_VISIBLE_DEVICES": "-1"} for task in here}
    if not every or every == ["-1"] or not training:
        return dealt, ""
    if len(every) < len(training):
        raise LaunchError(
            asked=f"{len(training)} tasks of this machine are to train",
            found=f"there are {len(every)} GPUs to deal out",
            remedy="Start as many tasks as there are GPUs or fewer, or set CUDA_VISIBLE_DEVICES=-1 to train on the CPU",
        )
    share = len(every) // len(training)
    for number, task in enumerate(training):
        dealt[task]["CUDA_VISIBLE_DEVICES"] = ",".join(every[number * share : (number + 1) * share])
    spare = every[share * len(training) :]
    said = f"note: each of {len(training)} tasks gets {share} of {len(every)} GPUs; left over: {', '.join(spare)}"
    return dealt, said if spare else ""


def own_addresses() -> set[str]:
    """Returns the addresses of this machine's interfaces, and of loopback."""
    import psutil

    found = {entry.address.partition("%")[0] for each in psutil.net_if_addrs().values() for entry in each}
    return found | {"127.0.0.1", "::1"}


def _is_here(address: str, own: set[str]) -> bool:
    host = _cluster.split(address)[0]
    try:
        answers = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):  # A label of more than 63 letters is no name.
        return False
    return any(answer[4][0] in own for answer in answers)
