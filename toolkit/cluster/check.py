"""Finds everything wrong with a TF_CONFIG at once: as JSON, as a cluster, and as a task in it."""

import collections
import dataclasses
import json
import re

from toolkit.cluster import rules
from toolkit.cluster.rules import Problem, inside, refusal, shown
from toolkit.cluster.spec import Cluster, Task

__all__ = ["Checked", "check", "parse"]

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
            raise refusal("the text", self.problems)
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
        found, cure = f"{shown(layer)} isn't supported", 'Leave it out, or write "grpc"'
        problems.append(Problem(place="rpc_layer", found=found, cure=cure))
    cluster, reading = None, None
    if "cluster" in value:
        reading = rules.read(value["cluster"])
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
        raise refusal(source, checked.problems)
    return checked


def _task(value: object, reading: rules.Reading | None) -> tuple[Task | None, list[Problem]]:
    if not isinstance(value, dict):
        return None, [Problem(place="task", found=f"it is {shown(value)}, not an object", cure=_TASK)]
    problems = []
    job, index = value.get("type"), value.get("index")
    if "type" not in value:
        problems.append(Problem(place="task.type", found="it is missing", cure=_TASK))
    elif job not in rules.JOBS:
        problems.append(Problem(place="task.type", found=f"there is no job {shown(job)}", cure=rules.job_cure(job)))
    if "index" not in value:
        problems.append(Problem(place="task.index", found="it is missing", cure=_TASK))
    elif fault := rules.index_fault(index):
        problems.append(Problem(place="task.index", found=fault, cure="Number the tasks of a job from 0 on"))
    if problems:
        return None, problems
    task = Task(str(job), int(str(index)))
    problems = _absence(task, reading)
    return (None if problems else task), problems


def _absence(task: Task, reading: rules.Reading | None) -> list[Problem]:
    """TensorFlow allows one task that isn't in its cluster: evaluator:0, where that has no evaluator."""
    if reading is None or not reading.jobs or (task == Task("evaluator", 0) and "evaluator" not in reading.jobs):
        return []
    if task.job not in reading.jobs:
        jobs = ", ".join(job for job in rules.JOBS if job in reading.jobs)
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


def _gaps(reading: rules.Reading) -> list[Problem]:
    """TensorFlow counts the workers that train together, and refuses the last ones if an index is missing."""
    workers = reading.indices.get("worker", frozenset())
    absent = sorted(set(range(len(workers))) - workers)
    if reading.problems or not absent or "ps" in reading.jobs or ("chief" not in reading.jobs and len(workers) == 1):
        return []
    found = f"worker:{max(workers)} is there, and worker:{absent[0]} isn't"
    cure = "Number workers that train together from 0 on, without gaps"
    return [Problem(place=inside("cluster", "worker"), found=found, cure=cure)]


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
        return None, [Problem(place=_START, found=f"this is {shown(value)}, not an object", cure=_SAMPLE)]
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
                    place=inside(place, name),
                    found="this key is there more than once, and only the last would count",
                    cure="Keep one",
                )
                for name in each.repeated
            ]
            waiting += [(inside(place, name), member) for name, member in reversed(each.items())]
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
