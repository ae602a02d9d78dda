"""The membership of a process in an srun step.

The variables are those that srun's manual lists under "Output environment variables"
(https://slurm.schedmd.com/srun.html). sbatch and salloc set others of similar names for a whole
allocation; only a step has one process for each task.
"""

from collections.abc import Mapping

from toolkit.cluster.sources import ranks
from toolkit.cluster.sources.hostlist import expand, expand_counts
from toolkit.cluster.spec import Membership
from toolkit.errors import ClusterError

__all__ = ["membership", "place_on_node"]


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
