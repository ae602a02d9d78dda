"""The callback that writes checkpoints, and makes `fit` go on in the middle of an epoch."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import keras

from toolkit.errors import CheckpointsFailing, StoppedBySignal
from toolkit.training import finite, state
from toolkit.training.checkpoints import Checkpoint, CheckpointStore
from toolkit.training.elsewhere import NoCheckpoints
from toolkit.training.history import History
from toolkit.training.length import Length
from toolkit.training.position import Position
from toolkit.training.stopping import Stopping

__all__ = ["Saving"]

_LOG = logging.getLogger(__name__)
_MOST_FAILURES = 3


class Saving(keras.callbacks.Callback):
    """Writes a checkpoint after every epoch, every `every_steps` steps, and when a signal has come.

    A checkpoint holds everything that the next step depends on, so that a resumed run ends with the
    weights of one that was never stopped. In the epoch that it resumes in the middle of, the steps
    already done are passed over: `fit` counts them, callbacks see them, but nothing is computed and
    no data is read; so start the data at the step where training stands.

    Args:
        store: Where checkpoints go.
        stopping: Asked after every step.
        history: Its rows are part of a checkpoint.
        length: Of the whole training.
        every_steps: 0 for checkpoints after epochs only. Processes ask one another at a checkpoint, so the number must
            be the same on all: it is the chief's.
        resumed: Where this process goes on.
        metrics: Running sums of the metrics there, so that the epoch's figures are the whole epoch's.

    Raises:
        Diverged: At a checkpoint, where a weight is NaN or infinite: no checkpoint is written then.
        CheckpointsFailing: The third checkpoint in a row couldn't be written.
        StoppedBySignal: After the checkpoint for it.
    """

    def __init__(
        self,
        *,
        store: CheckpointStore | NoCheckpoints,
        stopping: Stopping,
        history: History,
        length: Length,
        every_steps: int = 0,
        resumed: Position,
        metrics: dict | None = None,
    ) -> None:
        super().__init__()
        self.store = store
        self.stopping = stopping
        self.signals = stopping.signals
        self.history = history
        self.length = length
        self.every_steps = every_steps
        self.resumed = resumed
        self.metrics = metrics or {}
        self.saved_step: int | None = None
        self._epoch = resumed.epoch
        self._batch = -1
        self._failures = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self.signals.held = True
        if self.resumed.batch:
            self.model.train_function = self._passing_over(self.model.train_function)

    def _passing_over(self, train: Callable) -> Callable:
        """Wraps Keras's function of one step (or `steps_per_execution` of them).

        `fit` offers no way to begin an epoch in its middle: `initial_epoch` counts whole ones.
        `Model.train_function` is the one attribute it calls for a step, and it is documented that
        `make_train_function` leaves one alone that is already set.
        """

        def step(iterator: Any) -> Any:
            if not self._passed_over():
                return train(iterator)
            return self.model.get_metrics_result()

        return step

    def _passed_over(self) -> bool:
        return self.resumed.already_did(self._epoch, self._batch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        if epoch == self.resumed.epoch and self.resumed.batch:
            state.restore_metrics(self.model, self.metrics)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._passed_over():
            return
        here = Position(epoch=self._epoch, batch=batch + 1)
        # A multiple of every_steps lies in this call's steps (there are several with steps_per_execution).
        before, after = self._step(Position(epoch=self._epoch, batch=self._batch)), self._step(here)
        due = bool(self.every_steps) and before // self.every_steps < after // self.every_steps
        told = self.stopping.after(after)
        if told is not None:
            self._stop(told, here, state.capture_metrics(self.model))
        elif due:
            self._save(here, state.capture_metrics(self.model))

    def on_test_begin(self, logs: Any = None) -> None:
        # Validation resets the metrics that it shares with training.
        self.metrics = state.capture_metrics(self.model)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        # Several processes ask one another at the end of the epoch.
        told = self.signals.received if self.stopping.alone and self.signals.held else None
        if told is not None:
            self._stop(told, Position(epoch=self._epoch, batch=self.length.steps_per_epoch), self.metrics)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        told = self.stopping.now(self._step(Position(epoch=epoch + 1)))
        if told is not None:
            self._stop(told, Position(epoch=epoch + 1), {})
        else:
            self._save(Position(epoch=epoch + 1), {})

    def on_train_end(self, logs: Any = None) -> None:
        self.signals.held = False

    def _step(self, position: Position) -> int:
        return position.epoch * self.length.steps_per_epoch + position.batch

    def _save(self, position: Position, metrics: dict) -> None:
        step, arrays = self._step(position), state.capture(self.model)
        good = self.saved_step or self._step(self.resumed) or None
        finite.check(self.model, arrays, step=step, good=good, directory=self.store.directory)
        checkpoint = Checkpoint(
            step=step,
            arrays={**arrays, **metrics},
            metadata={
                "position": dataclasses.asdict(position),
                "epochs": self.length.epochs,
                "history": self.history.rows,
            },
        )
        try:
            self.store.save(checkpoint, end_of_epoch=position.batch == 0)
        except OSError as error:
            self._failures += 1
            _LOG.error("The checkpoint of step %d can't be written (%s); earlier ones are kept", checkpoint.step, error)
            if self._failures >= _MOST_FAILURES:
                raise CheckpointsFailing(
                    f"{self._failures} checkpoints in a row could not be written to {self.store.directory} ({error}). "
                    "Free some space or mend the disk, then resume."
                ) from error
            return
        self._failures = 0
        self.saved_step = checkpoint.step

    def _stop(self, number: int, position: Position, metrics: dict) -> None:
        self._save(position, metrics)
        raise StoppedBySignal(number, step=self.saved_step)
