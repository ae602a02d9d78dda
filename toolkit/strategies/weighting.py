"""A step of `fit` on several replicas: the share that each has of the batch, and how much its mean counts.

On one device a loss is a mean over the whole batch. Here each replica has a share, and a script's `train_step`, which
may have been written for one device, makes means over that. Their mean, each weighted by its share of the examples, is
the whole batch's; and as a mean's gradient is the mean of gradients, the exchange weights gradients in the same way. So
in a step of `fit` no loss is divided by the number of replicas: what Keras's own losses do for TensorFlow's loops, in
which gradients are summed, `losses` takes back. A loop of the user's own around `strategy.run` sums, as TensorFlow's
guides have it.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies import collectives, mesh, overlap, step_logs
from toolkit.strategies.sharing import row_count
from toolkit.support.graphs import computed_from
from toolkit.support.wrapping import wrap

__all__ = ["Share", "adapt_trainers", "batch_mean", "counted", "current", "unweigh", "weigh"]

_LOG = logging.getLogger(__name__)
_here = threading.local()  # tf.distribute traces each replica in a thread of its own.
_TEST_STEP = keras.Model.test_step  # Keras's, which makes no means in a branch.


class Share:
    """This replica's share of a step's batch.

    Args:
        rows: How many examples it has.

    Attributes:
        in_loss: Whether the loss that is being differentiated is weighted already.
        scaled: Losses that a LossScaleOptimizer has scaled, and that were weighted before.
        scaled_by: The ids of those optimizers: the gradients that they are given are weighted already.
    """

    def __init__(self, rows: Any) -> None:
        self.in_loss = False
        self.scaled: list[tf.Tensor] = []
        self.scaled_by: set[int] = set()
        self._rows = tf.cast(rows, tf.float64)
        self._weight: tf.Tensor | None = None

    @property
    def weight(self) -> tf.Tensor:
        """Its part of all replicas' examples, a float64 scalar; asked for first, a collective."""
        if self._weight is None:
            self._weight = tf.math.divide_no_nan(self._rows, collectives.all_reduce(self._rows))
        return self._weight


def current() -> Share | None:
    """Returns the share of the step that is being traced or run; None outside of `fit` and `evaluate`."""
    return getattr(_here, "share", None)


@contextlib.contextmanager
def counted(share: Share | None) -> Iterator[None]:
    """While entered, `current` returns this."""
    before, _here.share = current(), share
    try:
        yield
    finally:
        _here.share = before


def weigh(x: tf.Tensor) -> tf.Tensor:
    """Returns a tensor as it is, whose gradient counts by this replica's share.

    Where replicas exchange activations, a gradient that goes to another replica has to be weighted on its way.
    """
    return _scaled(x, lambda gradient, weight: gradient * weight)


def unweigh(x: tf.Tensor) -> tf.Tensor:
    """Takes back what `weigh` does, where gradients come from others: they will be weighted when they are exchanged."""
    return _scaled(x, lambda gradient, weight: gradient / weight)


def _scaled(x: tf.Tensor, scale: Callable) -> tf.Tensor:
    share = current()
    if share is None:
        return x
    weight = tf.cast(share.weight, x.dtype)

    @tf.custom_gradient
    def same(x: tf.Tensor) -> tuple:
        return tf.identity(x), lambda gradient: gradient if share.in_loss else scale(gradient, weight)

    return same(x)


def batch_mean(values: Any, weights: Any = None) -> tf.Tensor:
    """Returns this replica's part of a mean over the whole batch; see `toolkit.strategies.batch_mean`."""
    values = tf.convert_to_tensor(values)
    weights = tf.ones_like(values) if weights is None else tf.cast(weights, values.dtype) * tf.ones_like(values)
    share = current()
    total = tf.stop_gradient(collectives.all_reduce(tf.reduce_sum(weights)))
    part = tf.math.divide_no_nan(tf.reduce_sum(values * weights), total)
    return part if share is None else tf.math.divide_no_nan(part, tf.cast(share.weight, part.dtype))


def adapt_trainers() -> None:
    """Has the steps of models under several replicas know their shares; called again, it does nothing."""
    wrap(tf.distribute.ReplicaContext, "all_reduce", _all_reduce)
    wrap(tf.GradientTape, "gradient", _gradient)
    wrap(keras.random.SeedGenerator, "next", _next_seed)
    wrap(keras.metrics.Mean, "update_state", _update_mean)
    wrap(keras.Model, "make_train_function", functools.partial(_made, "train_step"))
    wrap(keras.Model, "make_test_function", functools.partial(_made, "test_step"))


