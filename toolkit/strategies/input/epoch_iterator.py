"""Which data Keras's loop is about to read, and for what, while it asks a strategy for it.

Keras has no public hook for it; `tests/strategies/test_building.py` fails when TFEpochIterator changes.
"""

import threading
from collections.abc import Callable
from typing import Any

from keras.src.backend.tensorflow import trainer as keras_trainer

from toolkit.support.wrapping import wrap

__all__ = ["adapt_epoch_iterator", "epoch_iterator", "predicts"]

_here = threading.local()


def adapt_epoch_iterator() -> None:
    """Has Keras's loop say what it reads; called again, it does nothing."""
    wrap(keras_trainer.TFEpochIterator, "__init__", _reading)


def _reading(original: Callable, iterator: Any, *args: Any, **kwargs: Any) -> None:
    before, _here.iterator = epoch_iterator(), iterator
    before_predicts, _here.predicts = predicts(), "y" not in kwargs  # Keras names all but the strategy.
    try:
        original(iterator, *args, **kwargs)
    finally:
        _here.iterator, _here.predicts = before, before_predicts


def predicts() -> bool:
    """Says whether that is for `predict`, whose examples have no labels and whose results no mean."""
    return getattr(_here, "predicts", False)


def epoch_iterator() -> Any:
    """Returns the object by which Keras's loop is to read, while that asks a strategy for its data; else None.

    Its `data_adapter.num_batches` is the data's length, None where that isn't known.
    """
    return getattr(_here, "iterator", None)
