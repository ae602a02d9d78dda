"""What the chief keeps while steps are under way: counters, and totals of the metrics."""

import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from toolkit.strategies.parameter_servers.variables import Variables
from toolkit.strategies.variables.model_optimizers import optimizers_of

__all__ = ["Counters", "MetricTotals"]


class Counters:
    """The values of counters at each step: an optimizer's steps, seeds, a learning rate that was set.

    A worker that counted would read a count that others change: workers are sent where it stands, and
    the chief sets it when all is done.
    """

    def __init__(self, variables: Variables) -> None:
        self._variables = variables.counters
        self._start: list[np.ndarray] = []  # Their values when no step was under way last.
        self._increments: list[np.ndarray] = []
        self._conditional: list[int] = []  # Which ones a step assigns in a branch; the worker reports those.
        self._corrections: dict[int, np.ndarray] = {}  # How much those differ from their values without the branch.
        self._scales = _scales(variables)
        self._told = [index for index, v in enumerate(self._variables) if id(v) in variables.told]
        self._lock = threading.Lock()

    def note(self, assigned: Sequence[int], conditional: Sequence[int]) -> None:
        """Records how often a step assigns each: it increases a seed generator's second element by that, or a count.

        Args:
            assigned: For each, how often.
            conditional: The indices of those that it assigns in a branch.
        """
        pairs = zip(self._variables, assigned, strict=True)
        self._increments = [np.array([0, times] if tuple(v.shape) == (2,) else times) for v, times in pairs]
        for index in [scale.finite for scale in self._scales] + self._told:
            self._increments[index] = np.array(0)
        self._conditional = list(conditional)

    def take(self, branched: np.ndarray, steps: int) -> None:
        """Records what this many steps did to counters in branches: their values before and after, in one array.

        It is called in a worker's thread. Batches that were evaluated are no steps, and tell of `Variables.told` alone.
        """
        told = self._conditional if steps else self._told
        like = [self._variables[index] for index in told] * 2
        ends = np.cumsum([math.prod(v.shape) for v in like], dtype=int)
        values = [part.reshape(v.shape) for v, part in zip(like, np.split(branched, ends)[:-1], strict=True)]
        before = dict(zip(told, values[: len(values) // 2], strict=True))
        after = dict(zip(told, values[len(values) // 2 :], strict=True))
        with self._lock:
            for scale in self._scales:
                if scale.value in after:
                    self._take_scale(scale, before, after)
            for index, value in after.items():
                if any(index in (scale.value, scale.finite) for scale in self._scales):
                    continue
                if _is_whole(self._start[index]):
                    more = value - before[index] - (self._increments[index] * steps if steps else 0)
                    self._corrections[index] = self._corrections.get(index, 0) + more
                else:
                    self._variables[index].assign(value)

    def _take_scale(self, of: "_Scale", before: dict[int, np.ndarray], after: dict[int, np.ndarray]) -> None:
        """Takes a worker's loss scale: always if it is smaller, otherwise if it began with the current one."""
        now = float(self._variables[of.value].numpy())
        finite = self._start[of.finite] + self._corrections.get(of.finite, 0)
        sent, found = float(before[of.value]), float(after[of.value])
        if found < min(sent, now) or found > sent == now:
            now, finite = found, after[of.finite]
        elif found == sent == now:
            finite = np.maximum(0, finite + after[of.finite] - before[of.finite])
        self._variables[of.value].assign(now)
        # A worker doubles the scale at exactly this count.
        self._corrections[of.finite] = np.minimum(finite, of.growth - 1) - self._start[of.finite]

    def after(self, steps: int) -> list[np.ndarray]:
        """Returns the values this many steps after no step was under way."""
        if not self._start:
            self._start = [np.array(v.numpy()) for v in self._variables]
        values = []
        with self._lock:
            for index, (variable, start) in enumerate(zip(self._variables, self._start, strict=True)):
                if not _is_whole(start):
                    values.append(np.array(variable.numpy()))  # Such as a learning rate that a callback sets.
                elif self._increments or index in self._corrections:
                    moved = (self._increments[index] * steps if steps else 0) + self._corrections.get(index, 0)
                    values.append((start + moved).astype(start.dtype))
                else:
                    values.append(start)
        return values

    def branched_after(self, steps: int) -> dict[int, np.ndarray]:
        """Returns those that are assigned in branches, by index, as far as results have arrived; others as `after`."""
        told = {*self._conditional, *self._told}
        if not told:
            return {}
        values = self.after(steps)
        return {index: values[index] for index in told}

    def set_after(self, steps: int) -> None:
        """Sets them when this many steps are done and none is under way."""
        if steps or self._corrections:
            for variable, value in zip(self._variables, self.after(steps), strict=True):
                if _is_whole(value):
                    variable.assign(value)
        self._start = []
        self._corrections = {}


class MetricTotals:
    """Running metrics, as far as results have arrived: each dispatch counts from zero, and the chief adds.

    Attributes:
        changed: Whether results have come since `logs` was last called.
        ended: The last step's logs, when nothing was under way.
    """

    def __init__(self, variables: Variables) -> None:
        self.changed = False
        self._model = variables.model
        self._variables = variables.metrics
        self._of = variables
        self._lock = threading.Lock()
        self._sums: list[np.ndarray] | None = None
        self.ended: dict[str, Any] = {}
        self._last: dict[str, Any] = {}  # The logs of the last step whose results have arrived.
        self._kind, self._order = "train", -1  # Of that step.
        self._logs: dict[str, Any] = {}

    @property
    def arrived(self) -> bool:
        """Whether a step's results have arrived since nothing was under way."""
        return self._order >= 0

    @property
    def size(self) -> int:
        """The number of elements of all metrics' sums."""
        return sum(math.prod(v.shape) for v in self._variables)

    def start(self) -> None:
        """Begins with the metrics' current values, unless it has begun."""
        if self._sums is None:
            self._sums = [np.array(v.numpy()) for v in self._variables]

    def add(self, results: Sequence[tuple[np.ndarray, dict[str, Any]]], *, kind: str = "train", order: int) -> None:
        """Adds the counts of dispatches: the sums of all metrics in one array, and the last step's logs.

        Their kind is "train" or "test". They may come in another order than they were sent in, which is `order`.

        It is called in a worker's thread.
        """
        with self._lock:
            for counted, logs in results:
                place = 0
                for index, total in enumerate(self._sums or []):
                    added = counted[place : place + total.size].reshape(total.shape)
                    self._sums[index] = (total.astype(np.float64) + added).astype(total.dtype)  # type: ignore[index]
                    place += total.size
                if order >= self._order:
                    self._last, self._kind, self._order = logs, kind, order
            self.changed = True

    def logs(self) -> dict[str, Any]:
        """Sets the metrics as far as results have arrived, and returns them as logs; {} before the first."""
        if self.changed:
            with self._lock:
                self.changed = False
                sums, last, kind = list(self._sums or []), dict(self._last), self._kind
            self._set(sums)
            results = [keras.tree.flatten(type(metric).result(metric)) for metric in self._model.metrics]
            reported = self._of.reported.get(kind, {})
            self._logs = {**last, **{name: _plain(results[at][place]) for name, (at, place) in reported.items()}}
        return dict(self._logs)

    def finish(self) -> None:
        """Sets the metrics when nothing is under way."""
        self.logs()
        if self._sums is not None:
            self._set(self._sums)
        self._sums = None
        self.ended = self._logs
        self._last, self._logs, self._order = {}, {}, -1
        self.changed = False

    def _set(self, sums: Sequence[np.ndarray]) -> None:
        for variable, value in zip(self._variables, sums, strict=True):
            variable.assign(value)


@dataclasses.dataclass(frozen=True)
class _Scale:
    """A loss scale: the indices of its value and of its count of finite steps, and the count's limit."""

    value: int
    finite: int
    growth: int


def _scales(variables: Variables) -> list[_Scale]:
    places = {id(v): index for index, v in enumerate(variables.counters)}
    return [
        _Scale(places[id(each.dynamic_scale)], places[id(each.step_counter)], each.dynamic_growth_steps)
        for each in optimizers_of(variables.model)
        if isinstance(each, keras.optimizers.LossScaleOptimizer) and each.built
    ]


def _plain(value: Any) -> Any:
    """Returns a metric's result in the form of Keras's logs: a float, or an array."""
    value = np.asarray(keras.ops.convert_to_numpy(value))
    return value if value.ndim else float(value)


def _is_whole(value: np.ndarray) -> bool:
    return value.dtype.kind in "iu"
