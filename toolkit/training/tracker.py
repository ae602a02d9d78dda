"""The callback that counts steps for all the others."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from toolkit.training.position import Position

__all__ = ["Tracker", "scalars"]


def scalars(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns logs as numbers with a name each: of a metric that is a vector, such as F1Score, name_0, name_1 ..."""
    found = {}
    for name, value in (logs or {}).items():
        array = np.asarray(value)
        if array.ndim == 0:
            found[name] = float(array)
        else:
            found.update({f"{name}_{place}": float(each) for place, each in enumerate(array.ravel())})
    return found


class Tracker(keras.callbacks.Callback):
    """Knows where training stands; it comes first among the callbacks, and the others ask it.

    A resumed run passes over the steps of its first epoch that an earlier process has done: Keras counts them and
    calls callbacks for them, but nothing is computed.

    Args:
        epochs: The epochs of the whole training.
        resumed: Where this process goes on.

    Attributes:
        position: Where training stands.
        epoch: The number of the present epoch, from 0.
        batch: The number of the first step in Keras's present call, from 0 in each epoch.
        steps_per_epoch: None until it is known: with data of unknown length, after the first epoch.
        passing_over: Whether Keras's present step is one that an earlier process has done.
    """

    reads_weights = False

    def __init__(self, *, epochs: int, resumed: Position) -> None:
        super().__init__()
        self.epochs = epochs
        self.resumed = resumed
        self.position = resumed
        self.epoch = resumed.epoch
        self.batch = -1
        self.steps_per_epoch: int | None = None
        self.passing_over = False
        self._steps_before = resumed.step - resumed.batch  # Those of whole epochs.

    @property
    def total_steps(self) -> int | None:
        """The steps of all epochs together, None while that isn't known."""
        return self.steps_per_epoch and self.steps_per_epoch * self.epochs

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps_per_epoch = self.params.get("steps")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch, self.batch = epoch, -1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.batch = batch
        self.passing_over = self.resumed.already_did(self.epoch, batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # With steps_per_execution, `batch` is the last of several, of which an epoch's end leaves some undone.
        if self.steps_per_epoch is not None:
            batch = min(batch, self.steps_per_epoch - 1)
        if not self.passing_over:
            self.position = Position(step=self._steps_before + batch + 1, epoch=self.epoch, batch=batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.steps_per_epoch = self.steps_per_epoch or self.position.batch
        self._steps_before += self.position.batch
        self.position = Position(step=self._steps_before, epoch=epoch + 1)
