"""Which job each rank has, where a launcher only numbers its processes."""

from collections.abc import Sequence

from toolkit.cluster.rules import JOBS
from toolkit.cluster.spec import Task
from toolkit.errors import ClusterError

__all__ = ["VARIABLE", "of_ranks", "shared_out"]

VARIABLE = "TOOLKIT_TASKS"  # "chief:1,worker:2,ps:1".


def of_ranks(given: str | None, *, ranks: int) -> tuple[Task, ...]:
    """Returns the task of each rank: the jobs in the order given, each numbered from 0; workers unless any is given.

    Args:
        given: "chief:1,worker:2,ps:1", or None.
        ranks: How many there are.

    Raises:
        ClusterError: It can't be read, or counts other than `ranks`.
    """
    if not given:
        return tuple(Task("worker", rank) for rank in range(ranks))
    counts: list[tuple[str, int]] = []
    for entry in given.split(","):
        job, _, number = entry.strip().partition(":")
        if job not in JOBS or not (number.isascii() and number.isdigit()) or len(number) > 5:
            raise ClusterError(
                asked=f"{VARIABLE}={given[:60]!r} says what each rank is",
                found=f"{entry[:60]!r} is no job and a number",
                remedy="Write it as chief:1,worker:2,ps:1",
            )
        counts.append((job, int(number)))
    counted = sum(number for _, number in counts)
    if counted != ranks:
        raise ClusterError(
            asked=f"{VARIABLE}={given[:60]!r} says what {counted} ranks are",
            found=f"{ranks} were started",
            remedy="Start as many as it counts",
        )
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for job, many in counts:
        first = seen.get(job, 0)
        tasks += [Task(job, first + index) for index in range(many)]
        seen[job] = first + many
    return tuple(tasks)


def shared_out(tasks: Sequence[Task], addresses: Sequence[str]) -> dict[str, list[str]]:
    """Returns the addresses by job, each job's in the order of its tasks."""
    found: dict[str, list[str]] = {}
    for task, address in zip(tasks, addresses, strict=True):
        found.setdefault(task.job, []).append(address)
    return found
