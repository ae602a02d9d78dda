"""Tells a strategy which data Keras's loop is about to read.

Keras has no public hook for it; `tests/strategies/test_building.py` fails when TFEpochIterator changes.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from toolkit.errors import StrategyError
from toolkit.strategies.context import here, known
from toolkit.support.wrapping import wrap

__all__ = ["adapt_epoch_iterator", "epoch_iterator", "trains", "whole_for_keras"]

_TRAINS = "_toolkit_trains"


def adapt_epoch_iterator() -> None:
    """Makes Keras's loop announce what it reads. Later calls do nothing."""
    wrap(keras_trainer.TFEpochIterator, "__init__", _reading)


def whole_for_keras(distribute: Callable) -> Callable:
    """Decorates a strategy's method that distributes a dataset, so that `fit` may read one distributed by the user.

    Keras hands a dataset to the strategy itself, once it has put such as `class_weight` into it.
    """

    @functools.wraps(distribute)
    def wrapped(strategy: Any, dataset: Any, options: Any = None) -> Any:
        distributed = distribute(strategy, dataset, options)
        if epoch_iterator() is None and isinstance(dataset, tf.data.Dataset) and distributed is not dataset:
            distributed._toolkit_whole = dataset
        return distributed

    return wrapped


def _reading(original: Callable, iterator: Any, *args: Any, **kwargs: Any) -> None:
    if "x" in kwargs:
        kwargs["x"] = getattr(kwargs["x"], "_toolkit_whole", kwargs["x"])
        if kwargs.get("class_weight") and isinstance(kwargs["x"], tf.distribute.DistributedDataset):
            raise StrategyError(
                asked="fit was given class_weight, and data of distribute_datasets_from_function",
                found="each replica's data come from a function, which class_weight can't be put into",
                remedy="Have the function's datasets hold (x, y, weight), or give fit a tf.data.Dataset",
            )
    vars(iterator)[_TRAINS] = "class_weight" in kwargs  # Keras passes everything by name, and this to train only.
    with known(iterator=iterator):
        original(iterator, *args, **kwargs)


def trains(iterator: Any) -> bool:
    """Returns whether Keras's loop reads by this object to train."""
    return getattr(iterator, _TRAINS, True)


def epoch_iterator() -> Any:
    """Returns the object through which Keras's loop is about to read, or None.

    Its `data_adapter.num_batches` is the data's length, None where that isn't known.
    """
    return here.iterator
