"""Tasks and clusters, which become TF_CONFIG, and everything that can be wrong with one, found at once.

`check` reads a TF_CONFIG: as JSON, as a cluster, and as a task in it. Each problem has its place, the finding, and the
remedy. What TensorFlow itself demands is in `tensorflow/python/distribute/multi_worker_util.py`; much of what is
refused here TensorFlow accepts, and then waits for ever.
"""

import collections
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from toolkit.cluster import addresses
from toolkit.errors import ClusterError
from toolkit.support.words import did_you_mean, nearest

_LISTED = 50
_SHOWN, _PLACE = 60, 200  # The most characters of a value and of a place.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong with a TF_CONFIG.

    Args:
        place: Where: "cluster.worker[1]", "task.index", or "line 3, column 7".
        found: What is there, as a clause: "the port is missing".
        cure: What to do, as a sentence without its full stop.
    """

    place: str
    found: str
    cure: str

    def __str__(self) -> str:
        return f"{self.place}: {self.found}. {self.cure}."


def _inside(place: str, name: object) -> str:
    """Returns the place of a member: cluster.worker, or cluster['no name'] if a name needs quotes."""
    if len(place) > _PLACE:
        place = f"{place[: _PLACE // 2]}...{place[-_PLACE // 2 :]}"
    if isinstance(name, str) and name.isidentifier() and name.isascii() and len(name) <= _SHOWN:
        return f"{place}.{name}" if place else name
    return f"{place}[{_shown(name)}]"


def _shown(value: object) -> str:
    """Returns a short text for a value: a list may be nested a thousand deep."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else value[: _SHOWN - 3] + "...")
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else "a number of many digits"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence):
        return "a list"
    return repr(value)[:_SHOWN]


def _refusal(source: str, problems: Sequence[Problem]) -> ClusterError:
    """Returns one error for all problems, with a line for each."""
    lines = [str(problem) for problem in problems[:_LISTED]]
    if len(problems) > _LISTED:
        lines.append(f"And {len(problems) - _LISTED:,} more; `toolkit tf-config check` lists them all.")
    count = "one mistake" if len(problems) == 1 else f"{len(problems):,} mistakes"
    return ClusterError(
        asked=f"read a cluster from {source}",
        found=f"it has {count}",
        remedy="\n  ".join(["Correct these:" if len(problems) > 1 else "Correct this:", *lines]).removesuffix("."),
    )


JOBS = ("chief", "worker", "ps", "evaluator")
_OTHER_NAMES = {"master": "chief", "coordinator": "chief", "parameter_server": "ps", "server": "ps"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reading:
    """The jobs, as they were given.

    Args:
        jobs: job -> index -> address, where index and address are sound.
        indices: job -> every sound index, also of unsound addresses; a job whose tasks can't be read has none.
        problems: Everything wrong. Where this is empty, `jobs` is a cluster.
    """

    jobs: dict[str, dict[int, str]]
    indices: dict[str, frozenset[int]]
    problems: tuple[Problem, ...]


def _read_jobs(cluster: object) -> _Reading:
    """Reads job -> ["host:port", ...], or job -> {index: "host:port"}, and finds everything wrong."""
    problems: list[Problem] = []
    jobs: dict[str, dict[int, str]] = {}
    indices: dict[str, frozenset[int]] = {}
    places: dict[str, str] = {}
    if not isinstance(cluster, Mapping) or not cluster:
        found = "it names no job" if isinstance(cluster, Mapping) else f"it is {_shown(cluster)}, not an object"
        cure = 'Write {"worker": ["HOST:PORT", ...]}, one address for each task'
        problems.append(Problem(place="cluster", found=found, cure=cure))
        return _Reading(jobs={}, indices={}, problems=tuple(problems))
    strange = False
    for name, tasks in cluster.items():
        place, job = _inside("cluster", name), name
        if name not in JOBS:
            problems.append(Problem(place=place, found=f"there is no job {_shown(name)}", cure=_job_cure(name)))
            job = _nearest(name)
        entries = _entries(tasks, place, problems)
        sound = _sound(entries, place, problems)
        if job is None or job in places:
            strange = strange or job is None
            continue
        # A misspelt job is checked as the one it was meant for, so that one mistake is one problem.
        jobs[job], places[job] = sound, place
        if entries or isinstance(tasks, (list, tuple)):
            indices[job] = frozenset(entries)
    problems += _alike(jobs, places)
    problems += _too_many(indices, places)
    if not strange:
        problems += _missing(set(places))
    return _Reading(jobs=jobs, indices=indices, problems=tuple(problems))


def _job_cure(name: object) -> str:
    """Returns what to do about a job that TensorFlow doesn't know."""
    near = _nearest(name)
    if near and name in _OTHER_NAMES:
        return f"Call it {near}, as TensorFlow 2 does"
    return did_you_mean(near) + "The jobs are " + ", ".join(JOBS)


def _index_fault(value: object) -> str | None:
    """Returns what is wrong with a task's index; None for 1 and "1"."""
    text = str(value) if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)) else ""
    # With ten digits it would exceed 2^31, the limit of TensorFlow's indices.
    if re.fullmatch(r"0|[1-9][0-9]{0,8}", text):
        return None
    if re.fullmatch(r"-[0-9.]+", text) or (isinstance(value, float) and value < 0):
        return f"{_shown(value)} is negative"
    if isinstance(value, float) or re.fullmatch(r"[0-9]+\.[0-9]*", text):
        return f"{_shown(value)} is not a whole number"
    if isinstance(value, int) and text:
        return f"{_shown(value)} is too large"
    return f"{_shown(value)} is not a number"


