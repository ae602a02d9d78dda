"""What a launch is to do, checked."""

import dataclasses
import pathlib
import secrets
import time
from collections.abc import Sequence

from toolkit.cluster import Cluster
from toolkit.errors import LaunchError
from toolkit.support import status

__all__ = ["JobOptions", "LaunchSpec", "check_command", "check_passable", "check_times", "counted", "new_job_id"]

_JOBS = ("chief", "worker", "ps", "evaluator")
_MOST, _MOST_HERE = 100_000, 1000  # Tasks of a job, and on one machine.


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a job is asked for, whether its tasks run on this machine or on hosts that it reaches by ssh.

    Attributes:
        command: ("train.py", "--flag") or ("-m", "recipes.cifar_multi_worker", "--flag").
        jobs: How many tasks of each job, such as (("worker", 2),); () where something else counts them.
        environment: Variables that are added to the tasks' environment.
        log_dir: Where the tasks' output goes, on this machine; None for a new directory under ./runs.
        tee: Show the tasks' output here too.
        only: Tasks whose output is shown, such as ("worker:0",); () for all.
        as_is: Leave TensorFlow's own strategy to scripts that make one.
        start_timeout: Seconds that tasks wait for one another, and restarts for hosts.
        heartbeat_timeout: Seconds of silence after which a worker or a host, or a task that is stopped, counts as gone.
        stall_timeout: Seconds without progress after which the job is stopped; 0 for never.
        grace: Seconds between asking tasks to end and ending them; at most 5 where another has failed.
        max_restarts: How often a job that failed is started again, or a worker beside parameter servers, within
            `restart_window` seconds.
        restart_window: Failures longer ago than so many seconds don't count.
        open_network: Whether the tasks may have public addresses.

    Raises:
        LaunchError: A value is none that it can be.
    """

    command: tuple[str, ...]
    jobs: tuple[tuple[str, int], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    log_dir: str | None = None
    tee: bool = True
    only: tuple[str, ...] = ()
    as_is: bool = False
    start_timeout: float = 300.0
    heartbeat_timeout: float = status.SECONDS_OF_SILENCE
    stall_timeout: float = 1800.0
    grace: float = 15.0
    max_restarts: int = 0
    restart_window: float = 3600.0
    open_network: bool = False

    def __post_init__(self) -> None:
        check_command(self.command)
        check_times(
            heartbeat_timeout=self.heartbeat_timeout,
            start_timeout=self.start_timeout,
            stall_timeout=self.stall_timeout,
            grace=self.grace,
            restart_window=self.restart_window,
        )
        if self.max_restarts < 0:
            raise LaunchError(
                asked=f"--max_restarts={self.max_restarts}",
                found="that is no number of times",
                remedy="Give 0 or more",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchSpec(JobOptions):
    """What the launcher of this machine is to do.

    Attributes:
        cluster_file: A file that describes the cluster; None where `jobs` counts the tasks to start here.
        cluster: The cluster itself, in the place of a file.
        tasks: With a cluster, the only tasks to start here, such as ("worker:1",); () for all of this host.
        host: The address at which tasks that are counted, not described, reach one another.
        attempt: Which attempt of the job this is, from 1, where another launcher counts them.
        job_id: The id of the job; None for the time and a few random letters.

    Raises:
        LaunchError: A value is none that it can be, or there is no such script.
    """

    cluster_file: str | None = None
    cluster: Cluster | None = None
    tasks: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    attempt: int = 1
    job_id: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        described = self.cluster_file is not None or self.cluster is not None
        if bool(self.jobs) == described:
            raise LaunchError(
                asked="launch needs to know how many tasks to start",
                found="both counts and --cluster are given" if self.jobs else "nothing says so",
                remedy="Give --workers=2 (and --ps, --chief, --evaluator), or --cluster=FILE",
            )
        if self.tasks and not described:
            raise LaunchError(
                asked=f"--task={self.tasks[0]} starts one task of a cluster",
                found="no --cluster describes one",
                remedy="Add --cluster=FILE, or leave --task out",
            )
        count = sum(number for _, number in self.jobs)
        if count > _MOST_HERE:
            raise LaunchError(
                asked=f"{count:,} tasks on this machine",
                found=f"that is more than {_MOST_HERE:,}, and each is a process with a TensorFlow of its own",
                remedy="Start fewer",
            )
        fault = "" if self.command[0] == "-m" else _no_file(self.command[0])
        if fault:
            raise LaunchError(
                asked=f"launch starts the script {self.command[0]}",
                found=fault,
                remedy="Check the path, or start a module with -m MODULE",
            )


def new_job_id() -> str:
    """Returns the time and a few random letters, such as "20260719-140512-3fa9"."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def check_command(command: Sequence[str]) -> None:
    """Makes sure that a command names a script or a module, and can be passed to a program.

    Raises:
        LaunchError: It names none, or can't.
    """
    if not command or tuple(command) == ("-m",):
        raise LaunchError(
            asked="launch starts a script or a module",
            found="none is named",
            remedy="Name it after launch's own flags: toolkit launch --workers=2 train.py, or -m MODULE",
        )
    check_passable(command)


def check_passable(arguments: Sequence[str]) -> None:
    """Makes sure that a program can be given these arguments.

    Raises:
        LaunchError: One holds a NUL, which is where an argument ends.
    """
    for argument in arguments:
        if "\0" in argument:
            raise LaunchError(
                asked=f"the argument {argument[:60]!r}",
                found="it holds a NUL, and no program can be given one",
                remedy="Leave the NUL out",
            )


def _no_file(path: str) -> str:
    """Returns why a path is no file to be run; "" where it is one."""
    try:
        if pathlib.Path(path).is_file():
            return ""
        return "that is a directory" if pathlib.Path(path).is_dir() else "there is no such file"
    except OSError as error:  # is_file raises it for a name of 300 letters.
        return (error.strerror or str(error)).lower()


def check_times(*, heartbeat_timeout: float, **others: float) -> None:
    """Makes sure that these are lengths of time, in seconds.

    Raises:
        LaunchError: One isn't.
    """
    for name, value in others.items():
        if not value >= 0:
            raise LaunchError(
                asked=f"--{name}={value}", found="that is no length of time", remedy="Give seconds, 0 or more"
            )
    if not 1 <= heartbeat_timeout <= 3600:
        raise LaunchError(
            asked=f"--heartbeat_timeout={heartbeat_timeout:g}",
            found="workers call one another every second or so",
            remedy="Give from 1 to 3600 seconds",
        )


def counted(jobs: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Returns the jobs that have tasks, in their order.

    Raises:
        LaunchError: A number is negative, nobody would train, or parameter servers have no chief.
    """
    for name, number in jobs:
        if not 0 <= number <= _MOST:
            raise LaunchError(
                asked=f"{number} tasks of job {name}",
                found="that is no number of tasks",
                remedy=f"Give 0 to {_MOST:,}",
            )
    found = {name: number for name, number in jobs if number}
    if found and not {"worker", "chief"} & set(found):
        raise LaunchError(
            asked="launch " + ", ".join(f"{name}: {number}" for name, number in found.items()),
            found="there is no chief or worker, so nobody would train",
            remedy="Add --workers=2, or --chief",
        )
    if "ps" in found and "chief" not in found:
        raise LaunchError(
            asked=f"{found['ps']} parameter servers",
            found="there is no chief, which schedules the workers' steps",
            remedy="Add --chief",
        )
    return tuple((name, found[name]) for name in _JOBS if name in found)
