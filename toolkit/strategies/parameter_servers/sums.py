"""Running metrics: each dispatch counts from zero, and the chief adds up."""

import threading
from collections.abc import Sequence

import numpy as np

from toolkit.strategies.parameter_servers.variables import Variables

__all__ = ["Sums"]


class Sums:
    """The metrics of a model, as far as results have come.

    Args:
        variables: Of the model.

    Attributes:
        changed: Whether results have come that `known` hasn't told.
    """

    def __init__(self, variables: Variables) -> None:
        self.changed = False
        self._model = variables.model
        self._variables = variables.metrics
        self._lock = threading.Lock()
        self._sums: list[np.ndarray] | None = None
        self._logs: dict[str, float] = {}
        self._told: dict[str, float] = {}

    def start(self) -> None:
        """Goes on from what the metrics hold, where they were settled before."""
        if self._sums is None:
            self._sums = [np.array(v.numpy()) for v in self._variables]

    def add(self, results: Sequence[tuple[np.ndarray, dict[str, float]]]) -> None:
        """Adds what dispatches counted; in a worker's thread.

        Args:
            results: The sums of all metrics in one array, and the last step's logs.
        """
        with self._lock:
            for counted, logs in results:
                place = 0
                for number, total in enumerate(self._sums or []):
                    added = counted[place : place + total.size].reshape(total.shape)
                    self._sums[number] = (total.astype(np.float64) + added).astype(total.dtype)  # type: ignore[index]
                    place += total.size
                self._logs = logs
            self.changed = True

    def known(self) -> dict[str, float]:
        """Sets the metrics as far as results have come, and returns them as logs; {} before the first."""
        if self.changed:
            with self._lock:
                self.changed = False
                sums, last = list(self._sums or []), dict(self._logs)
            self._set(sums)
            results: dict[str, float] = {}
            for name, value in type(self._model).get_metrics_result(self._model).items():
                results.update({name: value} if not isinstance(value, dict) else value)
            # What a train_step of the user's returns beside metrics is the last step's.
            self._told = {**last, **{name: float(value) for name, value in results.items()}}
        return dict(self._told)

    def settle(self) -> None:
        """Sets the metrics, when nothing is under way."""
        if self._sums is not None:
            self._set(self._sums)
        self._sums = None
        self._logs, self._told = {}, {}
        self.changed = False

    def _set(self, sums: Sequence[np.ndarray]) -> None:
        for variable, value in zip(self._variables, sums, strict=True):
            variable.assign(value)
