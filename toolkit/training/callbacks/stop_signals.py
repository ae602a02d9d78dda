"""SIGINT, SIGTERM and SIGHUP wait until the step is finished; then all processes stop after the same step."""

import contextlib
import logging
import signal
import time
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np

from toolkit.errors import StoppedBySignal
from toolkit.support import signals

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["StopAgreement", "StopSignals"]

_LOG = logging.getLogger(__name__)
_SAME = 5.0  # Two SIGTERMs within so many seconds count as one.
_SECONDS = 0.5  # How often the processes ask one another; one exchange takes 1 to 2 ms on one machine.
_MOST_STEPS = 1000


class StopSignals:
    """While entered, a signal ends the program with `StoppedBySignal`; while `held`, it is only recorded.

    A second signal ends the program at once even then; but a second SIGTERM of the same seconds is the first one, told
    twice: by a cluster's scheduler to all processes, and by the launcher, which it has told, too.

    Attributes:
        held: Set it while a training loop looks at `received` after every step.
        received: The number of the signal that came, None if none did.
    """

    def __init__(self) -> None:
        self.held = False
        self.received: int | None = None
        self._at = 0.0
        self._handlers = contextlib.ExitStack()

    def __enter__(self) -> "StopSignals":
        self._handlers.enter_context(signals.handle(signals.SIGNALS, self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()
        self.held = False

    def _handle(self, number: int, _: FrameType | None) -> None:
        told_twice = number == self.received == signal.SIGTERM and time.monotonic() - self._at < _SAME
        if told_twice:
            return
        if not self.held or self.received is not None:
            raise StoppedBySignal(number, step=None)
        self.received, self._at = number, time.monotonic()
        _LOG.warning(
            "%s received: the run stops after this step, with a checkpoint. A second signal stops it at once",
            signal.Signals(number).name,
        )


class StopAgreement:
    """Decides after a step on which signal the processes stop.

    A process that stopped by itself would leave the others waiting in the next step's all-reduce.

    Args:
        signals: What this process has received.
        strategy: Whose processes stop together.
    """

    def __init__(self, signals: StopSignals, strategy: "tf.distribute.Strategy") -> None:
        from toolkit.strategies.processes import agreement

        self.signals = signals
        self._strategy = strategy
        self._extremes = agreement.extremes
        self.alone = agreement.processes(strategy) == 1
        self._next = 0
        self._asked: tuple[int, float] | None = None

    def after(self, step: int) -> int | None:
        """Returns the signal's number, None if no process stops after this step.

        Args:
            step: Steps done in all; every process asks after the same ones.
        """
        if self.alone:
            return self.signals.received
        return self.now(step) if step >= self._next else None

    def now(self, step: int) -> int | None:
        """As `after`, but always asks the other processes."""
        if self.alone:
            return self.signals.received
        interval = 1
        now = time.monotonic()
        if self._asked is not None and step > self._asked[0]:
            seconds = (now - self._asked[1]) / (step - self._asked[0])
            interval = max(1, min(_MOST_STEPS, int(_SECONDS / seconds)))
        # The smallest interval that any process proposes, computed as a maximum of negative numbers.
        mine = np.array([self.signals.received or 0, -interval], np.int64)
        received, negative = (int(value) for value in self._extremes(self._strategy, mine)[1])
        self._next = step - negative
        self._asked = (step, time.monotonic())
        return received or None
