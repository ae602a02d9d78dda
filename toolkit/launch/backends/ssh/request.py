"""What the job is to be, checked before any host is called."""

import dataclasses
import re

from toolkit.errors import LaunchError
from toolkit.launch import check_times
from toolkit.launch.backends.ssh.hosts import Host

__all__ = ["Request"]

_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A job on several hosts.

    Attributes:
        command: ("train.py", "--flag") or ("-m", "recipes.cifar_multi_worker", "--flag").
        hosts: Where; the first one's first task is the chief, and writes the run directory there.
        jobs: How many tasks of each job; () for as many workers as the hosts have room for.
        directory: Where the tasks run on each host; relative to the home there.
        copy_from: What is copied to `directory` first; None where it is there already.
        python: The interpreter on each host.
        environment: Added to the tasks' environment.
        path: PYTHONPATH there; None for what the host has.
        ssh_config: A file for `ssh -F`; None for the user's own.
        log_dir: Where the tasks' output goes, here; None for a new directory under ./runs.
        tee: Show the tasks' output here too.
        only: Tasks whose output is shown; () for all.
        as_is: Leave TensorFlow's own strategy to scripts that make one.
        start_timeout: Seconds that tasks wait for one another, and restarts for hosts.
        heartbeat_timeout: Seconds after which a host that isn't heard of counts as gone.
        stall_timeout: Seconds without progress after which the job is stopped; 0 for never.
        grace: Seconds between asking tasks to end and ending them.
        max_restarts: How often a job that failed is started again within `restart_window` seconds.
        restart_window: Seconds.
        min_workers: With so many tasks left the job goes on without hosts that are gone; 0 for only with all.
        open_network: Whether hosts may have public addresses.

    Raises:
        LaunchError: Something can't be meant so.
    """

    command: tuple[str, ...]
    hosts: tuple[Host, ...]
    jobs: tuple[tuple[str, int], ...] = ()
    directory: str
    copy_from: str | None = None
    python: str
    environment: tuple[tuple[str, str], ...] = ()
    path: str | None = None
    ssh_config: str | None = None
    log_dir: str | None = None
    tee: bool = True
    only: tuple[str, ...] = ()
    as_is: bool = False
    start_timeout: float = 300.0
    heartbeat_timeout: float = 15.0
    stall_timeout: float = 1800.0
    grace: float = 15.0
    max_restarts: int = 0
    restart_window: float = 3600.0
    min_workers: int = 0
    open_network: bool = False

    def __post_init__(self) -> None:
        if not self.command or self.command == ("-m",):
            raise LaunchError(
                asked="--hosts starts a script or a module there",
                found="none is named",
                remedy="Name it after launch's own flags: -m recipes.cifar_multi_worker",
            )
        check_times(
            heartbeat_timeout=self.heartbeat_timeout,
            start_timeout=self.start_timeout,
            stall_timeout=self.stall_timeout,
            grace=self.grace,
            restart_window=self.restart_window,
        )
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
