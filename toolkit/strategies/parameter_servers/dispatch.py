"""Steps that were sent to workers, and how many a worker gets at once."""

import collections
import contextlib
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from toolkit.cluster import Cluster, Task, split
from toolkit.errors import TaskLost
from toolkit.strategies.options import ParameterServerOptions
from toolkit.strategies.parameter_servers import internals

_LOG = logging.getLogger(__name__)

_QUIET = 2.0  # Seconds without a result after which the tasks are checked, and a lost one is given to stop answering.
_NO_WORKER = 60.0  # Seconds that training waits for all workers to come back if none is left.
_DISPATCH_SECONDS = 0.2  # A dispatch of this length costs little in relation to its work.
_MOST_STEPS = 16  # The most steps of a dispatch, because its function contains each of them.
# After these TensorFlow may run work again: a task can't be reached, or its work was cancelled.
_OF_A_TASK = (tf.errors.UnavailableError, tf.errors.CancelledError, tf.errors.AbortedError)
_WORTH_IT = 32  # A longer dispatch is traced only if at least this many dispatches are left.


@dataclasses.dataclass(eq=False)
class Dispatch:
    """What a worker is sent.

    Attributes:
        steps: How many steps or batches it holds.
        run: Takes the number of the attempt, from 1; returns a result with no tensor of the worker's left in it.
        done: Called with the result, once, in the worker's thread.
        trains: Whether they are steps of training.
        attempts: How often it was begun.
        overlap: How many steps of others may be applied while it is under way.
        seconds: How long it took.
    """

    steps: int
    run: Callable[[int], Any]
    done: Callable[[Any], None]
    trains: bool = False
    attempts: int = 0
    overlap: int = 0
    seconds: float = 0.0


class Dispatcher:
    """Sends work to free workers of the cluster, and follows it until it is done.

    Attributes:
        by_worker: How many steps of training each worker has done.
        retried: How often work was run again, because its worker was lost.
    """

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, cluster: Cluster) -> None:
        self.cluster = cluster
        self.workers = sum(task.job == "worker" for task in cluster.tasks)
        self.by_worker: collections.Counter = collections.Counter()
        self.retried = 0
        self._coordinator = coordinator
        self._changed = threading.Condition()
        self._under_way: list[Dispatch] = []
        self._progress = time.monotonic()
        self._trouble: BaseException | None = None
        self._troubled = 0.0  # When that was.
        self._gone: set[Task] = set()
        # The time of the last progress, and the tasks seen to be lost since.
        self._lost: tuple[float, set[Task]] = (0.0, set())

    @property
    def steps_under_way(self) -> int:
        """Steps that were sent and aren't done."""
        return sum(work.steps for work in self._under_way)

    def send(self, work: Dispatch, *, staleness: int | None) -> None:
        """Sends work as soon as there is room: one item for each worker and, with unbounded staleness, one more.

        Args:
            work: What to send.
            staleness: How many steps of others each may overlap with; None for any number.

        Raises:
            TaskLost: A ps is gone, or all workers are.
        """
        most = self.workers * (2 if staleness is None else 1)

        def room() -> bool:
            if not self._under_way:
                return True
            if len(self._under_way) >= most:
                return False
            if staleness is None:
                return True
            return self.steps_under_way <= staleness and all(
                other.overlap + work.steps <= staleness for other in self._under_way
            )

        self.wait(room)
        with self._changed:
            work.overlap = self.steps_under_way
            for other in self._under_way:
                other.overlap += work.steps
            self._under_way.append(work)
            self._progress = max(self._progress, time.monotonic() if len(self._under_way) == 1 else 0.0)
        with self._ended_by_errors():
            internals.schedule(self._coordinator, lambda: self._execute(work))

    def wait_for_all(self) -> None:
        """Waits until everything that was sent is done.

        Raises:
            TaskLost: As `send`.
        """
        self.wait(lambda: not self._under_way)

    def wait(self, until: Callable[[], bool]) -> None:
        """Waits until a condition holds; it is checked whenever work is done.

        Raises:
            TaskLost: As `send`.
        """
        while True:
            with self._changed:
                if self._changed.wait_for(until, 0.2):
                    return
            if self._trouble is not None or time.monotonic() - self._progress > _QUIET:
                self.look()
            if not isinstance(self._trouble, _OF_A_TASK) or time.monotonic() - self._troubled > _QUIET:
                with self._ended_by_errors():
                    self._coordinator.done()  # Raises what work has raised, unless that is run again.

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """A context in which TensorFlow may raise what work has raised in a worker's thread.

        It has then taken back what hadn't begun and waited for the rest: nothing is under way any more.
        """
        raised: BaseException | None = None
        try:
            yield
        except Exception as error:
            raised = error.error if isinstance(error, _Final) else error
        if raised is not None:
            with self._changed:
                self._under_way.clear()
                self._trouble = None
            raise raised

    def _execute(self, work: Dispatch) -> None:
        """Runs in a worker's thread. If that worker dies, TensorFlow calls it again in another worker's thread."""
        work.attempts += 1
        worker = internals.worker_index()
        if work.attempts > 1:
            self.retried += 1
        began, has_run = time.monotonic(), False
        try:
            result = work.run(work.attempts)
            work.seconds, has_run = time.monotonic() - began, True
            work.done(result)
        except BaseException as error:
            again = isinstance(error, Exception) and not has_run  # TensorFlow decides.
            raised = error if again else _Final(error)
            with self._changed:
                self._trouble, self._troubled = raised, time.monotonic()
                self._changed.notify_all()
            if again:
                raise
            raise raised from error
        with self._changed:
            self._under_way.remove(work)
            self.by_worker[worker] += work.steps * work.trains
            self._progress = time.monotonic()
            self._trouble = None
            self._changed.notify_all()

    def look(self) -> None:
        """Checks which tasks answer, and logs which don't.

        Raises:
            TaskLost: As `send`.
        """
        gone = {task for task in self.cluster.tasks if task.job in ("ps", "worker") and not answers(self.cluster, task)}
        for task in sorted(gone - self._gone, key=str):
            if task.job == "worker":
                _LOG.warning("%s at %s is gone; training goes on without it", task, self.cluster.address(task))
        for task in sorted(self._gone - gone, key=str):
            _LOG.info("%s is back", task)
        self._gone = gone
        lost = sorted(str(task) for task in gone if task.job == "ps")
        if lost:
            raise TaskLost(
                f"The job has lost {', '.join(lost)} and the variables there. "
                "Start it again from its last checkpoint (--resume), as toolkit launch --max_restarts=1 does."
            )
        progress = self._progress
        self._lost = (progress, gone | self._lost[1] if self._lost[0] == progress else gone)
        if len(self._lost[1]) >= self.workers and time.monotonic() - progress > _NO_WORKER:
            # A ClusterCoordinator takes lost workers back only when all of them answer: with one that never returns, it
            # would wait for ever.
            raise TaskLost(
                f"All {self.workers} workers were lost, and there was no progress for {_NO_WORKER:.0f} s. "
                "Start the job again, and resume."
            )


