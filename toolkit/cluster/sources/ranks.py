"""What launchers that only number their processes share: their variables, and the task of each rank.

A rank's job follows from TOOLKIT_TASKS, and every rank works out every other's port by itself.
"""

import sys
from collections.abc import Mapping, Sequence

from toolkit.cluster.addresses import join
from toolkit.cluster.rules import JOBS
from toolkit.cluster.spec import Cluster, Membership, Task, numbered
from toolkit.errors import ClusterError

__all__ = ["MOST", "TASKS", "membership", "text", "whole"]

TASKS = "TOOLKIT_TASKS"  # "chief:1,worker:2,ps:1".
MOST = 100_000  # Tasks.
# Below 32768, where Linux's ports for outgoing connections begin, and away from well-known ones.
_FIRST_PORT, _PORTS = 20000, 10000


def membership(environ: Mapping[str, str], hosts: Sequence[str], *, job: int, rank: int, source: str) -> Membership:
    """Returns the membership of a rank: every rank is a worker, unless TOOLKIT_TASKS says otherwise.

    Args:
        environ: The process's environment.
        hosts: The host of each rank.
        job: A number that all ranks of the job know; jobs with neighbouring numbers get other ports.
        rank: This process's rank.
        source: Who describes the cluster, in words.

    Raises:
        ClusterError: TOOLKIT_TASKS can't be read, or counts other than the ranks.
    """
    tasks = _tasks(environ.get(TASKS), len(hosts))
    addresses = map(join, hosts, _ports(job, len(hosts)))
    return Membership(cluster=Cluster.at(dict(zip(tasks, addresses, strict=True))), task=tasks[rank], source=source)


def _tasks(given: str | None, ranks: int) -> tuple[Task, ...]:
    """Returns the task of each rank: the jobs in the order given, each numbered from 0."""
    counts: list[tuple[str, int]] = []
    for entry in (given or f"worker:{ranks}").split(","):
        job, _, number = entry.strip().partition(":")
        if job not in JOBS or not (number.isascii() and number.isdigit()) or len(number) > 6:
            raise ClusterError(
                asked=f"{TASKS}={(given or '')[:60]!r} says what each rank is",
                found=f"{entry[:60]!r} isn't a job and a number",
                remedy="Write it as chief:1,worker:2,ps:1",
            )
        counts.append((job, int(number)))
    counted = sum(number for _, number in counts)
    if counted != ranks:
        raise ClusterError(
            asked=f"{TASKS}={(given or '')[:60]!r} describes {counted} ranks",
            found=f"{ranks} were started",
            remedy=f"Start {counted}, or change {TASKS}",
        )
    return numbered(counts)


def _ports(job: int, tasks: int) -> list[int]:
    """Returns a port for each rank.

    Jobs with neighbouring numbers get ranges apart, for they may share a host. Ranks differ even on different hosts:
    two hosts by name can be one machine, as when a whole Slurm is tried on one. Past 10,000 tasks ports repeat, on
    hosts far apart in the list.
    """
    start = job % max(1, _PORTS // tasks) * tasks
    return [_FIRST_PORT + (start + rank) % _PORTS for rank in range(tasks)]


def text(environ: Mapping[str, str], name: str, *, launcher: str) -> str:
    """Returns a variable's value, without white space around it.

    Raises:
        ClusterError: It isn't set, though this launcher sets it.
    """
    value = environ.get(name, "").strip()
    if not value:
        raise ClusterError(
            asked=f"{launcher} describes the job in variables such as {name}",
            found=f"{name} is not set",
            remedy=f"Pass {launcher}'s variables on to this process, or set TF_CONFIG instead",
        )
    return value


def whole(environ: Mapping[str, str], name: str, *, launcher: str, most: int = sys.maxsize) -> int:
    """Returns a variable's value as a number of at least 0.

    Raises:
        ClusterError: It isn't set, or isn't such a number, or is more than `most`.
    """
    value = text(environ, name, launcher=launcher)
    fault = ""
    if not (value.isascii() and value.isdigit() and len(value) < 19):
        fault = f"{value[:60]!r}, which is no number"
    elif int(value) > most:
        fault = f"{int(value):,}, which is more than {most:,}"
    if fault:
        raise ClusterError(
            asked=f"{launcher} describes the job in variables such as {name}",
            found=f"{name} is {fault}",
            remedy="Use the value that the launcher sets, or set TF_CONFIG instead",
        )
    return int(value)
