"""Losses whose weights and masks are those of the whole batch, as on one device.

Keras divides each replica's loss by that replica's own sum of weights, or number of unmasked elements, in which
replicas differ. Keras has no public hook for it: three functions of
`keras.src.losses.loss` are wrapped here, and nowhere else; `tests/strategies/test_losses.py` fails when they change.
"""

from collections.abc import Callable
from typing import Any

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
