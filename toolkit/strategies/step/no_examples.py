"""What a replica keeps of a step for which it has no examples: nothing.

A batch may have fewer examples than there are replicas (`input/batch_split.py`). A replica without one computes with a
copy of another's, so that no mean is 0 / 0, and its share is zero: gradients, losses, logs and exchanges leave it out.
What is left is the state that belongs to a replica alone, metrics and statistics of a normalisation. It is set back.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.step.batch_share import Share

__all__ = ["state_of_own"]


@contextlib.contextmanager
def state_of_own(model: Any, share: Share) -> Iterator[None]:
    """A context for a step, after which metrics and statistics are as before if the replica has no examples."""
    held = [] if share.has_own is None else [*model.metrics_variables, *_statistics(model)]
    before = [tf.convert_to_tensor(each) for each in held]
    yield
    for variable, value in zip(held, before, strict=True):
        if variable.aggregation != "only_first_replica":  # That of the whole batch, which each replica has.
            variable.assign(tf.where(share.has_own, tf.convert_to_tensor(variable), value))


def _statistics(model: Any) -> list:
    layers = [each for each in model._flatten_layers() if isinstance(each, keras.layers.BatchNormalization)]
    return [
        v for each in layers if each.built and not each.synchronized for v in (each.moving_mean, each.moving_variance)
    ]
