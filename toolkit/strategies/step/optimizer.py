"""Sums gradients over replicas before Keras's optimizer sees them: the only place where they are exchanged.

    local gradient g_r  ->  * w_r, this replica's share of the examples  ->  all-reduce: sum over r of w_r * g_r

Keras's optimizers sum gradients over replicas at the last moment, when each replica has looked whether its own are
finite, has undone the loss scale, and has clipped them. Here `apply` begins with the sum. What follows is as on one
device, with the same numbers on every replica: whether they are finite, the norm by which they are clipped, what is
accumulated; and each replica updates its own copies of the variables, so that nothing has to meet inside a branch.

Gradients of shards stay where they are. The others may be sent in 16 bits and in packs, the last layers' first. In a
step of `fit` each counts by its replica's share of the examples; in the user's own loop they are summed, as
TensorFlow's guides have it.

There is no public hook for this. What is wrapped stands in `adapt_optimizers`, what an optimizer has of its own in
`attach_to`; `tests/strategies/test_optimizer_step.py` fails when any of it changes.
"""

import contextlib
import enum
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.context import here, known
from toolkit.strategies.exchange import collectives, mesh, overlap
from toolkit.strategies.exchange.gradients import (
    computed_in_half,
    mapped,
    of_first,
    over_groups,
    over_replicas,
    sent_as,
    with_overflow,
)
from toolkit.strategies.options import options_of
from toolkit.strategies.step import accumulation, batch_share, compression, loss_scale, sharded_optimizer, xla
from toolkit.strategies.step.loss_scale import counting_alone
from toolkit.strategies.step.routes import Routes, check_branch, check_rate, routes_of
from toolkit.strategies.step.sharded_optimizer import finite_alike
from toolkit.strategies.variables.model_optimizers import trained_by
from toolkit.strategies.variables.outside import refuse_outside
from toolkit.strategies.variables.sharded_variable import ReplicaShardedVariable
from toolkit.strategies.variables.zero1 import in_parts_among, own_part, scattered
from toolkit.support.wrapping import attach, wrap

__all__ = ["adapt_optimizers", "attach_to", "know_steps", "reduced"]

_LOG = logging.getLogger(__name__)


def adapt_optimizers() -> None:
    """Makes Keras's optimizers exchange gradients in this way on several replicas. Later calls do nothing.

    `apply` and `build` are wrapped, and no methods of objects as the others are: an optimizer that is on no model, as
    in one's own loop, would else be a replica's own, and silently.
    """
    wrap(keras.optimizers.Optimizer, "build", _build)
    for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        wrap(kind, "apply", _apply)


def know_steps(strategy: tf.distribute.Strategy) -> None:
    """Makes replicas know their step, and update their own copies of variables. Later calls do nothing."""
    attach(strategy.extended, "call_for_each_replica", _with_steps)
    attach(strategy.extended, "_use_merge_call", _meets)


def _with_steps(original: Callable, extended: Any, fn: Callable, args: Any = (), kwargs: Any = None) -> Any:
    def of_one(*args: Any, **kwargs: Any) -> Any:
        with known(step=collectives.step_of(tf.distribute.get_replica_context())):
            return fn(*args, **kwargs)

    return original(extended, of_one, args, kwargs)


def _meets(original: Callable, extended: Any) -> bool:
    """Returns whether TensorFlow synchronises all replicas when a variable changes."""
    return not here.summed and bool(original(extended))


def attach_to(optimizer: Any) -> None:
    """Gives an optimizer of several replicas our own methods; leaves others alone.

    It comes before the optimizer is built, so that what it keeps is kept as replicas need it.
    """
    if mesh.replica_count(optimizer._distribution_strategy) == 1:
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        loss_scale.attach_to(optimizer)
        attach_to(optimizer.inner_optimizer)
        return
    attach(optimizer, "_all_reduce_sum_gradients", _sum)
    attach(optimizer, "_overwrite_model_variables_with_average_value", _overwrite_with_averages)
    options = options_of(optimizer._distribution_strategy)
    if options.gradients.compression != "none":
        compression.attach_to(optimizer)
    if optimizer.gradient_accumulation_steps:
        accumulation.attach_to(optimizer)
    if options.optimizer_state == "sharded":
        sharded_optimizer.attach_to(optimizer)


def _build(original: Callable, optimizer: Any, variables: Sequence) -> None:
    """Makes an optimizer keep its state as replicas need it, such as sharded slots of sharded variables."""
    before = vars(optimizer).get("build")
    attach_to(optimizer)
    if any(isinstance(variable, ReplicaShardedVariable) for variable in variables):
        sharded_optimizer.attach_to(optimizer)
    if vars(optimizer).get("build") is before:
        original(optimizer, variables)
    else:  # The model has another one now, so this one is finished.
        optimizer.build(variables)


