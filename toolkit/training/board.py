"""TensorBoard's files, which a full disk costs, and not the run."""

import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from toolkit.training.tracker import scalars

__all__ = ["Board"]

_LOG = logging.getLogger(__name__)
_WRITES = ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_test_begin", "on_test_end")


class Board(keras.callbacks.TensorBoard):
    """As Keras's; what can't be written is said once, and tried again with what comes next."""

    def __init__(self, log_dir: str, **options: Any) -> None:
        super().__init__(log_dir, **options)
        self._said = False
        for name in (*_WRITES, "on_train_batch_begin", "on_train_batch_end"):
            setattr(self, name, self._spared(getattr(self, name)))

    def _spared(self, write: Callable) -> Callable:
        def tried(*args: Any, **kwargs: Any) -> None:
            plain = [scalars(each) if isinstance(each, dict) else each for each in args]
            named = {name: scalars(each) if isinstance(each, dict) else each for name, each in kwargs.items()}
            try:
                write(*plain, **named)
            except (OSError, tf.errors.OpError) as error:  # TensorFlow's writer raises OutOfRangeError on a full disk.
                if not self._said:
                    reason = str(error).rpartition("}} ")[2].partition("\n")[0]
                    _LOG.warning("TensorBoard's files can't be written (%s); training goes on", reason)
                self._said = True

        return tried
