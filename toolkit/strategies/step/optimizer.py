"""Gradients, summed over replicas before Keras's optimizer sees them: the one place where they meet.

    local gradient g_r  ->  * w_r, this replica's share of the examples  ->  all-reduce: sum over r of w_r * g_r

Keras's optimizers sum gradients over replicas at the last moment, when each replica has looked whether its own are
finite, has undone the loss scale, and has clipped them. Here `apply` begins with the sum. What follows is as on one
device, with the same numbers on every replica: whether they are finite, the norm by which they are clipped, what is
accumulated; and each replica updates its own copies of the variables, so that nothing has to meet inside a branch.

Gradients of shards stay where they are. The others may be sent in 16 bits and in packs, the last layers' first. In a
step of `fit` each counts by its replica's share of the examples; in a loop of the user's own they are summed, as
TensorFlow's guides have it.

Keras and TensorFlow have no public hook for this. What is wrapped here stands in `adapt_optimizers`, and what
shards need beside it in `sharded_optimizer`; `tests/strategies/test_optimizer_step.py` fails when any of it changes.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.exchange import collectives, mesh, overlap
from toolkit.strategies.exchange.gradients import (
    computed_in_half,
    mapped,
    over_groups,
    over_replicas,
    sent_as,
    with_overflow,
)
from toolkit.strategies.options import options_of
from toolkit.strategies.step import accumulation, batch_share, compression
from toolkit.strategies.step.sharded_optimizer import finite_alike
from toolkit.strategies.variables.model_optimizers import trained_by
from toolkit.strategies.variables.outside import refuse_outside
from toolkit.strategies.variables.sharded_variable import ReplicaShardedVariable
from toolkit.strategies.variables.zero1 import in_parts_among, own_part, scattered
from toolkit.support.wrapping import wrap

__all__ = ["adapt_optimizers", "reduced"]

_LOG = logging.getLogger(__name__)
_here = threading.local()


def adapt_optimizers() -> None:
    """Makes Keras's optimizers exchange gradients in this way on several replicas; called again, it does nothing."""
    plain, scaled = keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer
    wrap(plain, "apply", _apply)
    wrap(scaled, "apply", _apply)
    wrap(scaled, "scale_loss", _scale_loss)
    wrap(scaled, "_tf_apply", _apply_where_finite)
    wrap(scaled, "_stateful_handle_finite_grads", _apply_finite)
    wrap(
        plain, "_all_reduce_sum_gradients", lambda original, self, pairs: pairs if _summed() else original(self, pairs)
    )
    wrap(plain, "_overwrite_model_variables_with_average_value", _overwrite_with_averages)
    wrap(tf.__internal__.distribute.interim, "maybe_merge_call", _each_for_itself)


def _summed() -> bool:
    """Whether the gradients that an optimizer has in hand are those of all replicas."""
    return getattr(_here, "summed", False)


@contextlib.contextmanager
def _with_sums() -> Iterator[None]:
    before, _here.summed = _summed(), True
    try:
        yield
    finally:
        _here.summed = before