def _sum(original: Callable, optimizer: Any, pairs: Any) -> Any:
    return pairs if here.summed else original(optimizer, pairs)


def _apply(original: Callable, optimizer: Any, grads: Sequence, trainable_variables: Any = None) -> None:
    grads = list(grads)
    trainable_variables = None if trainable_variables is None else list(trainable_variables)
    if xla.taken(optimizer, grads, trainable_variables):
        return
    attach_to(optimizer)
    if here.recorded is None and trainable_variables is not None and not tf.distribute.has_strategy():
        _build_in_scope(optimizer, trainable_variables)  # Such as in a loop over single states, without replicas.
    if here.recorded is None and _between_replicas(optimizer):  # Otherwise in a step without values.
        _apply_to_all(original, optimizer, grads, trainable_variables)
        return
    share = here.share
    if here.alone:
        if share is not None:
            grads = [None if each is None else mapped(each, share.own) for each in grads]
        with known(summed=True):
            _update(original, optimizer, grads, trainable_variables)
        return
    if here.recorded is not None or here.summed or here.step.count == 1:
        original(optimizer, grads, trainable_variables)
        return
    if share is None and here.step.options.local is not None:
        _say_exchanged(here.step.strategy)
    variables = list(trained_by(optimizer) if trainable_variables is None else trainable_variables)
    refuse_outside(optimizer, variables)
    with contextlib.ExitStack() as stack:
        if len(grads) == len(variables):  # Otherwise Keras says what is wrong.
            grads = _of_all(optimizer, grads, variables, stack)
        stack.enter_context(known(summed=True))
        _update(original, optimizer, grads, trainable_variables)


def _update(original: Callable, optimizer: Any, grads: Sequence, variables: Any) -> None:
    """Updates this replica's variables from gradients of all replicas, compiled by XLA if the step is."""

    def alone() -> None:
        with counting_alone(optimizer):
            original(optimizer, grads, variables)

    if not xla.updated(alone):
        original(optimizer, grads, variables)


def _of_all(optimizer: Any, grads: list, variables: Sequence, stack: contextlib.ExitStack) -> list:
    """Returns the gradients of all replicas, and makes the optimizer use them in `stack`."""
    share, options = here.share, here.step.options
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    in_parts = in_parts_among(optimizer, variables) if options.optimizer_state == "sharded" else frozenset()
    if share is not None and share.at_tape and not tf.executing_eagerly():
        check_rate(optimizer)
    every = frozenset(number for number, each in enumerate(grads) if each is not None)
    sums = every if share is None or id(optimizer) in share.scaled_by else frozenset()
    found = share.known if share is not None else batch_share.known_here()
    routes = routes_of(found, grads, variables, weighted=sums) if found.exchanged else Routes(weighted=sums)
    if share is not None and share.in_branch:
        check_branch(optimizer, grads, variables, routes, in_parts)
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
    alike = routes.known | routes.drawn
    grads = reduced(
        grads, variables, in_parts, later, weighted=routes.weighted, alike=alike, memories=memories, scale=scale
    )
    return finite_alike(grads, variables, in_parts) if scales else grads


class _Route(enum.Enum):
    """How a gradient becomes that of all replicas."""

    GROUPS = "a shard's, over the groups that have that shard"
    LATER = "with those of other steps"
    PARTS = "each replica gets the part that it updates"
    WHOLE = "each replica gets all of it"


def _sorted(
    grads: Sequence, variables: Sequence, *, alike: frozenset, later: frozenset, in_parts: frozenset
) -> dict[_Route, list[int]]:
    """Returns the numbers of gradients by route. The last layers' come first and are sent while others are computed."""
    routes: dict[_Route, list[int]] = {route: [] for route in _Route}
    for number in reversed(range(len(grads))):
        gradient, variable = grads[number], variables[number]
        no_gradient = gradient is None or getattr(variable, "overwrite_with_gradient", False)  # A float8 scale.
        if number in alike or no_gradient:
            continue
        if isinstance(variable, ReplicaShardedVariable):
            routes[_Route.GROUPS].append(number)
        elif number in later:
            routes[_Route.LATER].append(number)
        elif number in in_parts and not isinstance(gradient, tf.IndexedSlices):
            routes[_Route.PARTS].append(number)
        else:
            routes[_Route.WHOLE].append(number)
    return routes


