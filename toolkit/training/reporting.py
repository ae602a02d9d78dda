"""Where training stands, told to the launcher that started this task."""

import time
from typing import Any

import keras

from toolkit.support import status
from toolkit.training.length import Length
from toolkit.training.throughput import Throughput

__all__ = ["Reporting"]

_SECONDS = 0.25  # How often at most.


class Reporting(keras.callbacks.Callback):
    """Reports step and speed while training, and what the task does in between.

    Args:
        length: Of the whole training.
        throughput: Where images per second are measured.
    """

    def __init__(self, *, length: Length, throughput: Throughput) -> None:
        super().__init__()
        self.length = length
        self.throughput = throughput
        self._epoch = 0
        self._told = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        status.report(state="training", step=0, steps=self.length.total_steps)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = time.monotonic()
        first = batch == 0 and self._epoch == 0
        if first or now - self._told > _SECONDS:
            self._told = now
            step = self._epoch * self.length.steps_per_epoch + batch + 1
            status.report(state="training", step=step, images_per_second=self.throughput.images_per_second)

    def on_test_begin(self, logs: Any = None) -> None:
        status.report(state="evaluating")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        now = time.monotonic()
        if now - self._told > _SECONDS:
            self._told = now
            status.report(state="evaluating")

    def on_train_end(self, logs: Any = None) -> None:
        status.report(state="trained", step=self.length.total_steps)