def _nearest(name: object) -> str | None:
    if not isinstance(name, str):
        return None
    near = nearest(name.strip().lower(), [*JOBS, *_OTHER_NAMES])
    return _OTHER_NAMES.get(near, near) if near else None


def _entries(tasks: object, place: str, problems: list[Problem]) -> dict[int, object]:
    if not isinstance(tasks, (list, tuple, Mapping)):
        found, cure = f"it is {_shown(tasks)}, not a list", 'Write ["HOST:PORT", ...], also for one task'
        problems.append(Problem(place=place, found=found, cure=cure))
        return {}
    if not tasks:
        problems.append(Problem(place=place, found="it is empty", cure="Write its addresses, or leave the job out"))
    if not isinstance(tasks, Mapping):
        return dict(enumerate(tasks))
    entries: dict[int, object] = {}
    for index, address in tasks.items():
        fault = _index_fault(index)
        if fault is None and int(index) in entries:
            fault = f"index {index} is listed twice"
        if fault is None:
            entries[int(index)] = address
        else:
            cure = "Number the tasks of a job from 0 on"
            problems.append(Problem(place=f"{place}[{_shown(index)}]", found=fault, cure=cure))
    return entries


def _sound(entries: dict[int, object], place: str, problems: list[Problem]) -> dict[int, str]:
    sound = {}
    for index, address in sorted(entries.items()):
        where = f"{place}[{index}]"
        if not isinstance(address, str):
            found, cure = f"it is {_shown(address)}, not a text", 'Write "HOST:PORT", in quotes'
            problems.append(Problem(place=where, found=found, cure=cure))
            continue
        wrong = [Problem(place=where, found=found, cure=cure) for found, cure in addresses.faults(address)]
        if not wrong:
            sound[index] = address
        problems += wrong
    return sound


def _alike(jobs: dict[str, dict[int, str]], places: dict[str, str]) -> Iterator[Problem]:
    """The second of two tasks at one address never starts, and TensorFlow waits for it silently."""
    seen: dict[str, tuple[str, int]] = {}
    for job in JOBS:
        for index, address in jobs.get(job, {}).items():
            other, number = seen.setdefault(addresses.canonical(address), (job, index))
            if (other, number) == (job, index):
                continue
            found = f"{other}:{number} has the address {address} already"
            cure = "Give each task its own host or port"
            if (other, job) == ("chief", "worker"):
                cure = "Leave it out of worker: a task is either chief or worker, and the chief trains too"
            elif job == "evaluator" and other in ("chief", "worker"):
                found += ", and an evaluator is none of those that train together"
                cure = "Give the evaluator its own address"
            yield Problem(place=f"{places[job]}[{index}]", found=found, cure=cure)


