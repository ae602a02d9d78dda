"""Means and variances of the whole batch, where layers normalise by them, and the statistics that replicas keep.

BatchNormalization normalises a step's batch by its mean and its variance. Replica r has n_r of the n positions that a
mean is over, with the mean m_r and the sum of squared differences from it q_r. Of each feature it sends

    n_r * m_r,   q_r + n_r * m_r^2,   n_r

in one message, and the sums over all replicas are the whole batch's sum of x, that of x^2, and n. They travel in
float64: there the difference of the mean of squares and the square of the mean is as exact as a second pass over all
examples is in float32. n_r travels along, since a mask or a layer that selects leaves another part of the positions
than the replica's share of the batch.

The backward pass has one message, too: gradients by the sums, which are weighted by the replicas' shares. A step's
moving statistics are so the same on all replicas, without another exchange.

Keras has its own way for `synchronized=True`: three sums one after the other, and their gradients. Those layers take
this one as well. Not exchanged is what replicas can't exchange: in local steps, and in a branch, a loop or a function
in the step. There a layer normalises the replica's own share, unless it is synchronized, and its statistics are
averaged later. Between the layers of a step that sees the whole batch, a layer has all of it already.
"""

import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.context import this_step
from toolkit.strategies.options import options_of
from toolkit.strategies.step import collectives
from toolkit.strategies.step.collectives import joined
from toolkit.strategies.step.share import unweigh, weigh
from toolkit.strategies.upstream.attributes import layers_within
from toolkit.strategies.upstream.wrapping import attach

_LOG = logging.getLogger(__name__)
_KEPT = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")
_OWN = "_toolkit_own_statistics"  # Of a layer that has normalised its replica's own share.


def normalisations(model: Any) -> list[Any]:
    """Returns the layers of a model, itself included, that normalise by a batch's statistics."""
    return [each for each in layers_within(model) if isinstance(each, keras.layers.BatchNormalization)]


def normalises_batch(layer: Any, options: Any) -> bool:
    """Returns whether a layer normalises the whole batch in a step of `fit`, wherever replicas can exchange."""
    return layer.synchronized or options.batch_statistics == "batch"


def statistics_of(layer: Any) -> list[Any]:
    """Returns the moving statistics of a layer; none if it isn't built."""
    kept = (getattr(layer, name, None) for name in _KEPT)
    return [each for each in kept if each is not None]


def own_statistics(model: Any) -> list[Any]:
    """Returns the moving statistics that each replica updates from its own examples, until they are averaged."""
    options = options_of(model.distribute_strategy)
    layers = [
        each for each in normalisations(model) if options.local is not None or not normalises_batch(each, options)
    ]
    return [variable for each in layers for variable in statistics_of(each)]


def may_differ(model: Any) -> bool:
    """Returns whether replicas may have different statistics after steps of `fit`."""
    options = options_of(model.distribute_strategy)
    if options.local is not None:
        return True
    return any(not normalises_batch(each, options) or has_own(each) for each in normalisations(model))


def has_own(layer: Any) -> bool:
    """Returns whether a layer has normalised a replica's own share though it was to normalise the whole batch."""
    return _OWN in vars(layer)


def weigh_moments(model: Any, context: tf.distribute.ReplicaContext) -> None:
    """Makes layers normalise the whole batch in a step of `fit`, and weights the gradients of their other sums."""
    attach(context, all_reduce=_all_reduce)
    for layer in normalisations(model):
        # A class with moments of its own isn't known to compute by row, and is given the whole batch.
        of_keras = type(layer)._moments is keras.layers.BatchNormalization._moments
        if of_keras and normalises_batch(layer, this_step.options):
            attach(layer, _moments=_moments)


