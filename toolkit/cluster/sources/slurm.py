"""The membership of a process in an srun step.

The variables are those that srun's manual lists under "Output environment variables"
(https://slurm.schedmd.com/srun.html). sbatch and salloc set others of similar names for a whole
allocation; only a step has one process for each task.

Slurm compresses lists. The forms are those of the srun manual and of `scontrol show hostnames`: "n[0-3,7],gpu-a" and
"2(x3),1".
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from toolkit.cluster.sources import ranks
from toolkit.cluster.spec import Membership
from toolkit.errors import ClusterError

__all__ = ["expand", "expand_counts", "membership", "place_on_node"]


def membership(environ: Mapping[str, str]) -> Membership | None:
    """Reads srun's variables: every task of the step is a worker, in rank order, unless TOOLKIT_TASKS says otherwise.

    TOOLKIT_TASKS="chief:1,worker:2,ps:1" makes rank 0 the chief, 1 and 2 workers, 3 a ps.

    Returns:
        None outside a step, in a step of one task, and where mpirun started the process: mpirun
        has srun start its daemons, so that the step's variables are about those.

    Raises:
        ClusterError: The variables contradict each other, or the tasks' distribution isn't known.
    """
    if not environ.get("SLURM_STEP_ID") or "OMPI_COMM_WORLD_SIZE" in environ:
        return None
    # A shell in an salloc or sbatch allocation is also a step, of one task.
    if "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    tasks = ranks.whole(environ, "SLURM_STEP_NUM_TASKS", launcher="Slurm", most=ranks.MOST)
    if tasks < 2:
        return None
    rank = _number(environ, "PROCID")
    job, step = _number(environ, "JOB_ID"), _number(environ, "STEP_ID")
    nodes = expand(ranks.text(environ, "SLURM_STEP_NODELIST", launcher="Slurm"))
    counts = expand_counts(ranks.text(environ, "SLURM_STEP_TASKS_PER_NODE", launcher="Slurm"))
    if len(counts) != len(nodes) or sum(counts) != tasks or rank >= tasks:
        raise ClusterError(
            asked=f"Slurm step {job}.{step} has {tasks} tasks on {len(nodes)} nodes, and this is task {rank}",
            found=f"SLURM_STEP_TASKS_PER_NODE counts {sum(counts)} on {len(counts)}",
            remedy="Leave Slurm's variables as srun sets them, or set TF_CONFIG instead",
        )
    places = _layout(environ.get("SLURM_DISTRIBUTION", ""), counts)
    _check_own_place(environ, places, rank)
    hosts = [nodes[node] for node, _ in places]
    return ranks.membership(environ, hosts, job=job + step, rank=rank, source=f"Slurm step {job}.{step}")


def place_on_node(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns this task's number among srun's tasks on its node, and their count; None outside of srun."""
    if not environ.get("SLURM_STEP_ID") or not all(f"SLURM_{name}" in environ for name in ("LOCALID", "NODEID")):
        return None
    counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local, node = _number(environ, "LOCALID"), _number(environ, "NODEID")
    return (local, counts[node]) if node < len(counts) and local < counts[node] else None


def _number(environ: Mapping[str, str], name: str) -> int:
    return ranks.whole(environ, f"SLURM_{name}", launcher="Slurm")


def _layout(distribution: str, counts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns each rank's node and place on that node. With one task on each node, all distributions are the same."""
    block = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    # "cyclic:block,NoPack": the parts after the first word are about sockets and cores.
    way = distribution.partition(":")[0].partition(",")[0].partition("=")[0].lower()
    if way == "arbitrary" or (way == "plane" and max(counts) > 1):
        raise ClusterError(
            asked="a task of a Slurm step finds the nodes of the others by their ranks",
            found=f"--distribution={distribution} doesn't tell which rank is on which node",
            remedy="Start it with srun --distribution=block, or set TF_CONFIG instead",
        )
    # Round robin: the first task of every node, then the second of every node that has one.
    return sorted(block, key=lambda place: (place[1], place[0])) if way == "cyclic" else block


def _check_own_place(environ: Mapping[str, str], places: list[tuple[int, int]], rank: int) -> None:
    names = ("NODEID", "LOCALID")
    if any(f"SLURM_{name}" not in environ for name in names):
        return
    own = tuple(_number(environ, name) for name in names)
    if own != places[rank]:
        raise ClusterError(
            asked=f"task {rank} of this Slurm step should be number {places[rank][1]} on node {places[rank][0]}",
            found=f"it is number {own[1]} on node {own[0]}",
            remedy="Start it with srun --distribution=block, or set TF_CONFIG instead",
        )


_MOST = 100_000
_LONGEST = 255  # The most characters of a host's name in DNS.
_ENTRY = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]\s]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


def expand(hosts: str) -> tuple[str, ...]:
    """Expands "n[08-10],gpu-a" to ("n08", "n09", "n10", "gpu-a").

    Raises:
        ClusterError: It is no such list, or has more than 100,000 hosts, or names that no host can have.
    """
    found: list[str] = []
    position = 0
    while position < len(hosts) or not found:
        entry = _ENTRY.match(hosts, position)
        if not entry or (entry.end() < len(hosts) and hosts[entry.end()] != ","):
            raise _refusal(hosts, "a host list such as n[0-3,7],gpu-a")
        for host in _hosts(entry[0], hosts):
            found.append(host)
            if len(found) > _MOST:
                raise _refusal(hosts, f"a list of at most {_MOST:,} hosts")
        position = entry.end() + 1
    if hosts.endswith(","):
        raise _refusal(hosts, "a host list such as n[0-3,7],gpu-a")
    return tuple(found)


def expand_counts(counts: str) -> tuple[int, ...]:
    """Expands "2(x3),1" to (2, 2, 2, 1).

    Raises:
        ClusterError: It is no such list.
    """
    found: list[int] = []
    for part in counts.split(","):
        match = _COUNT.fullmatch(part)
        if not match or len(found) + int(match[2] or 1) > _MOST:
            raise _refusal(counts, "a list of counts such as 2(x3),1")
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def _hosts(entry: str, hosts: str) -> Iterator[str]:
    """Yields one entry's hosts; the last bracket counts fastest, as in r[1-2]n[0-3]."""
    pieces: list[Sequence[str]] = []
    length = 0
    for match in _PIECE.finditer(entry):
        ranges = [] if match[1] is None else list(_ranges(match[1], hosts))
        length += len(match[2] or "") + max((width for _, width in ranges), default=0)
        # Checked before the expansion: a few characters can stand for more than fits into memory.
        if math.prod(map(len, pieces)) * sum(len(each) for each, _ in ranges) > _MOST:
            raise _refusal(hosts, f"a list of at most {_MOST:,} hosts")
        if length > _LONGEST:
            raise _refusal(hosts, f"hosts with names of at most {_LONGEST} letters")
        pieces.append([f"{n:0{width}d}" for each, width in ranges for n in each] if ranges else (match[2],))
    for names in itertools.product(*pieces):
        yield "".join(names)


def _ranges(text: str, hosts: str) -> Iterator[tuple[range, int]]:
    """Yields the numbers in a bracket and their smallest number of digits."""
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise _refusal(hosts, "a host list such as n[0-3,7],gpu-a")
        yield range(int(match[1]), int(match[2] or match[1]) + 1), len(match[1])


def _refusal(value: str, wanted: str) -> ClusterError:
    return ClusterError(
        asked=f"Slurm gives {wanted}",
        found=f"this is {value[:60]!r}",
        remedy="Leave Slurm's variables as srun sets them, or set TF_CONFIG instead",
    )
