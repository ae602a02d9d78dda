"""What the chief keeps while steps are under way: counters, and totals of the metrics."""

import threading
from collections.abc import Sequence

import numpy as np

from toolkit.strategies.parameter_servers.variables import Variables

__all__ = ["Counters", "MetricTotals"]


class Counters:
    """The values of what counts, at each step: an optimizer's steps, seeds, a learning rate that is set.

    A worker that counted would read a count that others change: workers are sent where it stands, and
    the chief sets it when all is done.
    """

    def __init__(self, variables: Variables) -> None:
        self._variables = variables.counters
        self._start: list[np.ndarray] = []  # Their values when last no step was under way.
        self._increments: list[np.ndarray] = []

    def note(self, assigned: Sequence[int]) -> None:
        """Takes how often a step assigns each: it moves a seed generator's second element by that, or a count."""
        pairs = zip(self._variables, assigned, strict=True)
        self._increments = [np.array([0, times] if tuple(v.shape) == (2,) else times) for v, times in pairs]

    def after(self, steps: int) -> list[np.ndarray]:
        """Returns the values, so many steps after there was last none under way."""
        if not self._start:
            self._start = [np.array(v.numpy()) for v in self._variables]
        values = []
        for index, (variable, start) in enumerate(zip(self._variables, self._start, strict=True)):
            if not _is_whole(start):
                values.append(np.array(variable.numpy()))  # Such as a learning rate that a callback sets.
            elif self._increments:
                values.append((start + self._increments[index] * steps).astype(start.dtype))
            else:
                values.append(start)
        return values

    def set_after(self, steps: int) -> None:
        """Sets them, when so many steps are done and none is under way."""
        if steps:
            for variable, value in zip(self._variables, self.after(steps), strict=True):
                if _is_whole(value):
                    variable.assign(value)
        self._start = []


class MetricTotals:
    """Running metrics, as far as results have come: each dispatch counts from zero, and the chief adds up.

    Attributes:
        changed: Whether results have come since `logs` was last called.
    """

    def __init__(self, variables: Variables) -> None:
        self.changed = False
        self._model = variables.model
        self._variables = variables.metrics
        self._lock = threading.Lock()
        self._sums: list[np.ndarray] | None = None
        self._last: dict[str, float] = {}  # The logs of the last step whose results have come.
        self._logs: dict[str, float] = {}

    def start(self) -> None:
        """Begins with what the metrics hold, unless it has begun."""
        if self._sums is None:
            self._sums = [np.array(v.numpy()) for v in self._variables]

    def add(self, results: Sequence[tuple[np.ndarray, dict[str, float]]]) -> None:
        """Adds what dispatches counted: the sums of all metrics in one array, and the last step's logs.

        It is called in a worker's thread.
        """
        with self._lock:
            for counted, logs in results:
                place = 0
                for index, total in enumerate(self._sums or []):
                    added = counted[place : place + total.size].reshape(total.shape)
                    self._sums[index] = (total.astype(np.float64) + added).astype(total.dtype)  # type: ignore[index]
                    place += total.size
                self._last = logs
            self.changed = True

    def logs(self) -> dict[str, float]:
        """Sets the metrics as far as results have come, and returns them as logs; {} before the first."""
        if self.changed:
            with self._lock:
                self.changed = False
                sums, last = list(self._sums or []), dict(self._last)
            self._set(sums)
            results: dict[str, float] = {}
            for name, value in type(self._model).get_metrics_result(self._model).items():
                results.update({name: value} if not isinstance(value, dict) else value)
            # What a train_step of the user's returns beside metrics is the last step's.
            self._logs = {**last, **{name: float(value) for name, value in results.items()}}
        return dict(self._logs)

    def finish(self) -> None:
        """Sets the metrics, when nothing is under way."""
        if self._sums is not None:
            self._set(self._sums)
        self._sums = None
        self._last, self._logs = {}, {}
        self.changed = False

    def _set(self, sums: Sequence[np.ndarray]) -> None:
        for variable, value in zip(self._variables, sums, strict=True):
            variable.assign(value)


def _is_whole(value: np.ndarray) -> bool:
    return value.dtype.kind in "iu"
