"""SIGINT, SIGTERM and SIGHUP, held back until the training step is finished."""

import contextlib
import logging
import signal
import time
from types import FrameType

from toolkit.errors import StoppedBySignal
from toolkit.support import signals

__all__ = ["StopSignals"]

_LOG = logging.getLogger(__name__)
_SAME = 5.0  # Seconds in which two SIGTERMs are one.


class StopSignals:
    """While entered: a signal ends the program with `StoppedBySignal`, or, while `held`, is noted.

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
