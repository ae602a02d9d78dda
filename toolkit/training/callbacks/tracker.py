"""Progress and speed of training: the callback that counts for all others."""

import time
from typing import Any

import keras

from toolkit import strategies
from toolkit.training.checkpoints.position import Position

__all__ = ["Tracker"]

_WARM_UP_STEPS = 10  # The first steps trace and compile the training function.


class Tracker(keras.callbacks.Callback):
    """Counts steps and epochs. It comes first among the callbacks, and the others ask it.

    A resumed run passes over the steps of its first epoch that an earlier process has done: Keras counts them and
    calls callbacks for them, but nothing is computed.

    Speed is measured from the end of one step to the end of the next, within an epoch. Validation, checkpoints between
    epochs and the first steps of the process don't count.

    Args:
        epochs: The epochs of the whole training.
        resumed: Where this process goes on.
        global_batch_size: Examples per step, over all replicas; None where it isn't known beforehand. It is then what
            Keras's mean of the loss counts in the second step, where the model has one.

    Attributes:
        position: Where training stands.
        epoch: The number of the present epoch, from 0.
        batch: The number of the first step in Keras's present call, from 0 in each epoch.
        steps_per_epoch: None until it is known: with data of unknown length, after the first epoch.
        passing_over: Whether Keras's present step is one that an earlier process has done.
    """

    reads_weights = False

    def __init__(self, *, epochs: int, resumed: Position, global_batch_size: int | None = None) -> None:
        super().__init__()
        self.epochs = epochs
        self.resumed = resumed
        self.global_batch_size = global_batch_size
        self.position = resumed
        self.epoch = resumed.epoch
        self.batch = -1
        self.steps_per_epoch: int | None = None
        self.passing_over = False
        self._steps_before = resumed.step - resumed.batch  # Of whole epochs.
        self._seen = 0
        self._last: tuple[int, float] | None = None
        self._counted: tuple[int, int] | None = None
        self._total, self._of_epoch = [0, 0.0], [0, 0.0]  # Steps, seconds.

    @property
    def total_steps(self) -> int | None:
        """The steps of all epochs together, None while they aren't known."""
        return self.steps_per_epoch and self.steps_per_epoch * self.epochs

    @property
    def examples_per_second(self) -> float | None:
        """Over all replicas, in the whole run so far; None before the warm-up is over."""
        return self._rate(*self._total)

    @property
    def epoch_examples_per_second(self) -> float | None:
        """The same for this epoch so far."""
        return self._rate(*self._of_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps_per_epoch = self.params.get("steps")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch, self.batch = epoch, -1
        self._last = self._counted = None
        self._of_epoch = [0, 0.0]

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.batch = batch
        self.passing_over = self.resumed.already_did(self.epoch, batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.passing_over:
            return
        self._measure(batch)
        # With steps_per_execution, `batch` is the last of several steps; at an epoch's end some of them don't exist.
        if self.steps_per_epoch is not None:
            batch = min(batch, self.steps_per_epoch - 1)
        self.position = Position(step=self._steps_before + batch + 1, epoch=self.epoch, batch=batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.steps_per_epoch = self.steps_per_epoch or self.position.batch
        self._steps_before += self.position.batch
        self.position = Position(step=self._steps_before, epoch=epoch + 1)

    def _rate(self, steps: float, seconds: float) -> float | None:
        return steps * self.global_batch_size / seconds if seconds and self.global_batch_size else None

    def _measure(self, batch: int) -> None:
        if self.global_batch_size is None:
            self._count(batch)
        now = time.perf_counter()
        self._seen += 1
        if self._last is not None and self._seen > _WARM_UP_STEPS:
            for pair in (self._total, self._of_epoch):
                pair[0] += batch - self._last[0]
                pair[1] += now - self._last[1]
        self._last = (batch, now)

    def _count(self, batch: int) -> None:
        """Computes the examples of a step from the count of the loss's mean between two steps."""
        mean = next((m for m in self.model.metrics if isinstance(m, keras.metrics.Mean) and m.name == "loss"), None)
        if mean is None or self._seen > 1:
            return
        strategies.wait_for_steps(self.model)
        counted = round(float(keras.ops.convert_to_numpy(mean.count)))
        if self._counted is not None:
            self.global_batch_size = round((counted - self._counted[1]) / (batch - self._counted[0])) or None
        self._counted = (batch, counted)
