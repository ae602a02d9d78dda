"""What counts: an optimizer's steps, the state of seed generators, a learning rate that is set."""

from typing import Any

import numpy as np

from toolkit.strategies.parameter_servers.tracing import Traced
from toolkit.strategies.parameter_servers.variables import Variables

__all__ = ["Counting"]


class Counting:
    """The values of what counts at each step, however many steps are under way.

    A worker that counted would read a count that others change: workers are told where it stands, and
    the chief sets it when all is done.

    Args:
        variables: Of the model.
    """

    def __init__(self, variables: Variables) -> None:
        self._variables = variables.counting
        self._start: list[np.ndarray] = []  # Their values where training was last settled.
        self._increments: list[Any] = []

    def note(self, made: Traced) -> None:
        """Takes over by how much a step moves each: a seed generator's second number, or a count of steps."""
        pairs = zip(self._variables, made.assigned, strict=True)
        self._increments = [np.array([0, times]) if tuple(v.shape) == (2,) else times for v, times in pairs]

    def at(self, steps: int) -> list[np.ndarray]:
        """Returns the values, so many steps after training was last settled."""
        if not self._start:
            self._start = [np.array(v.numpy()) for v in self._variables]
        values = []
        for number, (variable, start) in enumerate(zip(self._variables, self._start, strict=True)):
            if _moves_by_whole_numbers(start):
                increment = self._increments[number] if self._increments else 0
                values.append((start + np.asarray(increment * steps)).astype(start.dtype))
            else:
                values.append(np.array(variable.numpy()))  # Such as a learning rate that a callback sets.
        return values

    def settle(self, steps: int) -> None:
        """Sets them, when so many steps are done and none is under way."""
        if steps:
            for variable, value in zip(self._variables, self.at(steps), strict=True):
                if _moves_by_whole_numbers(value):
                    variable.assign(value)
        self._start = []


def _moves_by_whole_numbers(value: np.ndarray) -> bool:
    return value.dtype.kind in "iu"
