"""Ports for tasks that a launcher gave none.

Every task works out every other's port by itself, so they follow from what all tasks know.
"""

__all__ = ["choose"]

# Below 32768, where Linux begins to hand out ports to whoever connects, and clear of what is well known.
_FIRST = 20000
_COUNT = 10000


def choose(*, job: int, tasks: int) -> list[int]:
    """Returns a port for each task, by rank.

    Jobs with neighbouring numbers get ranges apart, for they may share a host. Ranks differ even
    on different hosts: two hosts by name can be one machine, as when a whole Slurm is tried on one.

    Args:
        job: A number that all tasks of the job know.
        tasks: How many there are. Past 10,000 ports repeat, on hosts far apart in the list.
    """
    ranges = max(1, _COUNT // tasks)
    start = job % ranges * tasks
    return [_FIRST + (start + rank) % _COUNT for rank in range(tasks)]
