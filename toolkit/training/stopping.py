"""When to stop: a signal to one process must stop all of them after the same step."""

import time
from typing import TYPE_CHECKING

import numpy as np

from toolkit.training.signals import StopSignals

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["Stopping"]

_SECONDS = 0.5  # How often the processes ask one another; a question takes 1 to 2 ms on one machine.
_MOST_STEPS = 1000


class Stopping:
    """Says after a step which signal the processes stop on.

    A process that stopped by itself would leave the others waiting in the next step's all-reduce.

    Args:
        signals: What this process has received.
        strategy: Whose processes stop together.
    """

    def __init__(self, signals: StopSignals, strategy: "tf.distribute.Strategy") -> None:
        from toolkit.strategies import agreement

        self.signals = signals
        self._strategy = strategy
        self._extremes = agreement.extremes
        self.alone = agreement.processes(strategy) == 1
        self._next = 0
        self._asked: tuple[int, float] | None = None

    def after(self, step: int) -> int | None:
        """Returns the signal's number, None if there is none to stop on after this step.

        Args:
            step: Steps done in all; every process asks after the same ones.
        """
        if self.alone:
            return self.signals.received
        return self.now(step) if step >= self._next else None

    def now(self, step: int) -> int | None:
        """As `after`, and asks the other processes in any case."""
        if self.alone:
            return self.signals.received
        interval = 1
        now = time.monotonic()
        if self._asked is not None and step > self._asked[0]:
            seconds = (now - self._asked[1]) / (step - self._asked[0])
            interval = max(1, min(_MOST_STEPS, int(_SECONDS / seconds)))
        # The smallest interval that any process proposes, as the largest of negative ones.
        mine = np.array([self.signals.received or 0, -interval], np.int64)
        received, negative = (int(value) for value in self._extremes(self._strategy, mine)[1])
        self._next = step - negative
        self._asked = (step, time.monotonic())
        return received or None
