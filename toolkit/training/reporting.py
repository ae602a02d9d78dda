"""Where training stands, reported to the launcher that started this task."""

import time
from typing import Any

import keras

from toolkit.support import status
from toolkit.training.throughput import Throughput
from toolkit.training.tracker import Tracker

__all__ = ["Reporting"]

_SECONDS = 0.25  # How often at most.


class Reporting(keras.callbacks.Callback):
    """Reports step and speed while training, and what the task does in between.

    Args:
        tracker: Where training stands.
        throughput: Where examples per second are measured.
    """

    def __init__(self, *, tracker: Tracker, throughput: Throughput) -> None:
        super().__init__()
        self.tracker = tracker
        self.throughput = throughput
        self._reported = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        status.report(state="training", step=0, steps=self.tracker.total_steps)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = self.tracker.position.step
        if step == 1 or self._due():
            status.report(state="training", step=step, images_per_second=self.throughput.examples_per_second)

    def on_test_begin(self, logs: Any = None) -> None:
        status.report(state="evaluating")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._due():
            status.report(state="evaluating")

    def on_train_end(self, logs: Any = None) -> None:
        status.report(state="trained", step=self.tracker.position.step)

    def _due(self) -> bool:
        now = time.monotonic()
        if now - self._reported <= _SECONDS:
            return False
        self._reported = now
        return True
