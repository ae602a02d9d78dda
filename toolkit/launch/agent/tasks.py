"""What is needed to start a task: its command and its additions to the environment."""

import dataclasses
import pathlib
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence

from toolkit import cluster as _cluster
from toolkit import devices
from toolkit.cluster import Cluster, Task
from toolkit.errors import LaunchError
from toolkit.launch import queues
from toolkit.launch.agent import ports
from toolkit.support import redaction, status

CHILD = str(pathlib.Path(__file__).resolve().parents[1] / "task" / "child.py")  # Runs the user's script in every task.
_STACKS = "{stacks}"  # The agent replaces it by the path of the file for stacks.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One task to be started on this machine.

    Attributes:
        task: The task.
        environment: What is added to the launcher's own.
        command: Arguments after the Python interpreter; "{stacks}" is replaced by a file for its stacks.
        prefix: What starts the interpreter, and its arguments; () for nothing.
    """

    task: Task
    environment: Mapping[str, str]
    command: tuple[str, ...]
    prefix: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        """The stem of its files' names, such as "worker-0"."""
        return str(self.task).replace(":", "-")

    def arguments(self, stacks: str) -> list[str]:
        """Returns the whole command line."""
        return [
            *self.prefix,
            sys.executable,
            *(stacks if argument == _STACKS else argument for argument in self.command),
        ]


