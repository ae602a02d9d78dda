"""Finds everything wrong with the jobs of a cluster, and says each problem: its place, the finding, and the remedy.

What TensorFlow itself demands is in `tensorflow/python/distribute/multi_worker_util.py`; much of what
is refused here TensorFlow accepts, and then waits for ever.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from toolkit.cluster import addresses
from toolkit.errors import ClusterError
from toolkit.support.words import did_you_mean, nearest

__all__ = ["JOBS", "Problem", "Reading", "index_fault", "inside", "job_cure", "read", "refusal", "shown"]

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


def inside(place: str, name: object) -> str:
    """Returns the place of a member: cluster.worker, or cluster['no name'] if a name needs quotes."""
    if len(place) > _PLACE:
        place = f"{place[: _PLACE // 2]}...{place[-_PLACE // 2 :]}"
    if isinstance(name, str) and name.isidentifier() and name.isascii() and len(name) <= _SHOWN:
        return f"{place}.{name}" if place else name
    return f"{place}[{shown(name)}]"


def shown(value: object) -> str:
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


def refusal(source: str, problems: Sequence[Problem]) -> ClusterError:
    """Returns one error for all problems, with a line for each."""
    lines = [str(problem) for problem in problems[:_LISTED]]
    if len(problems) > _LISTED:
        lines.append(f"And {len(problems) - _LISTED:,} more; `toolkit tf-config check` lists them all.")
    count = "one mistake" if len(problems) == 1 else f"{len(problems):,} mistakes"
    return ClusterError(
        asked=f"{source} should describe a cluster",
        found=f"it has {count}",
        remedy="\n  ".join(["To correct:", *lines]).removesuffix("."),
    )


JOBS = ("chief", "worker", "ps", "evaluator")
_OTHER_NAMES = {"master": "chief", "coordinator": "chief", "parameter_server": "ps", "server": "ps"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """The jobs, as they were given.

    Args:
        jobs: job -> index -> address, where index and address are sound.
        indices: job -> every sound index, also of unsound addresses; a job whose tasks can't be read has none.
        problems: Everything wrong. Where this is empty, `jobs` is a cluster.
    """

    jobs: dict[str, dict[int, str]]
    indices: dict[str, frozenset[int]]
    problems: tuple[Problem, ...]


def read(cluster: object) -> Reading:
    """Reads job -> ["host:port", ...], or job -> {index: "host:port"}, and finds everything wrong."""
    problems: list[Problem] = []
    jobs: dict[str, dict[int, str]] = {}
    indices: dict[str, frozenset[int]] = {}
    places: dict[str, str] = {}
    if not isinstance(cluster, Mapping) or not cluster:
        found = "it names no job" if isinstance(cluster, Mapping) else f"it is {shown(cluster)}, not an object"
        cure = 'Write {"worker": ["HOST:PORT", ...]}, one address for each task'
        problems.append(Problem(place="cluster", found=found, cure=cure))
        return Reading(jobs={}, indices={}, problems=tuple(problems))
    strange = False
    for name, tasks in cluster.items():
        place, job = inside("cluster", name), name
        if name not in JOBS:
            problems.append(Problem(place=place, found=f"there is no job {shown(name)}", cure=job_cure(name)))
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
    return Reading(jobs=jobs, indices=indices, problems=tuple(problems))


def job_cure(name: object) -> str:
    """Returns what to do about a job that TensorFlow doesn't know."""
    near = _nearest(name)
    if near and name in _OTHER_NAMES:
        return f"Call it {near}, as TensorFlow 2 does"
    return did_you_mean(near) + "The jobs are " + ", ".join(JOBS)


def index_fault(value: object) -> str | None:
    """Returns what is wrong with a task's index; None for 1 and "1"."""
    text = str(value) if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)) else ""
    # With ten digits it would exceed 2^31, the limit of TensorFlow's indices.
    if re.fullmatch(r"0|[1-9][0-9]{0,8}", text):
        return None
    if re.fullmatch(r"-[0-9.]+", text) or (isinstance(value, float) and value < 0):
        return f"{shown(value)} is negative"
    if isinstance(value, float) or re.fullmatch(r"[0-9]+\.[0-9]*", text):
        return f"{shown(value)} is not a whole number"
    if isinstance(value, int) and text:
        return f"{shown(value)} is too large"
    return f"{shown(value)} is not a number"


def _nearest(name: object) -> str | None:
    if not isinstance(name, str):
        return None
    near = nearest(name.strip().lower(), [*JOBS, *_OTHER_NAMES])
    return _OTHER_NAMES.get(near, near) if near else None


def _entries(tasks: object, place: str, problems: list[Problem]) -> dict[int, object]:
    if not isinstance(tasks, (list, tuple, Mapping)):
        found, cure = f"it is {shown(tasks)}, not a list", 'Write ["HOST:PORT", ...], also for one task'
        problems.append(Problem(place=place, found=found, cure=cure))
        return {}
    if not tasks:
        problems.append(Problem(place=place, found="it is empty", cure="Write its addresses, or leave the job out"))
    if not isinstance(tasks, Mapping):
        return dict(enumerate(tasks))
    entries: dict[int, object] = {}
    for index, address in tasks.items():
        fault = index_fault(index)
        if fault is None and int(index) in entries:
            fault = f"index {index} is listed twice"
        if fault is None:
            entries[int(index)] = address
        else:
            cure = "Number the tasks of a job from 0 on"
            problems.append(Problem(place=f"{place}[{shown(index)}]", found=fault, cure=cure))
    return entries


def _sound(entries: dict[int, object], place: str, problems: list[Problem]) -> dict[int, str]:
    sound = {}
    for index, address in sorted(entries.items()):
        where = f"{place}[{index}]"
        if not isinstance(address, str):
            found, cure = f"it is {shown(address)}, not a text", 'Write "HOST:PORT", in quotes'
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
