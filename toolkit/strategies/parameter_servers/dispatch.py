"""Steps on their way to workers and back."""

import collections
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from toolkit.cluster import Cluster, Task, split
from toolkit.errors import TaskLost
from toolkit.strategies.parameter_servers import private

__all__ = ["Dispatcher", "Work", "answers"]

_LOG = logging.getLogger(__name__)
_QUIET = 2.0  # Seconds without a result after which the tasks are looked at.
_NO_WORKER = 60.0  # Seconds that training waits for all workers to come back where none is left.


class Work:
    """What a worker is sent.

    Args:
        steps: How many it holds.
        run: Takes the number of the attempt, from 1; returns a result with no tensor of the worker's left in it.
        done: Called with the result, once, in the worker's thread.
        trains: Whether they are steps of training.
    """

    def __init__(
        self, steps: int, run: Callable[[int], Any], done: Callable[[Any], None], *, trains: bool = False
    ) -> None:
        self.trains = trains
        self.steps = steps
        self.run = run
        self.done = done
        self.attempts = 0
        self.overlap = 0  # Steps of others since it was sent, and under way when it was.
        self.seconds = 0.0


class Dispatcher:
    """Sends work to whichever worker is free, and knows how it goes.

    Args:
        coordinator: Of the strategy.
        cluster: All tasks.
    """

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, cluster: Cluster) -> None:
        self.cluster = cluster
        self.workers = sum(task.job == "worker" for task in cluster.tasks)
        self.by_worker: collections.Counter = collections.Counter()
        self.retried = 0
        self._coordinator = coordinator
        self._changed = threading.Condition()
        self._under_way: list[Work] = []
        self._progress = time.monotonic()
        self._trouble: BaseException | None = None
        self._gone: set[Task] = set()
        self._lost: tuple[float, set[Task]] = (0.0, set())  # When there was progress last, and who was seen gone since.

    @property
    def steps_under_way(self) -> int:
        """Steps that were sent and aren't done."""
        return sum(work.steps for work in self._under_way)

    def send(self, work: Work, *, staleness: int | None) -> None:
        """Sends it as soon as there is room: one for each worker, and, unless they are bounded, one that waits.

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
        private.schedule(self._coordinator, lambda: self._execute(work))

    def settle(self) -> None:
        """Waits until all that was sent is done.

        Raises:
            TaskLost: As `send`.
        """
        self.wait(lambda: not self._under_way)

    def wait(self, until: Callable[[], bool]) -> None:
        """Waits until something holds; it is looked at whenever work is done.

        Raises:
            TaskLost: As `send`.
        """
        while True:
            with self._changed:
                if until():
                    return
                self._changed.wait(0.2)
                if until():
                    return
            if self._trouble is not None or time.monotonic() - self._progress > _QUIET:
                self.look()
            if self._trouble is None or not _from_a_task(self._trouble):
                self._coordinator.done()  # Raises what a step raised.

    def _execute(self, work: Work) -> None:
        """In a worker's thread; where that worker dies in it, TensorFlow calls it again in another's."""
        work.attempts += 1
        worker = private.worker_index()
        if work.attempts > 1:
            self.retried += 1
        began = time.monotonic()
        try:
            result = work.run(work.attempts)
        except Exception as error:
            with self._changed:
                self._trouble = error
                self._changed.notify_all()
            raise
        work.seconds = time.monotonic() - began
        work.done(result)
        with self._changed:
            self._under_way.remove(work)
            self.by_worker[worker] += work.steps * work.trains
            self._progress = time.monotonic()
            self._trouble = None
            self._changed.notify_all()

    def look(self) -> None:
        """Looks which tasks answer, and says which don't.

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
                f"{', '.join(lost)} is gone, and with it the variables that it held. "
                "Start the job again from its last checkpoint (--resume), as toolkit launch --max_restarts=1 does."
            )
        progress = self._progress
        self._lost = (progress, gone | self._lost[1] if self._lost[0] == progress else gone)
        if len(self._lost[1]) >= self.workers and time.monotonic() - progress > _NO_WORKER:
            # TensorFlow takes one back only when all are there.
            raise TaskLost(
                f"All {self.workers} workers were lost, and there was no progress for {_NO_WORKER:.0f} s. "
                "Start the job again, and resume."
            )


def answers(cluster: Cluster, task: Task) -> bool:
    """Says whether something listens at a task's address."""
    try:
        socket.create_connection(split(cluster.address(task)), timeout=2).close()
    except OSError:
        return False
    return True


def _from_a_task(error: BaseException) -> bool:
    """Whether TensorFlow may try again: a task can't be reached, or what it did was cancelled."""
    return isinstance(error, (tf.errors.UnavailableError, tf.errors.CancelledError, tf.errors.AbortedError))
