"""Images per second over all replicas, measured after warm-up."""

import time
from typing import Any

import keras

from toolkit.training.position import Position

__all__ = ["Throughput"]

_WARM_UP_STEPS = 10  # The first steps trace and compile the training function.


class Throughput(keras.callbacks.Callback):
    """Measures the time from the end of one step to the end of the next, within an epoch.

    Validation, checkpoints between epochs and the first steps of the process don't count.

    Args:
        global_batch_size: Images per step, over all replicas.
        resumed: Where this process goes on; steps before it are passed over in no time.
    """

    def __init__(self, global_batch_size: int, *, resumed: Position) -> None:
        super().__init__()
        self.global_batch_size = global_batch_size
        self.resumed = resumed
        self._number = 0
        self._seen = 0
        self._last: tuple[int, float] | None = None
        self._total = [0, 0.0]  # Steps, seconds.
        self._epoch = [0, 0.0]

    @property
    def images_per_second(self) -> float | None:
        """Of the whole run so far; None before the warm-up is over."""
        return self._rate(self._total)

    @property
    def epoch_images_per_second(self) -> float | None:
        """Of this epoch so far; None before the warm-up is over."""
        return self._rate(self._epoch)

    def _rate(self, pair: list) -> float | None:
        steps, seconds = pair
        return steps * self.global_batch_size / seconds if seconds else None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._number = epoch
        self._last = None
        self._epoch = [0, 0.0]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.resumed.already_did(self._number, batch):
            return
        now = time.perf_counter()
        self._seen += 1
        if self._last is not None and self._seen > _WARM_UP_STEPS:
            for pair in (self._total, self._epoch):
                pair[0] += batch - self._last[0]
                pair[1] += now - self._last[1]
        self._last = (batch, now)