def _too_many(indices: dict[str, frozenset[int]], places: dict[str, str]) -> Iterator[Problem]:
    for job, cure in (
        ("chief", "Keep one, and make the others workers"),
        ("evaluator", "Keep one: TensorFlow knows at most one"),
    ):
        count = len(indices.get(job, ()))
        if count > 1:
            yield Problem(place=places[job], found=f"there are {count} tasks of this job", cure=cure)


def _missing(names: set[str]) -> Iterator[Problem]:
    if "ps" in names:
        if "chief" not in names:
            found = "there are parameter servers, and no chief that coordinates the training"
            yield Problem(place="cluster.chief", found=found, cure='Add "chief": ["HOST:PORT"]')
        if "worker" not in names:
            found = "no task trains: with parameter servers, only workers do"
            yield Problem(place="cluster.worker", found=found, cure='Add "worker": ["HOST:PORT", ...]')
    elif not names & {"chief", "worker"}:
        found = "no task trains: the cluster has only an evaluator"
        yield Problem(place="cluster", found=found, cure='Add "worker": ["HOST:PORT", ...]')


@dataclasses.dataclass(frozen=True)
class Task:
    """One process of a cluster: `str(Task("worker", 1))` is "worker:1"."""

    job: str
    index: int

    def __str__(self) -> str:
        return f"{self.job}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> "Task":
        """Parses "worker:1".

        Raises:
            ClusterError: The job is unknown, or the index is no index.
        """
        job, colon, index = text.partition(":")
        if job not in JOBS:
            raise ClusterError(asked=f"task {text!r}", found=f"there is no job {job!r}", remedy=_job_cure(job))
        fault = _index_fault(index) if colon else "its index is missing"
        if fault:
            raise ClusterError(asked=f"task {text!r}", found=fault, remedy=f"Write it as {job}:0")
        return cls(job, int(index))