def _all_reduce(original: Callable, context: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
    """Weights the gradients of what layers add over replicas, such as the moments of a synchronised normalisation."""
    if current() is None or not tf.is_tensor(value) or not value.dtype.is_floating:
        return original(context, reduce_op, value, options)
    if overlap.begins_by_itself(context.strategy) and reduce_op in (tf.distribute.ReduceOp.SUM, "SUM"):
        return weigh(_summed(unweigh(value)))
    return weigh(original(context, reduce_op, unweigh(value), options))


@tf.custom_gradient
def _summed(value: tf.Tensor) -> tuple:
    """Returns the sum over processes, which takes two thirds of the time of TensorFlow's where there is little."""
    return collectives.all_reduce(value), collectives.all_reduce


def _update_mean(original: Callable, metric: Any, values: Any, sample_weight: Any = None) -> Any:
    """Takes a scalar, which is a mean over this replica's share, for as much as that share counts."""
    share = current()
    if share is not None and sample_weight is None and not keras.ops.shape(values):
        sample_weight = share.weight * collectives.replica_id_and_count()[1]
    return original(metric, values, sample_weight)


def _next_seed(original: Callable, generator: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives each replica draws of its own: its copy of a generator's state is the others', and so would noise be."""
    seed = original(generator, *args, **kwargs)
    replica, count = collectives.replica_id_and_count()
    if count == 1 or not tf.is_tensor(seed):
        return seed
    return seed + tf.constant([0, replica * 0x9E37_79B1 % 2**31], seed.dtype)  # The first replica's are one device's.


def _gradient(
    original: Callable, tape: Any, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any
) -> Any:
    """Takes a vector of losses for the sum that it is: its gradients are added, where those of a mean are averaged.

    Only gradients of variables are exchanged. Those of tensors, as in a gradient penalty, stay on their replica.
    """
    share = current()
    if share is None:
        return original(tape, target, sources, output_gradients, **kwargs)

    def seed(each: Any) -> tf.Tensor:
        ones = tf.ones_like(each)
        return ones if each.shape.rank == 0 else tf.math.divide_no_nan(ones, tf.cast(share.weight, ones.dtype))

    vectors = any(getattr(each, "shape", None) for each in tf.nest.flatten(target))
    if vectors and output_gradients is None and _of_variables(sources):
        output_gradients = tf.nest.map_structure(seed, target)
    before, share.in_loss = share.in_loss, _is_of(target, share.scaled)
    try:
        return original(tape, target, sources, output_gradients, **kwargs)
    finally:
        share.in_loss = before


def _is_of(target: Any, losses: list[tf.Tensor]) -> bool:
    """Says whether what is differentiated is one of these losses, or was computed from one."""
    targets = [each for each in tf.nest.flatten(target) if tf.is_tensor(each)]
    if not losses or any(each is loss for each in targets for loss in losses):
        return bool(losses)
    if tf.executing_eagerly():
        return False
    made = {loss.op for loss in losses}
    return any(each in made for each in computed_from([each.op for each in targets], made))


def _of_variables(sources: Any) -> bool:
    return not any(tf.is_tensor(each) and not _is_variable(each) for each in tf.nest.flatten(sources))


def _is_variable(each: Any) -> bool:
    return isinstance(each, (tf.Variable, keras.Variable)) or hasattr(each, "handle")


def _made(name: str, original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Has Keras make its function of a step that knows its share: Keras takes the model's method when it makes it."""
    if mesh.replicas(model.distribute_strategy) == 1:
        return original(model, *args, **kwargs)
    step = getattr(model, name)
    if name == "train_step" and getattr(step, "__func__", None) is not keras.Model.train_step:
        _LOG.info(
            "The loss of %s.train_step is taken for a mean over its replica's examples. If it is another mean, such as "
            "one over words, compute it with toolkit.strategies.batch_mean",
            type(model).__name__,
        )
    before = model.__dict__.get(name)

    @functools.wraps(step)
    def with_share(data: Any) -> Any:
        if collectives.replica_id_and_count()[1] == 1:
            return step(data)
        share = Share(row_count(data))
        if name == "train_step" or getattr(step, "__func__", None) is not _TEST_STEP:
            share.weight  # noqa: B018 - Made here, outside of any branch of the step's, and while others compute.
        with counted(share), step_logs.results_noted(model) as noted:
            return step_logs.of_all_replicas(step(data), noted, lambda: share.weight)

    model.__dict__[name] = with_share
    try:
        return original(model, *args, **kwargs)
    finally:
        del model.__dict__[name]
        if before is not None:
            model.__dict__[name] = before
