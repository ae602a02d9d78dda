"""Progress and speed of training: the callback that counts for all others."""

import time
from collections.abc import Callable
from typing import Any

import keras

from toolkit import strategies
from toolkit.strategies.step.train_step import count_steps
from toolkit.support.goodput import Account
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
        account: Is told what time is spent on.
        global_batch_size: Examples per step, over all replicas; None where it isn't known beforehand. It is then what
            Keras's mean of the loss counts in the second step, where the model has one.

    Attributes:
        position: Where training stands, by the steps that were really made: with `steps_per_execution`, Keras's last
            call in an epoch makes fewer than it tells callbacks, or more.
        made: How many steps Keras's last call has made.
        epoch: The number of the present epoch, from 0.
        steps_per_epoch: None until it is known: with data of unknown length, after the first epoch.
        passing_over: Whether Keras's present step is one that an earlier process has done.
    """

    reads_weights = False

    def __init__(
        self,
        *,
        epochs: int,
        resumed: Position,
        global_batch_size: int | None = None,
        account: Account | None = None,
    ) -> None:
        super().__init__()
        self.account = account or Account()
        self.epochs = epochs
        self.resumed = resumed
        self.global_batch_size = global_batch_size
        self.position = resumed
        self.made = 0
        self.epoch = resumed.epoch
        self.steps_per_epoch: int | None = None
        self.passing_over = False
        self._steps_before = resumed.step - resumed.batch  # Of whole epochs.
        self._seen = 0
        self._last: tuple[int, float] | None = None
        self._counted: tuple[int, int] | None = None
        self._count_of: Callable[[], int] | None = None  # The steps made so far; None where each call makes one.
        self._count_before = 0  # Steps that the present epoch begins with, in this process.
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

    def set_model(self, model: keras.Model) -> None:
        """Makes the model count its steps, before Keras makes its step function."""
        super().set_model(model)
        self._count_of = count_steps(model) if model.steps_per_execution > 1 else None

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps_per_epoch = self.params.get("steps")
        self.account.mark("other" if self.account.made else "starting")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        if self._count_of is not None:
            self._count_before = self._count_of()
        self._last = self._counted = None
        self._of_epoch = [0, 0.0]

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.passing_over = self.resumed.already_did(self.epoch, batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.passing_over:
            self.account.mark("starting")
            return
        self._advance(batch + 1)
        self.account.mark("progress" if self._seen else "first_step", steps=self.made)
        self._measure()

    def on_test_begin(self, logs: Any = None) -> None:
        self._advance()
        self.account.mark("progress")

    def on_test_end(self, logs: Any = None) -> None:
        self.account.mark("validating")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._advance()
        self.steps_per_epoch = self.steps_per_epoch or self.position.batch
        self._steps_before += self.position.batch
        self.position = Position(step=self._steps_before, epoch=epoch + 1)

    def _advance(self, batch: int | None = None) -> None:
        """Brings the position to what was made of the epoch: `batch` steps, unless they are counted.

        A call in whose midst the data ends may be one that callbacks don't learn of.
        """
        if self._count_of is not None:
            resumed = self.resumed.batch if self.epoch == self.resumed.epoch else 0
            batch = resumed + self._count_of() - self._count_before
        if batch is not None:
            self.made = self._steps_before + batch - self.position.step
            self.position = Position(step=self._steps_before + batch, epoch=self.epoch, batch=batch)

    def _rate(self, steps: float, seconds: float) -> float | None:
        return steps * self.global_batch_size / seconds if seconds and self.global_batch_size else None

    def _measure(self) -> None:
        batch = self.position.batch
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
