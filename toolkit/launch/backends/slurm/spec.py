"""What the job is to be, checked before sbatch sees it."""

import dataclasses
import pathlib
import re

from toolkit.errors import LaunchError
from toolkit.launch import check_command, check_passable, check_times
from toolkit.support import status

__all__ = ["SlurmSpec"]

_NAME = re.compile(r"[\w.+-]+")
# As sbatch --time has it: minutes, h:m:s, days-hours ...
_TIME = re.compile(r"[0-9]{1,9}(-[0-9]{1,9}(:[0-9]{1,9}){0,2}|(:[0-9]{1,9}){1,2})?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmSpec:
    """A job under Slurm.

    Attributes:
        name: The job's name, as squeue shows it.
        nodes: The number of nodes.
        tasks_per_node: Tasks on each; None for as many as the jobs need, spread evenly.
        jobs: How many tasks of each job, in rank order; () for a worker in each task.
        gpus_per_task: GPUs of each task.
        cpus_per_task: Cores of each task; None for Slurm's default.
        time: Limit, as sbatch has it; None for the partition's.
        notice: Seconds before the limit at which tasks are asked to write a checkpoint and end.
        partition: None for the default one.
        account: None for the user's default.
        logs: Directory for a log of each task, where all nodes see it.
        command: Arguments of the Python interpreter.
        start_timeout: Seconds that tasks wait for one another.
        heartbeat_timeout: Seconds of silence after which a worker counts as gone.
        as_is: Leave TensorFlow's own strategy to scripts that make one.
        max_restarts: How often a job that failed is queued again; the end of its time doesn't count.

    Raises:
        LaunchError: A value is none that sbatch takes.
    """

    name: str
    nodes: int
    tasks_per_node: int | None = None
    jobs: tuple[tuple[str, int], ...] = ()
    gpus_per_task: int = 0
    cpus_per_task: int | None = None
    time: str | None = None
    notice: int = 120
    partition: str | None = None
    account: str | None = None
    logs: pathlib.Path
    command: tuple[str, ...]
    max_restarts: int = 0
    start_timeout: float = 300.0
    heartbeat_timeout: float = status.SECONDS_OF_SILENCE
    as_is: bool = False

    def __post_init__(self) -> None:
        least = {
            "nodes": 1,
            "tasks_per_node": 1,
            "cpus_per_task": 1,
            "notice": 1,
            "gpus_per_task": 0,
            "max_restarts": 0,
        }
        for name, number in least.items():
            value = getattr(self, name)
            if value is not None and value < number:
                raise LaunchError(
                    asked=f"--{name}={value}", found=f"that is less than {number}", remedy=f"Give {number} or more"
                )
        check_times(heartbeat_timeout=self.heartbeat_timeout, start_timeout=self.start_timeout)
        for name in ("name", "partition", "account"):
            value = getattr(self, name)
            if value is not None and not _NAME.fullmatch(value):
                raise LaunchError(
                    asked=f"--{name}={value!r}",
                    found="Slurm's names have letters, digits, _ . + and -",
                    remedy="Write it so",
                )
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise LaunchError(
                asked=f"--time={self.time!r}",
                found="that is no length of time of Slurm's",
                remedy="Write minutes, hours:minutes:seconds, or days-hours",
            )
        if self.time is not None and self.notice >= _seconds(self.time):
            raise LaunchError(
                asked=f"--time={self.time} with {self.notice} s of notice",
                found="tasks would be asked to end as soon as they begin, again and again",
                remedy="Give more time, or less notice with --notice",
            )
        if "\\" in str(self.logs.absolute()):
            raise LaunchError(
                asked=f"--log_dir={str(self.logs)!r}",
                found="Slurm reads a backslash in a log's name in its own way",
                remedy="Name a directory without one",
            )
        check_command(self.command)
        check_passable([str(self.logs)])
        tasks = sum(number for _, number in self.jobs)
        if tasks and self.tasks_per_node is not None and tasks != self.nodes * self.tasks_per_node:
            raise LaunchError(
                asked=f"--nodes={self.nodes} --tasks_per_node={self.tasks_per_node}",
                found=f"the jobs have {tasks} tasks together",
                remedy="Leave --tasks_per_node out, or count the tasks of all jobs",
            )
        if tasks and tasks < self.nodes:
            raise LaunchError(
                asked=f"--nodes={self.nodes}",
                found=f"there are {tasks} tasks to run there",
                remedy="Ask for fewer nodes",
            )

    @property
    def tasks(self) -> int:
        """The number of tasks in all."""
        return sum(number for _, number in self.jobs) or self.nodes * (self.tasks_per_node or 1)

    @property
    def counted(self) -> str:
        """The jobs as TOOLKIT_TASKS has them; "" where each task is a worker."""
        return ",".join(f"{job}:{number}" for job, number in self.jobs)


def _seconds(time: str) -> int:
    """Returns the seconds of a time as Slurm writes it: minutes, minutes:seconds, h:m:s, days-hours, d-h:m, d-h:m:s."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