def _moments(original: Callable, layer: Any, x: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns means and variances over the whole batch, of those positions that a mask leaves."""
    share = this_step.share
    if this_step.count == 1 or this_step.view is not None:
        return original(layer, x, mask)
    if not layer.synchronized:
        # In one's own loop each replica normalises its own share, as TensorFlow's guides have it.
        if share is None or this_step.options.batch_statistics == "replica":
            return original(layer, x, mask)
        if share.in_branch and this_step.piece is None:
            _say_own(layer)
            return original(layer, x, mask)
    collectives.check_piece()
    given, axes = x.dtype, layer._reduction_axes
    if given.size == 2:  # As Keras does, because squares overflow it.
        x = tf.cast(x, tf.float32)
    sums, squares, count = _sums(x, mask, axes)
    flat, split = joined([sums, squares, count])
    sums, squares, count = split(summed(flat if share is None else share.own(flat)))
    # As Keras does: what a mask leaves is divided by a little more.
    divisor = count if mask is None else count + keras.config.epsilon()
    mean = tf.math.divide_no_nan(sums, divisor)
    variance = tf.math.divide_no_nan(squares - (2.0 * sums - count * mean) * mean, divisor)
    mean, variance = tf.cast(mean, x.dtype), tf.cast(tf.maximum(variance, 0.0), x.dtype)
    if given.size == 2:
        half = tf.float16
        mean, variance = (tf.cast(tf.clip_by_value(each, half.min, half.max), given) for each in (mean, variance))
    return mean, variance


def _say_own(layer: Any) -> None:
    if not has_own(layer):
        vars(layer)[_OWN] = True  # Past Keras's actions when an attribute is set.
        _LOG.warning(
            "%s is called in a branch, a loop or a function, where replicas can't exchange: each normalises its own "
            "share of a batch",
            layer.name,
        )


def _sums(x: tf.Tensor, mask: Any, axes: list[int]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the sums of x and of x^2 for each feature, and how many positions they are over, in float64.

    Args:
        x: Of float32 or float64.
        mask: Of all its axes but the last, which positions count; None if all do.
        axes: Of x, along which the sums are.

    Returns:
        Two tensors [features]; the third [1], or with a mask [features].
    """
    exact = tf.float64
    if mask is None:
        kept = None
        count = tf.reshape(tf.cast(tf.reduce_prod(tf.gather(tf.shape(x), axes)), exact), [1])
    else:
        kept = tf.broadcast_to(tf.cast(tf.expand_dims(mask, -1), tf.bool), tf.shape(x))
        count = tf.reduce_sum(tf.cast(kept, exact), axes)
    broad = [1 if each in axes else -1 for each in range(x.shape.rank)]
    own = tf.stop_gradient(x)
    own = own if kept is None else tf.where(kept, own, 0)
    center = tf.math.divide_no_nan(tf.reduce_sum(own, axes), tf.cast(count, x.dtype))

    # The sum of x is n * center + d, that of x^2 is q + 2 * center * d + n * center^2, with d the sum of (x - center)
    # and q that of (x - center)^2. That is so for any center; with the mean d is zero, and nothing cancels.
    @tf.custom_gradient
    def around(x: tf.Tensor) -> tuple:
        difference = tf.math.squared_difference(x, tf.reshape(center, broad))
        squares = tf.reduce_sum(difference if kept is None else tf.where(kept, difference, 0), axes)

        def gradient(by_sum: tf.Tensor, by_squares: tf.Tensor) -> tf.Tensor:
            # One product and one sum for each element, where a gradient of each operation would be seven.
            factor = 2.0 * by_squares
            found = x * tf.reshape(factor, broad) + tf.reshape(by_sum - factor * center, broad)
            return found if kept is None else tf.where(kept, found, 0)

        return (tf.zeros_like(squares), squares), gradient

    difference, squares = (tf.cast(each, exact) for each in around(x))
    at = tf.cast(center, exact)
    return count * at + difference, squares + (2.0 * difference + count * at) * at, count


@tf.custom_gradient
def summed(x: tf.Tensor) -> tuple:
    """Returns the sum over replicas of what each has; its gradients are weighted by their shares of the batch.

    The loss is the sum over r of w_r * l_r, and a replica's gradient g_r counts w_r times when gradients are exchanged:
    so what goes back to replica r is the sum over s of w_s * g_s, divided by w_r. That is again such a sum, and so on.
    """
    share = this_step.share

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        if share is None or share.in_loss:
            return summed(upstream)
        weight = tf.cast(share.exchanged_weight, upstream.dtype)
        return tf.math.divide_no_nan(summed(upstream * weight), weight)

    return collectives.all_reduce(x), gradient


def _all_reduce(original: Callable, context: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
    """Weights the gradients of layers' own sums over replicas."""
    share, sums = this_step.share, reduce_op in (tf.distribute.ReduceOp.SUM, "SUM")
    if this_step.is_local:
        return value
    collectives.check_piece()
    if share is not None and sums:
        value = tf.nest.map_structure(share.own, value)
    if share is None or not tf.is_tensor(value) or not value.dtype.is_floating:
        return original(context, reduce_op, value, options)
    if this_step.exchanges_overlap and sums:  # For small tensors it takes two thirds of the time of TensorFlow's.
        return summed(value)
    return weigh(original(context, reduce_op, unweigh(value), options))
