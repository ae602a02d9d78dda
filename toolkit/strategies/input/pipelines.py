"""Pipelines without tf.data's autotuning, which ends runs seconds late, and without side effects on a strategy."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops

from toolkit.devices import cores
from toolkit.support.wrapping import wrap

__all__ = ["adapt_pipelines", "in_order", "input_devices_kept", "untuned"]


def adapt_pipelines() -> None:
    """Turns tuning off between pipelines and devices. Later calls do nothing.

    It is for several devices of a process: a worker with one reads as Keras does without a strategy.
    """
    wrap(multi_device_iterator_ops, "_create_device_dataset", _untuned)


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the same dataset without tf.data's autotuning, unless its own options ask for it.

    tf.data's tuning thread can sleep through the end of its iterator, which then waits for it: for as long as the
    iterator has lived, up to 60 s, at the end of every epoch, `fit` and `evaluate` (TensorFlow 2.21,
    Model::OptimizeLoop: it is woken before the flag it looks at is set). In its place AUTOTUNE means as many calls at
    a time as there are cores.
    """
    given = dataset.options().autotune
    options = tf.data.Options()
    options.autotune.enabled = bool(given.enabled)
    if not given.enabled and given.initial_parallelism is None:
        options.autotune.initial_parallelism = cores()  # TensorFlow's own number is 16.
    return dataset.with_options(options)


def in_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the same dataset with its elements in order, also if its options allow another: workers must agree."""
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


@contextlib.contextmanager
def input_devices_kept(strategy: tf.distribute.MirroredStrategy) -> Iterator[None]:
    """Restores what a dataset with InputReplicationMode.PER_REPLICA changes for all that are distributed after it.

    TensorFlow 2.21 keeps the mode on the strategy, and would ask for each replica's share in every replica's pipeline.
    """
    before = strategy.extended._input_workers_devices
    try:
        yield
    finally:
        strategy.extended._input_workers_devices = before


def _untuned(original: Callable, *args: Any, **kwargs: Any) -> tf.data.Dataset:
    """Turns tf.data's autotuning off between a pipeline and a device.

    A distributed dataset's own options don't reach the small datasets that TensorFlow puts there: runs of several
    workers on one machine ended 7 s late 2 times of 6 with that tuning, and 0 times of 6 without. There is nothing to
    tune in these datasets, and no public way to say so.
    """
    return untuned(original(*args, **kwargs))
