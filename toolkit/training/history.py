"""history.csv: one row per epoch, whole at any moment."""

import logging
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import keras

from toolkit.support import files
from toolkit.training.throughput import Throughput
from toolkit.training.tracker import Tracker, scalars

__all__ = ["History"]

_LOG = logging.getLogger(__name__)


class History(keras.callbacks.Callback):
    """Keeps the rows, and writes them anew after every epoch.

    Args:
        path: The CSV file; None for rows that are only kept.
        rows: Rows of epochs that earlier processes of this run have done.
        earlier: Those of them that earlier calls of `fit` have done, after which this one counts on.
        tracker: Where training stands.
        throughput: Where examples per second are measured.
    """

    reads_weights = False

    def __init__(
        self,
        path: pathlib.Path | None,
        rows: list[dict],
        *,
        earlier: Sequence[dict],
        tracker: Tracker,
        throughput: Throughput,
    ) -> None:
        super().__init__()
        self.path = path
        self.rows = list(rows)
        self._epochs, self._steps = len(earlier), earlier[-1]["step"] if earlier else 0
        self.tracker = tracker
        self.throughput = throughput
        self._epoch_start = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        self._write()  # An interrupted run may have left rows of epochs that are now done again.

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch_start = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        rate = self.throughput.epoch_examples_per_second
        row: dict[str, Any] = {
            "epoch": self._epochs + epoch + 1,
            "step": self._steps + self.tracker.position.step,
        }
        row.update(scalars(logs))
        optimizer = getattr(self.model, "optimizer", None)  # A model with two keeps them under other names.
        if optimizer is not None:
            row["learning_rate"] = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        row["images_per_second"] = row["examples_per_second"] = round(rate, 1) if rate else None
        row["seconds"] = round(time.monotonic() - self._epoch_start, 3)
        self.rows.append(row)
        self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        try:
            files.write_csv(self.path, self.rows, empty=["epoch"])
        except OSError as error:  # The rows are in every checkpoint too; training goes on.
            _LOG.warning("%s can't be written (%s)", self.path, error.strerror or error)
