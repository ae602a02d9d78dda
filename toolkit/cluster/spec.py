"""Task and Cluster, which become TF_CONFIG, and where they came from."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from toolkit.cluster import rules
from toolkit.cluster.rules import refusal
from toolkit.errors import ClusterError

__all__ = ["Cluster", "Membership", "Task", "numbered"]


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
        if job not in rules.JOBS:
            raise ClusterError(asked=f"task {text!r}", found=f"there is no job {job!r}", remedy=rules.job_cure(job))
        fault = rules.index_fault(index) if colon else "its index is missing"
        if fault:
            raise ClusterError(asked=f"task {text!r}", found=fault, remedy=f"Write it as {job}:0")
        return cls(job, int(index))


def numbered(jobs: Iterable[tuple[str, int]]) -> tuple[Task, ...]:
    """Returns the tasks of jobs in their order, each job numbered from 0.

    Args:
        jobs: How many tasks of each job: (("chief", 1), ("worker", 2)).
    """
    indices = {job: itertools.count() for job in rules.JOBS}
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
        reading = rules.read(jobs)
        if reading.problems:
            raise refusal("the argument jobs", reading.problems)
        sound = reading.jobs
        ordered = tuple((job, tuple(sorted(sound[job].items()))) for job in rules.JOBS if job in sound)
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