def numbered(jobs: Iterable[tuple[str, int]]) -> tuple[Task, ...]:
    """Returns the tasks of jobs in their order, each job numbered from 0.

    Args:
        jobs: How many tasks of each job: (("chief", 1), ("worker", 2)).
    """
    indices = {job: itertools.count() for job in JOBS}
    return tuple(Task(job, next(indices[job])) for job, number in jobs for _ in range(number))


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Cluster:
    """All tasks and their addresses. A cluster in which `check` finds a problem can't be created.

    Args:
        jobs: chief, worker, ps or evaluator -> ["host:port", ...], or {index: "host:port"} with gaps.

    Raises:
        ClusterError: Something is wrong; the message lists all of it.
    """

    jobs: tuple[tuple[str, tuple[tuple[int, str], ...]], ...]

    def __init__(self, jobs: Mapping[str, Sequence[str] | Mapping[int, str] | Mapping[str, str]]) -> None:
        reading = _read_jobs(jobs)
        if reading.problems:
            raise _refusal("the argument jobs", reading.problems)
        sound = reading.jobs
        ordered = tuple((job, tuple(sorted(sound[job].items()))) for job in JOBS if job in sound)
        object.__setattr__(self, "jobs", ordered)

    @classmethod
    def at(cls, addresses: Mapping[Task, str]) -> "Cluster":
        """Returns the cluster of these tasks at these addresses."""
        jobs: dict[str, dict[int, str]] = {}
        for task, address in addresses.items():
            jobs.setdefault(task.job, {})[task.index] = address
        return cls(jobs)

    def __repr__(self) -> str:
        return f"Cluster({self.as_dict()!r})"

    def __contains__(self, task: object) -> bool:
        return task in self._addresses

    @functools.cached_property
    def _addresses(self) -> dict[Task, str]:
        return {Task(job, index): address for job, entries in self.jobs for index, address in entries}

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Every task, in the order chief, worker, ps, evaluator."""
        return tuple(self._addresses)

    def address(self, task: Task) -> str:
        """Returns a task's "host:port".

        Raises:
            ClusterError: The cluster has no such task.
        """
        self._check_member(task)
        return self._addresses[task]

    @property
    def chief(self) -> Task:
        """The task that writes checkpoints: chief:0 if there is one, otherwise the lowest worker."""
        return self.tasks[0]

    @property
    def synchronous(self) -> tuple[Task, ...]:
        """The tasks that train together, in TensorFlow's order: the chief, then the workers.

        Beside parameter servers there are none: each worker goes at its own pace.
        """
        if any(job == "ps" for job, _ in self.jobs):
            return ()
        return tuple(task for task in self.tasks if task.job in ("chief", "worker"))

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns the argument of `tf.train.ClusterSpec`: a list for each job, a dict for a job with gaps."""
        return {
            job: [address for _, address in entries] if entries[-1][0] == len(entries) - 1 else dict(entries)
            for job, entries in self.jobs
        }

    @functools.cached_property
    def digest(self) -> str:
        """Twelve hexadecimal digits that are the same for equal clusters."""
        import hashlib

        return hashlib.sha256(self._json.encode()).hexdigest()[:12]

    @functools.cached_property
    def _json(self) -> str:
        return json.dumps(self.as_dict(), separators=(",", ":"))

    def tf_config(self, task: Task) -> str:
        """Returns the TF_CONFIG of one task, as compact JSON.

        An evaluator needn't be in the cluster that it evaluates.

        Raises:
            ClusterError: The cluster has no such task.
        """
        if task != Task("evaluator", 0):
            self._check_member(task)
        return f'{{"cluster":{self._json},"task":{{"type":"{task.job}","index":{task.index}}}}}'

    def tf_configs(self) -> Iterator[tuple[Task, str]]:
        """Yields each task with its TF_CONFIG, one at a time: together they grow with the square of the tasks."""
        for task in self.tasks:
            yield task, self.tf_config(task)

    def restricted_to(self, tasks: Sequence[Task]) -> "Cluster":
        """Returns the cluster of these tasks alone."""
        return Cluster.at({task: self.address(task) for task in tasks})

    def listed(self) -> str:
        """Returns the tasks in short form: "chief:0, worker:0 to worker:7"."""
        words = []
        for job, entries in self.jobs:
            indices = [index for index, _ in entries]
            if len(indices) > 2 and indices[-1] - indices[0] == len(indices) - 1:
                words.append(f"{job}:{indices[0]} to {job}:{indices[-1]}")
            else:
                words += [f"{job}:{index}" for index in indices[:20]] + (["..."] if len(indices) > 20 else [])
        return ", ".join(words)

    def _check_member(self, task: Task) -> None:
        if task not in self._addresses:
            raise ClusterError(
                asked=f"task {task}", found="the cluster has no such task", remedy=f"Its tasks are {self.listed()}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Membership:
    """A process's cluster and task.

    Args:
        cluster: All tasks.
        task: This process. It is in the cluster, save for an evaluator:0 that evaluates it from outside.
        source: Where both come from, in words: "TF_CONFIG", "tf_configs/two_hosts.json", "Slurm step 12.0".
    """

    cluster: Cluster
    task: Task
    source: str


_TASK = 'Write "task": {"type": "worker", "index": 0}, with the type and index of this process'
_START = "line 1, column 1"
_QUOTES = "Put names and texts in double quotes; in a shell, put single quotes around the whole"
_SPARSE = "sparseCluster"  # Kubeflow's training operator, of TFJobs with enableDynamicWorker.
_SAMPLE = 'Write {"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": 0}}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """The content of a TF_CONFIG, and everything wrong with it.

    Args:
        cluster: None where something is wrong with it.
        task: None where something is wrong with it, or none is named. An evaluator:0 needn't be in
            the cluster; any other task is.
        problems: Everything wrong, in the order of the text where that is possible.
        notes: What is taken otherwise than it is written, as sentences without their full stop.
    """

    cluster: Cluster | None
    task: Task | None
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()

    @property
    def sound(self) -> Cluster:
        """The cluster, if nothing is wrong with it.

        Raises:
            ClusterError: Something is.
        """
        if self.cluster is None:
            raise _refusal("the text", self.problems)
        return self.cluster


def check(text: str | None, *, task_required: bool = True) -> Checked:
    """Reads a TF_CONFIG; never raises.

    Args:
        text: JSON. Keys beside `cluster` and `task` are left alone: TensorFlow has others, such as
            rpc_layer and environment.
        task_required: Whether it must name a task; a file that describes a cluster for all doesn't.
    """
    value, problems = _object(text)
    if value is None:
        return Checked(cluster=None, task=None, problems=tuple(problems))
    value, notes = _with_a_chief(value)
    if (layer := value.get("rpc_layer")) not in (None, "", "grpc"):
        found, cure = f"{_shown(layer)} isn't supported", 'Leave it out, or write "grpc"'
        problems.append(Problem(place="rpc_layer", found=found, cure=cure))
    cluster, reading = None, None
    if "cluster" in value:
        reading = _read_jobs(value["cluster"])
        wrong_jobs = [*reading.problems, *_gaps(reading)]
        problems += wrong_jobs
        cluster = None if wrong_jobs else Cluster(value["cluster"])
    elif _SPARSE in value:
        found = f"there is {_SPARSE} instead, in which each task is told only of itself and of the ps"
        cure = "Set enableDynamicWorker to false in the TFJob: it writes the whole cluster then"
        problems.append(Problem(place="cluster", found=found, cure=cure))
    else:
        cure = 'Write "cluster": {"worker": ["HOST:PORT", ...]}, the same for every process'
        problems.append(Problem(place="cluster", found="it is missing", cure=cure))
    task = None
    if "task" in value:
        task, wrong = _task(value["task"], reading)
        problems += wrong
    elif task_required:
        problems.append(Problem(place="task", found="it is missing", cure=_TASK))
    return Checked(cluster=cluster, task=task, problems=tuple(problems), notes=notes)


def parse(text: str | None, *, source: str, task_required: bool = True) -> Checked:
    """Reads a TF_CONFIG as `check` does, and raises if anything is wrong.

    Args:
        text: JSON.
        source: Where it comes from, in words: "TF_CONFIG", "tf_configs/two_hosts.json".
        task_required: Whether it must name a task.

    Raises:
        ClusterError: The message lists every problem, one on a line.
    """
    checked = check(text, task_required=task_required)
    if checked.problems:
        raise _refusal(source, checked.problems)
    return checked


def _task(value: object, reading: _Reading | None) -> tuple[Task | None, list[Problem]]:
    if not isinstance(value, dict):
        return None, [Problem(place="task", found=f"it is {_shown(value)}, not an object", cure=_TASK)]
    problems = []
    job, index = value.get("type"), value.get("index")
    if "type" not in value:
        problems.append(Problem(place="task.type", found="it is missing", cure=_TASK))
    elif job not in JOBS:
        problems.append(Problem(place="task.type", found=f"there is no job {_shown(job)}", cure=_job_cure(job)))
    if "index" not in value:
        problems.append(Problem(place="task.index", found="it is missing", cure=_TASK))
    elif fault := _index_fault(index):
        problems.append(Problem(place="task.index", found=fault, cure="Number the tasks of a job from 0 on"))
    if problems:
        return None, problems
    task = Task(str(job), int(str(index)))
    problems = _absence(task, reading)
    return (None if problems else task), problems


def _absence(task: Task, reading: _Reading | None) -> list[Problem]:
    """TensorFlow allows one task that isn't in its cluster: evaluator:0, where that has no evaluator."""
    if reading is None or not reading.jobs or (task == Task("evaluator", 0) and "evaluator" not in reading.jobs):
        return []
    if task.job not in reading.jobs:
        jobs = ", ".join(job for job in JOBS if job in reading.jobs)
        found, cure = f"the cluster has no {task.job}", f"Add its address to the cluster, or choose one of {jobs}"
        return [Problem(place="task.type", found=found, cure=cure)]
    indices = sorted(reading.indices.get(task.job, ()))
    if task.job not in reading.indices or task.index in indices:
        return []
    if not indices:
        return []
    found = f"the cluster has no {task.job}:{task.index}"
    dense = indices[-1] == len(indices) - 1
    choices = (f"0 to {indices[-1]}" if indices[-1] else "0") if dense else ", ".join(map(str, indices[:20]))
    return [Problem(place="task.index", found=found, cure=f"Choose from {choices}, or add its address to the cluster")]


def _gaps(reading: _Reading) -> list[Problem]:
    """TensorFlow counts the workers that train together, and refuses the last ones if an index is missing."""
    workers = reading.indices.get("worker", frozenset())
    absent = sorted(set(range(len(workers))) - workers)
    if reading.problems or not absent or "ps" in reading.jobs or ("chief" not in reading.jobs and len(workers) == 1):
        return []
    found = f"worker:{max(workers)} is there, and worker:{absent[0]} isn't"
    cure = "Number workers that train together from 0 on, without gaps"
    return [Problem(place=_inside("cluster", "worker"), found=found, cure=cure)]


def _with_a_chief(value: dict) -> tuple[dict, tuple[str, ...]]:
    """Returns a TF_CONFIG with a chief in place of a master, which SageMaker and old TFJobs write."""
    jobs, task = value.get("cluster"), value.get("task")
    if not isinstance(jobs, dict) or "master" not in jobs or "chief" in jobs:
        return value, ()
    value = {**value, "cluster": {"chief" if job == "master" else job: tasks for job, tasks in jobs.items()}}
    if isinstance(task, dict) and task.get("type") == "master":
        value["task"] = {**task, "type": "chief"}
    return value, ("the master of this cluster counts as its chief, which is TensorFlow 2's name for it",)


class _Object(dict):
    """A JSON object that records duplicate keys."""

    repeated: tuple[str, ...] = ()


def _object(text: str | None) -> tuple[dict | None, list[Problem]]:
    """Reads a JSON object; None and the reason if there is none.

    A repeated key is a problem, and the object is returned all the same, with its last value.
    """
    if text is None or not text.strip():
        return None, [Problem(place=_START, found="there is nothing at all", cure=_SAMPLE)]
    try:
        value = json.loads(text, object_pairs_hook=_pairs)
    except json.JSONDecodeError as error:
        return None, [_syntax(text, error)]
    except (ValueError, RecursionError):
        # A number of thousands of digits, or brackets nested a thousand deep.
        return None, [Problem(place=_START, found="it is too large to be read", cure=_SAMPLE)]
    if not isinstance(value, dict):
        return None, [Problem(place=_START, found=f"this is {_shown(value)}, not an object", cure=_SAMPLE)]
    return value, _repeated(value)


def _pairs(pairs: list[tuple[str, object]]) -> _Object:
    found = _Object(pairs)
    if len(found) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        found.repeated = tuple(name for name, count in counts.items() if count > 1)
    return found


def _repeated(value: dict) -> list[Problem]:
    problems = []
    waiting: list[tuple[str, object]] = [("", value)]
    while waiting:  # Not recursive, because the text decides the depth.
        place, each = waiting.pop()
        if isinstance(each, _Object):
            problems += [
                Problem(
                    place=_inside(place, name),
                    found="this key is there more than once, and only the last would count",
                    cure="Keep one",
                )
                for name in each.repeated
            ]
            waiting += [(_inside(place, name), member) for name, member in reversed(each.items())]
        elif isinstance(each, list):
            waiting += [(f"{place}[{i}]", member) for i, member in enumerate(each) if isinstance(member, (dict, list))]
    return problems


def _syntax(text: str, error: json.JSONDecodeError) -> Problem:
    before, after = text[: error.pos].rstrip(), text[error.pos :].lstrip()
    reason = error.msg[:1].lower() + error.msg[1:]
    # Python 3.13 has its own message for this, which points at the comma.
    if (before.endswith(",") and after[:1] in ("}", "]")) or error.msg.startswith("Illegal trailing comma"):
        reason, cure = "a comma is followed by nothing", "Remove the comma"
    elif error.msg == "Extra data":
        reason, cure = "the object has ended and more follows", "Remove what follows, or put it inside the braces"
    elif not after:
        reason, cure = (
            "the text ends too early",
            "Add what is missing, perhaps closing braces: it may have been cut off",
        )
    elif re.match(r"['\w\u2018\u2019\u201c\u201d]", after) and "Expecting" in error.msg:
        cure = _QUOTES
    else:
        cure = "Correct it there or just before; " + _QUOTES[0].lower() + _QUOTES[1:]
    return Problem(place=f"line {error.lineno}, column {error.colno}", found=f"this isn't JSON: {reason}", cure=cure)