def _apply(original: Callable, optimizer: Any, grads: Sequence, trainable_variables: Any = None) -> None:
    grads = list(grads)
    if _between_replicas(optimizer):
        _apply_to_all(original, optimizer, grads, trainable_variables)
        return
    if collectives.alone():
        with _with_sums():
            original(optimizer, grads, trainable_variables)
        return
    if _summed() or collectives.replica_id_and_count()[1] == 1:
        original(optimizer, grads, trainable_variables)
        return
    share = batch_share.current()
    if share is None and options_of(optimizer._distribution_strategy).local is not None:
        _say_exchanged(optimizer._distribution_strategy)
    variables = list(trained_by(optimizer) if trainable_variables is None else trainable_variables)
    refuse_outside(optimizer, variables)
    later: frozenset[int] = frozenset()
    if len(grads) == len(variables):  # Else Keras says what is wrong.
        sharded = options_of(optimizer._distribution_strategy).optimizer_state == "sharded"
        in_parts = in_parts_among(optimizer, variables) if sharded else frozenset()
        if getattr(optimizer, "gradient_accumulation_steps", None):
            later = accumulation.later(optimizer, grads, variables)
        weighted = share is not None and id(optimizer) in share.scaled_by
        memories: Sequence = ()
        if options_of(optimizer._distribution_strategy).gradients.compression != "none":
            memories = compression.memories_of(optimizer, variables)
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        scale = tf.cast(optimizer.dynamic_scale, tf.float32) if scales else 1.0
        halves = [scales and number not in later and computed_in_half(each) for number, each in enumerate(grads)]
        grads = reduced(grads, variables, in_parts, later, weighted=weighted, memories=memories, scale=scale)
        if scales:
            grads = [with_overflow(each) if half else each for each, half in zip(grads, halves, strict=True)]
            grads = finite_alike(grads, variables, in_parts)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_with_sums())
        if later:
            stack.enter_context(accumulation.exchanged_later(optimizer, [variables[number] for number in later]))
        original(optimizer, grads, trainable_variables)


def _between_replicas(optimizer: Any) -> bool:
    """Whether an optimizer of several replicas is used in none of them, as by a loop that is in the scope only."""
    return mesh.replicas(optimizer._distribution_strategy) > 1 and tf.distribute.in_cross_replica_context()


def _apply_to_all(original: Callable, optimizer: Any, grads: Sequence, trainable_variables: Any) -> None:
    """Has each replica bring its part of gradients that are whole already."""
    strategy = optimizer._distribution_strategy
    count = mesh.replicas(strategy)
    if not optimizer.built and trainable_variables is not None:
        optimizer.build(trainable_variables)

    def apply_part() -> None:
        parts = [None if each is None else mapped(each, lambda whole: whole / count) for each in grads]
        _apply(original, optimizer, parts, trainable_variables)

    strategy.run(apply_part)


@functools.lru_cache(maxsize=4)
def _say_exchanged(strategy: Any) -> None:  # noqa: ARG001 - Once for each.
    _LOG.warning(
        "Gradients are exchanged in each step of a loop of your own: replicas train by themselves in fit only, and "
        "LocalSteps has no effect here"
    )


def _scale_loss(original: Callable, optimizer: Any, loss: Any) -> Any:
    """Weights a loss before its gradients are computed in 16 bits: an example's are as large as on one device."""
    share = batch_share.current()
    if share is None:
        return original(optimizer, loss)
    scaled = original(optimizer, loss * tf.cast(share.weight, loss.dtype))
    share.scaled.append(scaled)
    share.scaled_by.add(id(optimizer))
    return scaled


def _apply_where_finite(original: Callable, optimizer: Any, grads: Any, trainable_variables: Any) -> None:
    """Keras has all replicas do what the first one's gradients allow: those that train by themselves look at theirs."""
    if not collectives.alone():
        original(optimizer, grads, trainable_variables)
        return
    with _counting_alone([variable for variable in optimizer.variables if not len(variable.shape)]):
        optimizer._common_apply(grads, trainable_variables)


@contextlib.contextmanager
def _counting_alone(counts: Sequence[Any]) -> Iterator[None]:
    """While entered, this replica's copies of counts are set, where TensorFlow would have all replicas meet."""

    def assign(count: Any, value: Any) -> Any:
        return _ThisReplica().update(count.value, lambda own: own.assign(tf.cast(value, own.dtype)))

    for count in counts:
        vars(count)["assign"] = functools.partial(assign, count)
    try:
        yield
    finally:
        for count in counts:
            del vars(count)["assign"]


def _apply_finite(original: Callable, *args: Any) -> None:
    """What a LossScaleOptimizer does where gradients are finite, in a thread of its own for each replica."""
    if collectives.replica_id_and_count()[1] == 1 and not collectives.alone():
        original(*args)
        return
    with _with_sums():
        original(*args)


