"""A LossScaleOptimizer on several replicas: losses are weighted before they are scaled, and all replicas decide alike.

Keras's multiplies a loss against underflow, divides gradients by as much, and leaves out a step whose gradients aren't
finite. `optimizer` has exchanged them when it looks.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from toolkit.strategies.context import here, known
from toolkit.support.wrapping import attach

__all__ = ["attach_to", "counting_alone"]


def attach_to(optimizer: Any) -> None:
    """Gives a LossScaleOptimizer of several replicas our own methods."""
    attach(optimizer, "scale_loss", _scale_loss)
    attach(optimizer, "_tf_apply", _apply_where_finite)
    attach(optimizer, "_stateful_handle_finite_grads", _apply_finite)


def _scale_loss(original: Callable, optimizer: Any, loss: Any) -> Any:
    """Weights a loss before its 16-bit gradients are computed: an example's gradients are as large as on one device."""
    share = here.share
    if share is None or here.view is not None:
        return original(optimizer, loss)
    scaled = original(optimizer, loss * tf.cast(share.weight, loss.dtype))
    share.scaled.append(scaled)
    share.scaled_by.add(id(optimizer))
    return scaled


def _apply_where_finite(original: Callable, optimizer: Any, grads: Any, trainable_variables: Any) -> None:
    """Keras lets the first replica's gradients decide for all. Replicas with local steps decide by their own."""
    if not here.alone and here.piece is None:  # In a piece, replicas can't meet, and needn't.
        with known(summed=False):  # They exchange here, so that they can exchange again in the branch.
            original(optimizer, grads, trainable_variables)
        return
    with counting_alone(optimizer):
        optimizer._common_apply(grads, trainable_variables)


def _apply_finite(original: Callable, *args: Any) -> None:
    """What a LossScaleOptimizer does if gradients are finite, in each replica's own thread."""
    if here.step.count == 1 and not here.alone:
        original(*args)
        return
    with known(summed=True):
        original(*args)


@contextlib.contextmanager
def counting_alone(optimizer: Any) -> Iterator[None]:
    """A context in which this replica's copies of counts are set without synchronising all replicas."""
    # Where it is entered already, those have been seen to.
    counts = [each for each in optimizer.variables if not len(each.shape) and "assign" not in vars(each)]

    def assign(count: Any, value: Any) -> Any:
        with known(summed=True):
            return optimizer._distribution_strategy.extended.update(
                count.value, lambda own: own.assign(tf.cast(value, own.dtype))
            )

    for count in counts:
        vars(count)["assign"] = functools.partial(assign, count)
    try:
        yield
    finally:
        for count in counts:
            del vars(count)["assign"]
