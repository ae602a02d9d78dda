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

from toolkit.errors import StrategyError
from toolkit.strategies.exchange import collectives, mesh
from toolkit.strategies.exchange.gradients import mapped, of_first
from toolkit.strategies.options import options_of
from toolkit.strategies.step import accumulation, batch_share, compression, sharded_optimizer
from toolkit.strategies.step.routes import Routes, by_replica, reduced, routes_of
from toolkit.strategies.step.sharded_optimizer import finite_alike
from toolkit.strategies.variables.model_optimizers import trained_by
from toolkit.strategies.variables.outside import refuse_outside
from toolkit.strategies.variables.sharded_variable import ReplicaShardedVariable
from toolkit.strategies.variables.zero1 import in_parts_among
from toolkit.support.graphs import decided_by
from toolkit.support.wrapping import attach, wrap

__all__ = ["adapt_optimizers"]

_LOG = logging.getLogger(__name__)
_here = threading.local()


def adapt_optimizers() -> None:
    """Makes Keras's optimizers exchange gradients in this way on several replicas; called again, it does nothing."""
    for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        wrap(kind, "apply", _apply)
    wrap(keras.optimizers.LossScaleOptimizer, "scale_loss", _scale_loss)
    wrap(tf.__internal__.distribute.interim, "maybe_merge_call", _each_for_itself)


def _attach(optimizer: Any, variables: Sequence) -> None:
    """Gives an optimizer of several replicas what `apply` calls of its own methods."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        attach(optimizer, "_tf_apply", _apply_where_finite)
        attach(optimizer, "_stateful_handle_finite_grads", _apply_finite)
        return  # What follows is the inner optimizer's.
    attach(optimizer, "_all_reduce_sum_gradients", _sum)
    attach(optimizer, "_overwrite_model_variables_with_average_value", _overwrite_with_averages)
    if optimizer.gradient_accumulation_steps:
        accumulation.attach_to(optimizer)
    in_shards = any(isinstance(variable, ReplicaShardedVariable) for variable in variables)
    if in_shards or options_of(optimizer._distribution_strategy).optimizer_state == "sharded":
        sharded_optimizer.attach_to(optimizer)


def _sum(original: Callable, optimizer: Any, pairs: Any) -> Any:
    return pairs if _summed() else original(optimizer, pairs)


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
    trainable_variables = None if trainable_variables is None else list(trainable_variables)
    if mesh.replicas(optimizer._distribution_strategy) > 1:
        _attach(optimizer, trained_by(optimizer) if trainable_variables is None else trainable_variables)
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
    share, options = batch_share.current(), options_of(optimizer._distribution_strategy)
    if share is None and options.local is not None:
        _say_exchanged(optimizer._distribution_strategy)
    variables = list(trained_by(optimizer) if trainable_variables is None else trainable_variables)
    refuse_outside(optimizer, variables)
    with contextlib.ExitStack() as stack:
        if len(grads) == len(variables):  # Else Keras says what is wrong.
            grads = _of_all(optimizer, grads, variables, stack)
        stack.enter_context(_with_sums())
        original(optimizer, grads, trainable_variables)


def _of_all(optimizer: Any, grads: list, variables: Sequence, stack: contextlib.ExitStack) -> list:
    """Returns the gradients of all replicas, and has the optimizer use them in `stack`."""
    share, options = batch_share.current(), options_of(optimizer._distribution_strategy)
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    in_parts = in_parts_among(optimizer, variables) if options.optimizer_state == "sharded" else frozenset()
    if share is not None and share.at_tape and not tf.executing_eagerly():
        _check_rate(optimizer)
    routes = routes_of(share, grads, variables, scaled=share is not None and id(optimizer) in share.scaled_by)
    if share is not None and share.in_branch:
        _check_branch(optimizer, grads, variables, routes, in_parts)
        stack.enter_context(counting_alone(optimizer))
        return grads
    later: frozenset[int] = frozenset()
    if getattr(optimizer, "gradient_accumulation_steps", None):
        later = accumulation.later(optimizer, grads, variables) - routes.known
        if later:
            of_later = [variables[number] for number in later]
            stack.enter_context(accumulation.exchanged_later(optimizer, of_later))
    memories: Sequence = ()
    if options.gradients.compression != "none":
        memories = compression.memories_of(optimizer, variables)
    scale = tf.cast(optimizer.dynamic_scale, tf.float32) if scales else 1.0
    grads = [of_first(each) if n in routes.drawn else each for n, each in enumerate(grads)]
    known = routes.known | routes.drawn
    grads = reduced(
        grads, variables, in_parts, later, weighted=routes.weighted, known=known, memories=memories, scale=scale
    )
    return finite_alike(grads, variables, in_parts) if scales else grads


def _check_rate(optimizer: Any) -> None:
    """Refuses a learning rate that the step has set from what this replica alone knows: others would set another."""
    rates = [tf.convert_to_tensor(each) for each in optimizer.variables if each.name == "learning_rate"]
    if by_replica(rates):
        raise StrategyError(
            asked=f"the step sets the learning rate of its {type(optimizer).__name__}",
            found="it computes it from what a replica alone knows, such as the loss of its share",
            remedy="Compute it from what all have, such as a norm of the gradients, or set it in a callback",
        )


def _check_branch(optimizer: Any, grads: list, variables: Sequence, routes: Routes, in_parts: frozenset) -> None:
    """Refuses in a branch or a loop what replicas would have to meet for: they may not all come there."""
    unknown = [variables[n].path for n, each in enumerate(grads) if each is not None and n not in routes.known]
    found = f"the gradient of {unknown[0]} isn't seen to be the same on every replica" if unknown else ""
    if by_replica(decided_by()):
        found = "whether that happens is decided by what a replica alone knows, such as the loss of its share"
    if in_parts:
        found = "the optimizer's state is sharded, and replicas bring parts of weights together"
    elif getattr(optimizer, "gradient_accumulation_steps", None):
        found = "the optimizer accumulates gradients, and exchanges them in its own branch"
    if found:
        raise StrategyError(
            asked=f"{type(optimizer).__name__}.apply was called in a tf.cond or a loop, where replicas can't meet",
            found=found,
            remedy="Decide by what all have, such as a norm of the gradients, and call tape.gradient before it, or let "
            "the optimizer decide (gradient_accumulation_steps, LossScaleOptimizer)",
        )


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
    with counting_alone(optimizer):
        optimizer._common_apply(grads, trainable_variables)


@contextlib.contextmanager
def counting_alone(optimizer: Any) -> Iterator[None]:
    """While entered, this replica's copies of an optimizer's counts are set, where TensorFlow has all replicas meet."""
    counts = [variable for variable in optimizer.variables if not len(variable.shape)]

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