def reduced(
    grads: Sequence,
    variables: Sequence,
    in_parts: frozenset = frozenset(),
    later: frozenset = frozenset(),
    *,
    weighted: bool = False,
    memories: Sequence = (),
    scale: tf.Tensor | float = 1.0,
) -> list:
    """Returns gradients of all replicas together; those of shards are added up over the groups that have them.

    Args:
        grads: A tensor, `tf.IndexedSlices` or None for each variable.
        variables: A `keras.Variable` for each gradient.
        in_parts: The numbers of those variables of which each replica updates its part: that part of the gradient is
            returned, flat.
        later: The numbers of those that are exchanged when several steps' are: this replica's is returned, weighted.
        weighted: Whether gradients are weighted by this replica's share already, as those of a scaled loss are.
        memories: What is kept of each gradient that is compressed, None for others; () where none is.
        scale: By what gradients are multiplied in this step.
    """
    strategy = tf.distribute.get_strategy()
    exchange, share = options_of(strategy).gradients, batch_share.current()
    dtype = sent_as(exchange)
    out = list(grads)
    if collectives.begins_by_itself(strategy):
        overlap.weights_first([each for n, each in enumerate(out) if isinstance(each, tf.Tensor) and n not in later])
    for number, variable in enumerate(variables):
        if out[number] is not None and isinstance(variable, ReplicaShardedVariable):
            out[number] = over_groups(out[number], dtype)
    summed = [
        number
        for number, variable in enumerate(variables)
        if out[number] is not None
        and not isinstance(variable, ReplicaShardedVariable)
        and not getattr(variable, "overwrite_with_gradient", False)  # No gradient, but such as a scale of float8.
    ]
    if not summed:
        return out
    summed.reverse()  # The last layers' gradients are known first: they are sent while others are computed.

    def by_share(gradient: Any) -> Any:
        if share is None:
            return gradient
        weight = tf.cast(share.weight, gradient.dtype)
        factor = 1 if weighted else weight
        # A replica without examples has no mean: 0 / 0.
        return mapped(gradient, lambda values: tf.where(weight > 0, values * factor, tf.zeros_like(values)))

    for number in later:
        out[number] = by_share(out[number])
    summed = [number for number in summed if number not in later]
    kept = dict(enumerate(memories))
    dense = [
        number
        for number in summed
        if number in in_parts and not isinstance(out[number], tf.IndexedSlices) and kept.get(number) is None
    ]
    if dense:
        parts = scattered([by_share(out[number]) for number in dense], dtype=dtype)
        for number, part in zip(dense, parts, strict=True):
            out[number] = part
    summed = [number for number in summed if number not in dense]
    if not summed:
        return out
    compressed = [kept[number] for number in summed] if memories else ()
    totals = over_replicas([by_share(out[number]) for number in summed], exchange, compressed, scale)
    for number, total in zip(summed, totals, strict=True):
        out[number] = own_part(total, variables[number]) if number in in_parts else total
    return out


# What Keras does for all replicas together, done by each for itself: they have the same gradients.


class _ThisReplica:
    """Takes the place of a strategy: what Keras would have it do on every replica is done on this one."""

    def __init__(self) -> None:
        self.extended = self

    def update(self, var: Any, fn: Callable, args: tuple = (), kwargs: Any = None, group: bool = True) -> Any:  # noqa: ARG002
        """Calls `fn` with this replica's copy of a variable."""
        if isinstance(var, tf.distribute.DistributedValues):
            strategy = tf.distribute.get_strategy()
            copies = strategy.experimental_local_results(var)
            var = copies[collectives.own_id() % len(copies)]
        return fn(var, *args, **(kwargs or {}))


def _each_for_itself(original: Callable, function: Callable, strategy: Any, *args: Any, **kwargs: Any) -> Any:
    if _summed():
        return function(_ThisReplica(), *args, **kwargs)
    return original(function, strategy, *args, **kwargs)


def _overwrite_with_averages(original: Callable, optimizer: Any, variables: Sequence) -> None:
    if not _summed():
        original(optimizer, variables)
        return
    for variable, average in zip(variables, optimizer._model_variables_moving_average, strict=True):
        if average is not None:
            variable.value.assign(average.value)
