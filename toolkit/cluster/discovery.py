"""Finds this process's cluster: from a file, TF_CONFIG, an srun step, mpirun, or an Indexed Job of Kubernetes.

Slurm: the variables are those that srun's manual lists under "Output environment variables"
(https://slurm.schedmd.com/srun.html). sbatch and salloc set others of similar names for a whole allocation; only a step
has one process for each task. Slurm compresses lists. The forms are those of the srun manual and of `scontrol show
hostnames`: "n[0-3,7],gpu-a" and "2(x3),1".

Open MPI: the variables are those that it defines in every process
(https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html). None of them names the other hosts, so for more
than one host the user does, in TOOLKIT_HOSTS.

Both only number their processes. A rank's job follows from TOOLKIT_TASKS, and every rank works out every other's port
by itself.

Kubernetes: `toolkit launch --on=kubernetes` sets TOOLKIT_CLUSTER, which holds the whole cluster as JSON, and
TOOLKIT_TASK, the pod's job. Kubernetes itself numbers the pods of an Indexed Job in JOB_COMPLETION_INDEX, and a
headless service makes their names known (https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/).
Without TOOLKIT_TASK all tasks of the cluster are pods of one Job, numbered through: chief, workers, ps, evaluator.
"""

import collections
import itertools
import json
import logging
import math
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence

from toolkit.cluster.addresses import join
from toolkit.cluster.tf_config import JOBS, Cluster, Membership, Task, check, numbered, parse
from toolkit.errors import ClusterError

_LOG = logging.getLogger(__name__)
_LONGEST = 10_000_000  # The most characters of a file, enough for a hundred thousand tasks.


def discover(
    environ: Mapping[str, str], *, file: str | os.PathLike[str] | None = None, task: str | None = None
) -> Membership | None:
    """Finds this process's cluster and its task.

    Args:
        environ: The process's environment, `os.environ` as a rule.
        file: A file with {"cluster": ...}, such as those in tf_configs/; it goes before everything else.
        task: Which task this process is, such as "worker:1". Unless given, what the file says, or
            else TF_CONFIG. Given without a file, it goes before the task in TF_CONFIG.

    Returns:
        None where the process was given no cluster. A TF_CONFIG with neither cluster nor task, such as "", "{}" or
        '{"environment": "cloud"}', gives none.

    Raises:
        ClusterError: What there is can't be used. Nothing further down the list is tried then.
    """
    config = environ.get("TF_CONFIG", "")
    if _says_nothing(config):
        config = ""
    if file is not None:
        found = parse(read_file(file), source=os.fspath(file), task_required=False)
        described = found.task or (check(config).task if config else None)
        return _membership(found.sound, task, described, source=os.fspath(file))
    if config:
        found = parse(config, source="TF_CONFIG", task_required=task is None)
        for note in found.notes:
            _LOG.warning("TF_CONFIG: %s", note)
        return _membership(found.sound, task, found.task, source="TF_CONFIG")
    if task is not None:
        raise ClusterError(
            asked=f"this process is given the task {task!r}",
            found="neither a file nor TF_CONFIG describes its cluster",
            remedy="Also name a file with the cluster, or leave the task out",
        )
    return _slurm_membership(environ) or _open_mpi_membership(environ) or _kubernetes_membership(environ)


def _says_nothing(config: str) -> bool:
    if not config.strip():
        return True
    try:
        value = json.loads(config)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "cluster" not in value and "task" not in value


def require(
    environ: Mapping[str, str], *, file: str | os.PathLike[str] | None = None, task: str | None = None
) -> Membership:
    """Does the same as `discover`, for programs that need a cluster.

    Raises:
        ClusterError: `discover` raises it, or nothing describes a cluster.
    """
    found = discover(environ, file=file, task=task)
    if found is None:
        raise ClusterError(
            asked="this program is one of several processes that train together",
            found="nothing says who takes part: TF_CONFIG is not set",
            remedy="Start it with toolkit launch --workers=2 -m MODULE, set TF_CONFIG, or name a file of tf_configs/",
        )
    return found


