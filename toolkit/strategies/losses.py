"""Losses whose weights and masks are those of the whole batch, as on one device.

Keras divides each replica's loss by that replica's own sum of weights, or number of unmasked elements, in which
replicas differ. Keras has no public hook for it: three functions of
`keras.src.losses.loss` are wrapped here, and nowhere else; `tests/strategies/test_losses.py` fails when they change.

TensorFlow's `tf.nn.compute_average_loss` and `tf.nn.scale_regularization_loss` divide for replicas whose gradients are
summed. In a step of `fit` gradients are weighted by the replica's share w and summed, so what was divided is divided by
w: the sum over replicas of w * (loss / w) is what one device has.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as _loss

from toolkit.strategies import collectives, weighting
from toolkit.support.wrapping import wrap

__all__ = ["adapt_losses"]


def adapt_losses() -> None:
    """Makes Keras's losses those of the whole batch on several replicas; called again, it does nothing."""
    wrap(_loss, "scale_loss_for_distribution", _unless_in_fit)
    wrap(_loss, "unscale_loss_for_distribution", _unless_in_fit)
    wrap(_loss, "reduce_weighted_values", _reduced)
    for name in ("add_loss", "_get_own_losses", "_clear_losses"):
        wrap(keras.Layer, name, _of_this_replica)
    wrap(tf.nn, "compute_average_loss", _average)
    wrap(tf.nn, "scale_regularization_loss", _regularization)


def _of_this_replica(original: Callable, layer: Any, *args: Any) -> Any:
    """Has what a layer adds to the loss kept by replica: the replicas of a process are threads, which take turns."""
    replica, count = collectives.replica_id_and_count()
    if count == 1:
        return original(layer, *args)
    kept = vars(layer)  # Passes by what Keras does when an attribute is set.
    shared, kept["_losses"] = kept["_losses"], kept.setdefault("_toolkit_losses", {}).setdefault(replica, [])
    try:
        return original(layer, *args)
    finally:
        kept["_losses"] = shared


def _average(
    original: Callable, per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> Any:
    value = original(per_example_loss, sample_weight, global_batch_size)
    share = weighting.current()
    if share is None:
        return value
    if global_batch_size is None:  # TensorFlow takes the number of replicas times the examples of this one.
        return value * tf.cast(collectives.replica_id_and_count()[1], value.dtype)
    return tf.math.divide_no_nan(value, tf.cast(share.weight, value.dtype))


def _regularization(original: Callable, regularization_loss: Any) -> Any:
    value = original(regularization_loss)
    if weighting.current() is None:
        return value
    return value * tf.cast(collectives.replica_id_and_count()[1], value.dtype)


def _unless_in_fit(original: Callable, value: Any) -> Any:
    """In a step of `fit` means are averaged, not summed: there is nothing to scale."""
    return original(value) if weighting.current() is None else value


def _reduced(
    original: Callable,
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """Reduces as Keras does, and multiplies by what this replica's part of the divisor is too much or too little."""
    value = original(values, sample_weight, mask, reduction, dtype)
    _, count = collectives.replica_id_and_count()
    if count == 1 or reduction in (None, "none") or value.shape.rank != 0:
        return value
    share = weighting.current()
    own = _divisor(sample_weight, mask, reduction, value.dtype)
    if reduction == "sum":
        # A sum over replicas, where they are averaged.
        return value if share is None else tf.math.divide_no_nan(value, tf.cast(share.weight, value.dtype))
    if own is None:
        return value
    part = tf.math.divide_no_nan(own, collectives.all_reduce(own))
    if share is None:
        return value * part * count
    return value * tf.math.divide_no_nan(part, tf.cast(share.weight, value.dtype))


def _divisor(sample_weight: Any, mask: Any, reduction: str, dtype: Any) -> tf.Tensor | None:
    """Returns what Keras divides this replica's sum by; None where it is the number of elements."""
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        weights = None if sample_weight is None else tf.cast(sample_weight, dtype)
        own = tf.reduce_sum(_loss.apply_mask(weights, mask, dtype=dtype, reduction=reduction))
    elif reduction in ("mean", "sum_over_batch_size") and mask is not None:
        own = tf.reduce_sum(tf.cast(mask, dtype))
    else:
        return None
    return tf.stop_gradient(own)
