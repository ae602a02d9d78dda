"""SIGINT, SIGTERM and SIGHUP, held back until the training step is finished."""

import logging
import signal
import threading
from types import FrameType
from typing import Any

from toolkit.errors import StoppedBySignal

__all__ = ["StopSignals"]

_LOG = logging.getLogger(__name__)


class StopSignals:
    """While entered: a signal ends the program with `StoppedBySignal`, or, while `held`, is noted.

    A second signal ends the program at once even then.

    Attributes:
        held: Set it while a training loop looks at `received` after every step.
        received: The number of the signal that came, None if none did.
    """

    def __init__(self) -> None:
        self.held = False
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # Elsewhere Python allows no handlers.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a background job of the shell.
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
        self.held = False

    def _handle(self, number: int, _: FrameType | None) -> None:
        if not self.held or self.received is not None:
            raise StoppedBySignal(number, step=None)
        self.received = number
        _LOG.warning(
            "%s: finishing this step and writing a checkpoint; once more stops at once", signal.Signals(number).name
        )