def place_on_host(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns this process's number among those that a launcher has started on its host, and their count.

    None where neither mpirun nor srun has started it.
    """
    return _place_under_mpirun(environ) or _place_on_node(environ)


def load(file: str | os.PathLike[str]) -> Cluster:
    """Returns the cluster that a file describes; tf_configs/ has samples.

    Raises:
        ClusterError: It can't be read, or something is wrong with it.
    """
    return parse(read_file(file), source=os.fspath(file), task_required=False).sound


def read_file(file: str | os.PathLike[str]) -> str:
    """Returns the text of a cluster file.

    Raises:
        ClusterError: It can't be read.
    """
    try:
        with open(file, encoding="utf-8-sig") as stream:
            text = stream.read(_LONGEST + 1)
        fault = f"it has more than {_LONGEST:,} characters" if len(text) > _LONGEST else ""
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not UTF-8 text"
        fault = f"it can't be read: {reason}"
    if fault:
        raise ClusterError(
            asked=f"{str(file)!r} should describe a cluster",
            found=fault,
            remedy="Name a file such as tf_configs/local_two_workers.json",
        )
    return text


def _membership(cluster: Cluster, asked: str | None, described: Task | None, *, source: str) -> Membership:
    own = Task.parse(asked) if asked is not None else described
    if own is None:
        raise ClusterError(
            asked=f"{source} describes a cluster of {len(cluster.tasks):,} tasks",
            found="nothing says which of them this process is",
            remedy=f"Name it, or set TF_CONFIG's task. The tasks are {cluster.listed()}",
        )
    cluster.tf_config(own)  # Raises if the cluster has no such task.
    return Membership(cluster=cluster, task=own, source=source)


_TASKS = "TOOLKIT_TASKS"  # "chief:1,worker:2,ps:1".
_MOST = 100_000  # Tasks, or hosts.
# Below 32768, where Linux's ports for outgoing connections begin, and away from well-known ones.
_FIRST_PORT, _PORTS = 20000, 10000


def _rank_membership(
    environ: Mapping[str, str], hosts: Sequence[str], *, job: int, rank: int, source: str
) -> Membership:
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
    tasks = _tasks(environ.get(_TASKS), len(hosts))
    addresses = map(join, hosts, _ports(job, len(hosts)))
    return Membership(cluster=Cluster.at(dict(zip(tasks, addresses, strict=True))), task=tasks[rank], source=source)


def _tasks(given: str | None, ranks: int) -> tuple[Task, ...]:
    """Returns the task of each rank: the jobs in the order given, each numbered from 0."""
    counts: list[tuple[str, int]] = []
    for entry in (given or f"worker:{ranks}").split(","):
        job, _, number = entry.strip().partition(":")
        if job not in JOBS or not (number.isascii() and number.isdigit()) or len(number) > 6:
            raise ClusterError(
                asked=f"{_TASKS}={(given or '')[:60]!r} says what each rank is",
                found=f"{entry[:60]!r} isn't a job and a number",
                remedy="Write it as chief:1,worker:2,ps:1",
            )
        counts.append((job, int(number)))
    counted = sum(number for _, number in counts)
    if counted != ranks:
        raise ClusterError(
            asked=f"{_TASKS}={(given or '')[:60]!r} describes {counted} ranks",
            found=f"{ranks} were started",
            remedy=f"Start {counted}, or change {_TASKS}",
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


def _text(environ: Mapping[str, str], name: str, *, launcher: str) -> str:
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


def _whole(environ: Mapping[str, str], name: str, *, launcher: str, most: int = sys.maxsize) -> int:
    """Returns a variable's value as a number of at least 0.

    Raises:
        ClusterError: It isn't set, or isn't such a number, or is more than `most`.
    """
    value = _text(environ, name, launcher=launcher)
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


def _slurm_membership(environ: Mapping[str, str]) -> Membership | None:
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
    tasks = _whole(environ, "SLURM_STEP_NUM_TASKS", launcher="Slurm", most=_MOST)
    if tasks < 2:
        return None
    rank = _slurm_number(environ, "PROCID")
    job, step = _slurm_number(environ, "JOB_ID"), _slurm_number(environ, "STEP_ID")
    nodes = expand(_text(environ, "SLURM_STEP_NODELIST", launcher="Slurm"))
    counts = expand_counts(_text(environ, "SLURM_STEP_TASKS_PER_NODE", launcher="Slurm"))
    if len(counts) != len(nodes) or sum(counts) != tasks or rank >= tasks:
        raise ClusterError(
            asked=f"Slurm step {job}.{step} has {tasks} tasks on {len(nodes)} nodes, and this is task {rank}",
            found=f"SLURM_STEP_TASKS_PER_NODE counts {sum(counts)} on {len(counts)}",
            remedy="Leave Slurm's variables as srun sets them, or set TF_CONFIG instead",
        )
    places = _layout(environ.get("SLURM_DISTRIBUTION", ""), counts)
    _check_slurm_place(environ, places, rank)
    hosts = [nodes[node] for node, _ in places]
    return _rank_membership(environ, hosts, job=job + step, rank=rank, source=f"Slurm step {job}.{step}")


def _place_on_node(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns this task's number among srun's tasks on its node, and their count; None outside of srun."""
    if not environ.get("SLURM_STEP_ID") or not all(f"SLURM_{name}" in environ for name in ("LOCALID", "NODEID")):
        return None
    counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local, node = _slurm_number(environ, "LOCALID"), _slurm_number(environ, "NODEID")
    return (local, counts[node]) if node < len(counts) and local < counts[node] else None


def _slurm_number(environ: Mapping[str, str], name: str) -> int:
    return _whole(environ, f"SLURM_{name}", launcher="Slurm")


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


def _check_slurm_place(environ: Mapping[str, str], places: list[tuple[int, int]], rank: int) -> None:
    names = ("NODEID", "LOCALID")
    if any(f"SLURM_{name}" not in environ for name in names):
        return
    own = tuple(_slurm_number(environ, name) for name in names)
    if own != places[rank]:
        raise ClusterError(
            asked=f"task {rank} of this Slurm step should be number {places[rank][1]} on node {places[rank][0]}",
            found=f"it is number {own[1]} on node {own[0]}",
            remedy="Start it with srun --distribution=block, or set TF_CONFIG instead",
        )


_LONGEST_NAME = 255  # The most characters of a host's name in DNS.
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
        if length > _LONGEST_NAME:
            raise _refusal(hosts, f"hosts with names of at most {_LONGEST_NAME} letters")
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


def _open_mpi_membership(environ: Mapping[str, str]) -> Membership | None:
    """Reads mpirun's variables: every rank is a worker, unless TOOLKIT_TASKS says otherwise.

    Returns:
        None where mpirun didn't start this process, or started it alone.

    Raises:
        ClusterError: There are several hosts and TOOLKIT_HOSTS doesn't name them, or what it names
            isn't where the ranks are.
    """
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    size = _whole(environ, "OMPI_COMM_WORLD_SIZE", launcher="Open MPI", most=_MOST)
    if size < 2:
        return None
    rank = _rank_number(environ, "RANK")
    local_rank, local_size = _rank_number(environ, "LOCAL_RANK"), _rank_number(environ, "LOCAL_SIZE")
    if rank >= size or local_rank >= local_size:
        raise ClusterError(
            asked=f"Open MPI started {size} ranks, {local_size} of them here",
            found=f"this is rank {rank} of all and {local_rank} here",
            remedy="Leave Open MPI's variables as mpirun sets them, or set TF_CONFIG instead",
        )
    given = environ.get("TOOLKIT_HOSTS", "").strip()
    if given:
        places = _places(given, size)
        _check_hosts(given, places, rank=rank, local=(local_rank, local_size))
        hosts = [host for host, _ in places]
    elif local_size == size:
        hosts = ["127.0.0.1"] * size
    else:
        raise ClusterError(
            asked=f"mpirun started {size} ranks, {local_size} of them on this host",
            found="Open MPI tells a rank nothing of the other hosts",
            remedy="Name them in rank order, with their slots: mpirun -x TOOLKIT_HOSTS=a:2,b:2 ...",
        )
    # All ranks of a job have the same namespace, and other jobs on this host have other ones.
    job = zlib.crc32(environ.get("PMIX_NAMESPACE", "").encode(errors="replace"))
    return _rank_membership(environ, hosts, job=job, rank=rank, source=f"Open MPI, {size} ranks")


def _place_under_mpirun(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns this rank's number among mpirun's ranks on its host, and their count; None outside of mpirun."""
    if not all(f"OMPI_COMM_WORLD_{name}" in environ for name in ("LOCAL_RANK", "LOCAL_SIZE")):
        return None
    return _rank_number(environ, "LOCAL_RANK"), _rank_number(environ, "LOCAL_SIZE")


def _rank_number(environ: Mapping[str, str], name: str) -> int:
    return _whole(environ, f"OMPI_COMM_WORLD_{name}", launcher="Open MPI")


def _places(given: str, size: int) -> list[tuple[str, int]]:
    """Reads "a:2,b" as each rank's host and its place there: [("a", 0), ("a", 1), ("b", 0)]."""
    named: list[tuple[str, int]] = []
    for entry in given.split(","):
        text = entry.strip()
        # Brackets around an IPv6 address: [fd00::1]:2
        end = text.rfind("]") + 1
        name, colon, slots = text[end:].partition(":")
        host = (text[:end] + name).removeprefix("[").removesuffix("]")
        if not host or (colon and not (slots.isascii() and slots.isdigit() and 0 < len(slots) < 6)):
            raise ClusterError(
                asked=f"TOOLKIT_HOSTS={given[:60]!r} names hosts and their slots",
                found=f"{text[:60]!r} is neither a host nor a host with a number",
                remedy="Write it as a:2,b:2, in rank order",
            )
        named.append((host, int(slots or 1)))
    total = sum(slots for _, slots in named)
    if total != size:
        raise ClusterError(
            asked=f"TOOLKIT_HOSTS={given[:60]!r} names {total} slots",
            found=f"mpirun started {size} ranks",
            remedy="Name every host with as many slots as it has ranks, in rank order: a:2,b:2",
        )
    places: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)
    return [(host, next(places[host])) for host, slots in named for _ in range(slots)]


def _check_hosts(given: str, places: list[tuple[str, int]], *, rank: int, local: tuple[int, int]) -> None:
    host, place = places[rank]
    named = sum(each == host for each, _ in places)
    if (place, named) != local:
        raise ClusterError(
            asked=f"TOOLKIT_HOSTS={given[:60]!r} makes rank {rank} number {place} of {named} on {host}",
            found=f"it is number {local[0]} of {local[1]} on its host",
            remedy="Name the hosts as mpirun filled them, in rank order; mpirun --map-by slot fills one after another",
        )


CLUSTER, _TASK = "TOOLKIT_CLUSTER", "TOOLKIT_TASK"
_POD_INDEX = "JOB_COMPLETION_INDEX"


def _kubernetes_membership(environ: Mapping[str, str]) -> Membership | None:
    """Reads a pod's variables.

    Returns:
        None outside of an Indexed Job that was made for this toolkit, and in a cluster of one task.

    Raises:
        ClusterError: The manifest says only part of it, or the Job has more pods than the cluster has tasks.
    """
    if not environ.get(CLUSTER) or _POD_INDEX not in environ:
        return None
    cluster = parse(_pod_config(environ[CLUSTER]), source=CLUSTER, task_required=False).sound
    index = _whole(environ, _POD_INDEX, launcher="Kubernetes")
    job = environ.get(_TASK)
    tasks = cluster.tasks if not job else tuple(task for task in cluster.tasks if task.job == job)
    if index >= len(tasks):
        raise ClusterError(
            asked=f"{CLUSTER} describes {len(tasks)} tasks{f' of job {job}' if job else ''}",
            found=f"this pod's {_POD_INDEX} is {index}",
            remedy="Let completions and parallelism be the number of tasks, as `toolkit launch --on=kubernetes` does",
        )
    if len(cluster.tasks) < 2:
        return None
    return Membership(
        cluster=cluster, task=tasks[index], source=f"Kubernetes, pod {index}{f' of {job}' if job else ''}"
    )


def _pod_config(cluster: str) -> str:
    try:
        return json.dumps({"cluster": json.loads(cluster)})
    except (ValueError, RecursionError):
        raise ClusterError(
            asked=f"{CLUSTER} describes a cluster as JSON",
            found=f"it isn't JSON: {cluster[:60]!r}",
            remedy="Use the value that `toolkit launch --on=kubernetes` writes",
        ) from None