def task_specs(
    cluster: Cluster,
    local: Sequence[Task],
    *,
    command: Sequence[str],
    prefix: Sequence[str] = (),
    environ: Mapping[str, str],
    settings: Mapping[str, str],
    as_is: bool,
    partial: bool,
    socket_path: str,
) -> tuple[tuple[TaskSpec, ...], str]:
    """Returns how to start each task, and a message about how GPUs are assigned, or "".

    Args:
        cluster: All tasks.
        local: The tasks to start on this machine.
        command: A script or -m MODULE, with its arguments.
        prefix: A command before it.
        environ: The environment that theirs is added to: what the user has set there stays.
        settings: Variables that all of them get.
        as_is: Whether TensorFlow's own strategies are left to scripts that make one.
        partial: Whether other launchers start the other tasks of the cluster.
        socket_path: The socket that tasks report to.

    Raises:
        LaunchError: There are fewer GPUs than tasks that train, or the command before theirs isn't there.
    """
    if prefix and shutil.which(prefix[0]) is None:
        raise LaunchError(
            asked=f"--prefix={shlex.join(prefix)[:60]!r} starts each task",
            found=f"there is no program {prefix[0]} on {socket.gethostname()}",
            remedy="Install it there, or give its path",
        )
    inventory = devices.inventory.take()
    # With parameter servers, the chief only schedules steps and needs no GPU.
    served = any(task.job == "ps" for task in cluster.tasks)
    trains = ("worker",) if served else ("chief", "worker")
    training, every = [task for task in local if task.job in trains], [t for t in cluster.tasks if t.job in trains]
    threads = str(max(1, inventory.cores // len(local)))
    gpus, note = _gpus(local, training, environ)
    specs = []
    for task in local:
        environment = {
            "TF_CONFIG": cluster.tf_config(task),
            "PYTHONUNBUFFERED": "1",
            **(_ranks(task, every, training) if task in training else {}),
            **_queue_numbers(task, cluster, local, environ),
            **{name: value for name, value in status.HASH_SEED.items() if name not in environ},
            **{name: threads for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS") if name not in environ},
            **gpus.get(task, {}),
            **_cluster.without_proxies(cluster, environ),
            **ports.ENVIRONMENT,
            status.SOCKET: f"{task}@{socket_path}",
            **settings,
            **({status.PARTIAL: "1"} if partial else {}),
        }
        own = (CHILD, _STACKS, str(int(as_is)), *command)
        specs.append(TaskSpec(task=task, environment=environment, command=own, prefix=tuple(prefix)))
    return tuple(specs), note


def _ranks(task: Task, every: Sequence[Task], local: Sequence[Task]) -> dict[str, str]:
    """The variables that torchrun sets and that scripts read: ranks among the tasks that train."""
    numbers = {"RANK": every.index(task), "LOCAL_RANK": local.index(task)}
    return {**{name: str(n) for name, n in numbers.items()}, "WORLD_SIZE": str(len(every))}


def _queue_numbers(task: Task, cluster: Cluster, local: Sequence[Task], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a queue would set if it had started the tasks itself."""
    nodes = list(dict.fromkeys(_cluster.split(cluster.address(each))[0] for each in cluster.tasks))
    ranks = {
        "task": list(cluster.tasks).index(task),
        "local": list(local).index(task),
        "node": nodes.index(_cluster.split(cluster.address(task))[0]),
        "tasks": len(cluster.tasks),
        "nodes": len(nodes),
    }
    return {name: value for queue in queues.every() for name, value in queue.numbers(environ, ranks).items()}


def shell_line(task: TaskSpec, environ: Mapping[str, str], added: Mapping[str, str]) -> str:
    """Returns the shell command that starts the task, without secrets.

    Args:
        task: What to start.
        environ: The environment whose secrets are masked.
        added: What the user adds to it.
    """
    known = {**environ, **added}
    pairs = redaction.masked_command(
        [f"{name}={value}" for name, value in {**added, **task.environment}.items()], known
    )
    named = [name + "=" + shlex.quote(value) for name, _, value in (pair.partition("=") for pair in pairs)]
    return f"env {' '.join(named)} {shlex.join(redaction.masked_command(task.arguments('/dev/null'), known))}"


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of this machine's GPUs for CUDA_VISIBLE_DEVICES, without those that the user has hidden."""
    every = [str(gpu.index) for gpu in devices.inventory.take().gpus]
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if not every or listed is None:
        return every
    names = [name for name in listed.split(",") if name.strip()]
    return [] if names == ["-1"] else names


def _gpus(
    local: Sequence[Task], training: Sequence[Task], environ: Mapping[str, str]
) -> tuple[dict[Task, dict[str, str]], str]:
    """Assigns this machine's visible GPUs to the tasks that train, the same number to each.

    Returns:
        The variables of each task, and a sentence about GPUs that are left over, "" where there are none.
    """
    if not devices.inventory.take().gpus:
        return {}, ""
    # If the user set CUDA_VISIBLE_DEVICES, its numbers keep CUDA's meaning. nvidia-smi numbers GPUs by PCI bus.
    own = "CUDA_VISIBLE_DEVICES" in environ
    order = {} if own else {"CUDA_DEVICE_ORDER": environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
    every = visible_gpus(environ)
    dealt = {task: {**order, "CUDA_VISIBLE_DEVICES": "-1"} for task in local}
    if not every or not training:
        return dealt, ""
    if len(every) < len(training):
        raise LaunchError(
            asked=f"{len(training)} tasks are to train on this machine",
            found=f"it has {len(every)} visible GPUs, fewer than one for each task",
            remedy="Start fewer tasks, or set CUDA_VISIBLE_DEVICES=-1 to train on the CPU",
        )
    share = len(every) // len(training)
    for number, task in enumerate(training):
        dealt[task]["CUDA_VISIBLE_DEVICES"] = ",".join(every[number * share : (number + 1) * share])
    spare = every[share * len(training) :]
    note = f"note: each of {len(training)} tasks gets {share} of {len(every)} GPUs; left over: {', '.join(spare)}"
    return dealt, note if spare else ""


def own_addresses() -> set[str]:
    """Returns the addresses of this machine's network interfaces, loopback included."""
    import psutil

    found = {entry.address.partition("%")[0] for each in psutil.net_if_addrs().values() for entry in each}
    return found | {"127.0.0.1", "::1"}