class _Final(Exception):
    """Holds an exception that TensorFlow would take for a lost worker's, or that would end a worker's thread unseen."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class DispatchSize:
    """Decides how many steps a worker is sent at once: several if a single one is too short for a dispatch.

    Args:
        options: What was asked.
        workers: The number of workers.

    Attributes:
        steps: How many to send at once now.
    """

    def __init__(self, options: ParameterServerOptions, workers: int) -> None:
        self.steps = options.steps_per_dispatch or 1
        self._fixed = options.steps_per_dispatch is not None or options.synchronous
        self._workers = workers
        self._most = _MOST_STEPS
        if options.max_staleness is not None and workers > 1:
            # Between the first and the last step of one dispatch, each other worker may have made two dispatches.
            self._most = max(1, min(_MOST_STEPS, options.max_staleness // (2 * (workers - 1))))
        self._shortest = float("inf")  # The first ones take longer, because their function is created on the worker.
        self._count = 0

    def note(self, seconds: float) -> None:
        """Records the seconds of a single step on a worker."""
        self._shortest = min(self._shortest, seconds)
        self._count += 1

    def adapt(self, left: int | None) -> None:
        """Sends several steps at once from now on, if that would be faster.

        Args:
            left: The number of steps still to come, None where nobody knows.
        """
        if self._fixed or self._most == 1 or self._count < 4 * self._workers:
            return
        wanted = min(self._most, int(_DISPATCH_SECONDS / max(1e-4, self._shortest)))
        wanted = 1 << max(0, wanted.bit_length() - 1)
        while left is not None and wanted > 1 and left <= _WORTH_IT * wanted:
            wanted //= 2
        if wanted > 1:
            self._fixed = True
            self.steps = wanted
            _LOG.info("A step takes a worker %.0f ms, so %d steps are sent at once", 1000 * self._shortest, wanted)


def answers(cluster: Cluster, task: Task) -> bool:
    """Returns whether a process listens at a task's address."""
    try:
        socket.create_connection(split(cluster.address(task)), timeout=2).close()
    except OSError:
        return False
    return True