def reduced(
    grads: Sequence,
    variables: Sequence,
    in_parts: frozenset = frozenset(),
    later: frozenset = frozenset(),
    *,
    weighted: frozenset = frozenset(),
    alike: frozenset = frozenset(),
    memories: Sequence = (),
    scale: tf.Tensor | float = 1.0,
) -> list:
    """Returns gradients of all replicas: one route for each gradient, and one exchange for each route.

    Args:
        grads: A tensor, `tf.IndexedSlices` or None for each variable.
        variables: A `keras.Variable` for each gradient.
        in_parts: The numbers of those variables of which each replica updates its part: that part of the gradient is
            returned, flat.
        later: The numbers of those that are exchanged when several steps' are: this replica's is returned, weighted.
        weighted: The numbers of those that are weighted by this replica's share already, as of a scaled loss.
        alike: The numbers of those that all replicas have alike already.
        memories: The unsent part of each compressed gradient, None for others; () if none is compressed.
        scale: By what gradients are multiplied in this step.
    """
    share, exchange, out = here.share, here.step.options.gradients, list(grads)
    dtype = sent_as(exchange)
    for number in in_parts:  # TensorFlow knows no shape of a gradient, as of a layer on sentences of any length.
        if isinstance(out[number], tf.Tensor):
            out[number] = tf.ensure_shape(out[number], variables[number].shape)
    for number in alike & in_parts:
        out[number] = own_part(out[number], variables[number])
    whole_only = {number for number, memory in enumerate(memories) if memory is not None}
    routes = _sorted(out, variables, alike=alike, later=later, in_parts=in_parts - whole_only)
    if here.step.exchanges_overlap:
        now = sorted(number for route in set(_Route) - {_Route.LATER} for number in routes[route])
        overlap.weights_first([out[number] for number in now if isinstance(out[number], tf.Tensor)])

    own_weight = None if share is None else share.exchanged_weight

    def by_share(number: int) -> Any:
        gradient = out[number]
        if share is None:
            count = here.step.count
            return gradient if number in weighted else mapped(gradient, lambda values: values / count)
        weight = tf.cast(own_weight, gradient.dtype)
        factor = tf.cast(weight > 0, gradient.dtype) if number in weighted else weight
        # A replica without examples has no mean: 0 / 0.
        return mapped(gradient, lambda values: tf.math.multiply_no_nan(values, factor))

    def overflowing(number: int, total: Any) -> Any:
        return with_overflow(total) if share and number in weighted and computed_in_half(grads[number]) else total

    for number in routes[_Route.GROUPS]:
        out[number] = over_groups(out[number], dtype)
    for number in routes[_Route.LATER]:
        out[number] = by_share(number)
    if split := routes[_Route.PARTS]:
        for number, part in zip(split, scattered([by_share(each) for each in split], dtype=dtype), strict=True):
            out[number] = overflowing(number, part)
    if whole := routes[_Route.WHOLE]:
        compressed = [memories[number] for number in whole] if memories else ()
        totals = over_replicas([by_share(number) for number in whole], exchange, compressed, scale)
        for number, each in zip(whole, totals, strict=True):
            total = overflowing(number, each)
            out[number] = own_part(total, variables[number]) if number in in_parts else total
    return out


def _between_replicas(optimizer: Any) -> bool:
    """Whether an optimizer of several replicas is used outside of replicas, for example in a loop in the scope."""
    return mesh.replica_count(optimizer._distribution_strategy) > 1 and tf.distribute.in_cross_replica_context()


def _build_in_scope(optimizer: Any, variables: Sequence) -> None:
    """Builds an optimizer of several replicas outside of them, also where a function is traced."""
    strategy = optimizer._distribution_strategy
    if not optimizer.built and mesh.replica_count(strategy) > 1:
        with tf.init_scope(), strategy.scope():
            optimizer.build(variables)


def _apply_to_all(original: Callable, optimizer: Any, grads: Sequence, trainable_variables: Any) -> None:
    """Makes each replica contribute its part of gradients that are already whole."""
    strategy = optimizer._distribution_strategy
    count = mesh.replica_count(strategy)
    if trainable_variables is not None:
        _build_in_scope(optimizer, trainable_variables)

    def apply_part() -> None:
        parts = [None if each is None else mapped(each, lambda whole: whole / count) for each in grads]
        _apply(original, optimizer, parts, trainable_variables)

    strategy.run(apply_part)


@functools.lru_cache(maxsize=4)
def _say_exchanged(strategy: Any) -> None:  # noqa: ARG001 - Once for each.
    _LOG.warning(
        "Gradients are exchanged in each step of your own loop: replicas train by themselves in fit only, and "
        "LocalSteps has no effect here"
    )


def _overwrite_with_averages(original: Callable, optimizer: Any, variables: Sequence) -> None:
    if not here.summed:
        original(optimizer, variables)
        return
    for variable, average in zip(variables, optimizer._model_variables_moving_average, strict=True):
        if average is not None:
            variable.value.assign(average.value)
