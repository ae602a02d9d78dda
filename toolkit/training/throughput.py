"""Examples per second over all replicas, measured after warm-up."""

import time
from typing import Any

import keras

from toolkit.training.tracker import Tracker

__all__ = ["Throughput"]

_WARM_UP_STEPS = 10  # The first steps trace and compile the training function.


class Throughput(keras.callbacks.Callback):
    """Measures the time from the end of one step to the end of the next, within an epoch.

    Validation, checkpoints between epochs and the first steps of the process don't count.

    Args:
        global_batch_size: Examples per step, over all replicas; None where it isn't known beforehand. It is then what
            Keras's mean of the loss counts in the second step, where the model has one.
        tracker: Where training stands.
    """

    def __init__(self, global_batch_size: int | None, *, tracker: Tracker) -> None:
        super().__init__()
        self.global_batch_size = global_batch_size
        self.tracker = tracker
        self._seen = 0
        self._last: tuple[int, float] | None = None
        self._counted: tuple[int, int] | None = None
        self._total = [0, 0.0]  # Steps, seconds.
        self._epoch = [0, 0.0]

    @property
    def examples_per_second(self) -> float | None:
        """The rate of the whole run so far; None before the warm-up is over."""
        return self._rate(self._total)

    @property
    def epoch_examples_per_second(self) -> float | None:
        """The rate of this epoch so far; None before the warm-up is over."""
        return self._rate(self._epoch)

    def _rate(self, pair: list) -> float | None:
        steps, seconds = pair
        return steps * self.global_batch_size / seconds if seconds and self.global_batch_size else None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._last = self._counted = None
        self._epoch = [0, 0.0]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.tracker.passing_over:
            return
        if self.global_batch_size is None:
            self._count(batch)
        now = time.perf_counter()
        self._seen += 1
        if self._last is not None and self._seen > _WARM_UP_STEPS:
            for pair in (self._total, self._epoch):
                pair[0] += batch - self._last[0]
                pair[1] += now - self._last[1]
        self._last = (batch, now)

    def _count(self, batch: int) -> None:
        """Sets the examples of a step from what the loss's mean has counted between the ends of two steps."""
        mean = next((m for m in self.model.metrics if isinstance(m, keras.metrics.Mean) and m.name == "loss"), None)
        if mean is None or self._seen > 1:
            return
        counted = round(float(keras.ops.convert_to_numpy(mean.count)))
        if self._counted is not None:
            self.global_batch_size = round((counted - self._counted[1]) / (batch - self._counted[0])) or None
        self._counted = (batch, counted)
