"""What the job is to be, checked before any host is called: the hosts "a,b:2", and what runs there."""

import dataclasses
import re

from toolkit.errors import LaunchError
from toolkit.launch import JobOptions

__all__ = ["Host", "SshSpec", "parse"]

_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NAME = re.compile(
    r"(?:[\w.+-]+@)?(?P<host>[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.%\w]+\])(?::(?P<tasks>\d{1,4}))?", re.ASCII
)


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine that ssh reaches.

    Attributes:
        name: What ssh takes: a name, an alias of the user's configuration, user@name.
        tasks: How many tasks run there.
    """

    name: str
    tasks: int = 1


def parse(text: str) -> tuple[Host, ...]:
    """Reads "a,b:2,me@c": a task on a, two on b, one on c.

    Raises:
        LaunchError: A name is none, or is there twice.
    """
    hosts: list[Host] = []
    for entry in text.split(","):
        found = _NAME.fullmatch(entry)
        if found is None:
            raise LaunchError(
                asked=f"--hosts={text[:200]}",
                found=f"{entry[:60]!r} is no host" if entry else "a name in it is empty",
                remedy="Write names as ssh takes them, and after a colon how many tasks: --hosts=a,b:2",
            )
        name = entry[: found.start("tasks") - 1] if found["tasks"] else entry
        if found["tasks"] and not int(found["tasks"]):
            raise LaunchError(asked=f"--hosts={text[:200]}", found=f"{name} gets no task", remedy="Leave it out")
        if name in {host.name for host in hosts}:
            raise LaunchError(
                asked=f"--hosts={text[:200]}", found=f"{name} is there twice", remedy=f"Write {name}:2 for two tasks"
            )
        hosts.append(Host(name.removeprefix("[").removesuffix("]"), int(found["tasks"] or 1)))
    return tuple(hosts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SshSpec(JobOptions):
    """A job on several hosts; `jobs` may be () for as many workers as the hosts have room for.

    Attributes:
        hosts: The hosts; the first one's first task is the chief, and writes the run directory there.
        directory: Where the tasks run on each host; relative to the home there.
        copy_from: What is copied to `directory` first; None where it is there already.
        python: The interpreter on each host.
        path: PYTHONPATH there; None for what the host has.
        ssh_config: A file for `ssh -F`; None for the user's own.
        min_workers: The fewest tasks with which the job goes on where hosts are gone; 0 for all.

    Raises:
        LaunchError: A value is none that it can be, or the hosts have other room than the jobs have tasks.
    """

    hosts: tuple[Host, ...]
    directory: str
    copy_from: str | None = None
    python: str
    path: str | None = None
    ssh_config: str | None = None
    min_workers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        room, wanted = sum(host.tasks for host in self.hosts), sum(number for _, number in self.jobs)
        if self.jobs and wanted != room:
            raise LaunchError(
                asked=f"the jobs have {wanted} tasks together",
                found=f"--hosts names room for {room}",
                remedy="Write how many tasks each host gets: --hosts=a:2,b",
            )
        if not 0 <= self.min_workers <= room:
            raise LaunchError(
                asked=f"--min_workers={self.min_workers}",
                found=f"the hosts have room for {room} tasks",
                remedy=f"Give from 1 to {room}",
            )
        if self.min_workers and any(name != "worker" for name, _ in self.jobs):
            raise LaunchError(
                asked=f"--min_workers={self.min_workers} lets a job go on with fewer workers",
                found="this job has other tasks beside them, which it can't do without",
                remedy="Use it with workers only; beside parameter servers a worker is started again by itself",
            )
        for name, _ in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise LaunchError(
                    asked=f"--env={name[:60]!r}",
                    found="that is no name of a variable",
                    remedy="Write --env=NAME for its value here, or --env=NAME=VALUE",
                )
