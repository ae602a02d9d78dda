"""Means and variances of a synchronised normalisation, with one exchange forward and one backward.

Keras sums three tensors over the replicas one after the other, and their gradients too: sums, sums of squares, and how
many there are. Between processes, where each exchange costs a millisecond or more, they travel together here, with the
number once instead of for each feature. Devices of one process have Keras's way. In a step of `fit` either's gradient
is weighted by the replicas' shares.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.context import here
from toolkit.strategies.exchange import collectives
from toolkit.strategies.exchange.collectives import joined
from toolkit.strategies.step.batch_share import unweigh, weigh
from toolkit.support.wrapping import attach

__all__ = ["attach_to"]


def attach_to(model: Any, context: tf.distribute.ReplicaContext) -> None:
    """Weights the gradients of sums over replicas in layers in a step of `fit`, and packs them together."""
    attach(context, "all_reduce", _all_reduce)
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            attach(layer, "_moments", _moments)


def _moments(original: Callable, layer: Any, x: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
    if mask is not None or not here.step.exchanges_overlap:
        return original(layer, x, mask)
    context = tf.distribute.get_replica_context()
    given, axes = x.dtype, layer._reduction_axes
    if given.size == 2:  # As Keras does, because squares overflow it.
        x = tf.cast(x, tf.float32)
    sums = tf.reduce_sum(x, axes, keepdims=True)
    squares = tf.reduce_sum(tf.square(x), axes, keepdims=True)
    count = tf.cast(tf.size(x), x.dtype) / tf.cast(tf.size(sums), x.dtype)
    flat, split = joined([sums, squares, count])
    *totals, count = split(context.all_reduce(tf.distribute.ReduceOp.SUM, flat))
    # As Keras computes them: the variance is E(x^2) - E(x)^2.
    mean, square = (tf.math.divide_no_nan(total, count) for total in totals)
    variance = tf.maximum(square - tf.square(mean), 0.0)
    if given.size == 2:
        half = tf.float16
        mean, variance = (tf.cast(tf.clip_by_value(each, half.min, half.max), given) for each in (mean, variance))
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)


def _all_reduce(original: Callable, context: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
    """Weights the gradients of layers' sums over replicas, such as the moments of a synchronised normalisation."""
    share, sums = here.share, reduce_op in (tf.distribute.ReduceOp.SUM, "SUM")
    if here.alone:
        return value
    collectives.check_piece()
    if share is not None and sums:
        value = tf.nest.map_structure(share.own, value)
    if share is None or not tf.is_tensor(value) or not value.dtype.is_floating:
        return original(context, reduce_op, value, options)
    if here.step.exchanges_overlap and sums:
        return weigh(_summed(unweigh(value)))
    return weigh(original(context, reduce_op, unweigh(value), options))


@tf.custom_gradient
def _summed(value: tf.Tensor) -> tuple:
    """Returns the sum over processes; for small tensors it takes two thirds of the time of TensorFlow's."""
    return collectives.all_reduce(value), collectives.all_reduce
