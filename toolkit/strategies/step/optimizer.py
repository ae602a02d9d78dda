"""Sums gradients over replicas before Keras's optimizer sees them, unless a tape has returned the sums already.

    local gradient g_r  ->  * w_r, this replica's share of the examples  ->  all-reduce: sum over r of w_r * g_r

Keras's optimizers sum gradients over replicas at the last moment, when each replica has looked whether its own are
finite, has undone the loss scale, and has clipped them. Here `apply` begins with the sum. What follows is as on one
device, with the same numbers on every replica: whether they are finite, the norm by which they are clipped, what is
accumulated; and each replica updates its own copies of the variables, so that nothing has to meet inside a branch.

Gradients of shards stay where they are. The others may be sent in 16 bits and in packs, the last layers' first. In a
step of `fit` each counts by its replica's share of the examples; in the user's own loop they are summed, as
TensorFlow's guides have it.

After `apply` stand what an optimizer does with what tapes have exchanged, and what a LossScaleOptimizer needs. There is
no public hook for this. `apply` and `build` are replaced for the process, and not methods of objects as the others:
an optimizer that is on no model, as in one's own loop, would else be a replica's own, and silently. What an optimizer
has of its own stands in `exchange_gradients`; `tests/strategies/test_optimizer_step.py` fails when any of it changes.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies import mesh
from toolkit.strategies.context import this_step
from toolkit.strategies.mesh import any_in_shards
from toolkit.strategies.step import accumulation, exchanges, sharded_optimizer, xla
from toolkit.strategies.step.gradients import Gradients, mapped, of_first
from toolkit.strategies.step.sharded_optimizer import finite_alike, is_in_parts
from toolkit.strategies.step.sharded_weights import check_untouched, shards_of_alike
from toolkit.strategies.step.share import ExchangedInGraph, exchanged_in_graph
from toolkit.strategies.upstream.wrapping import attach
from toolkit.strategies.variables import recreate_with, refuse_outside, trained_by
from toolkit.support.graphs import Differs, decided_by, derives_from, differs

_LOG = logging.getLogger(__name__)
_READY = "_toolkit_ready"  # The ids of the optimizer that it was set for, because a copy has it too, and its strategy.


def exchange_gradients(optimizer: Any) -> None:
    """Gives an optimizer of several replicas our own methods; leaves others alone.

    It comes before the optimizer is built, so that what it keeps is kept as replicas need it.
    """
    strategy = optimizer._distribution_strategy
    ready = id(optimizer), id(strategy)
    if vars(optimizer).get(_READY) == ready or mesh.replica_count(strategy) == 1:
        return
    vars(optimizer)[_READY] = ready
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        weigh_scaled_losses(optimizer)
        exchange_gradients(optimizer.inner_optimizer)
        return
    attach(
        optimizer,
        _all_reduce_sum_gradients=_sum,
        _overwrite_model_variables_with_average_value=_overwrite_with_averages,
    )
    exchanges.begin(optimizer)


def build(original: Callable, optimizer: Any, variables: Sequence) -> None:
    """Makes an optimizer keep its state as replicas need it, such as sharded slots of sharded variables."""
    recreate_with(optimizer, variables)
    exchange_gradients(optimizer)
    if any_in_shards(variables):
        sharded_optimizer.keep_in_shards(optimizer)
    with exchanges.building(optimizer, variables):
        original(optimizer, variables)


def _sum(original: Callable, optimizer: Any, pairs: Any) -> Any:
    return pairs if this_step.summed else original(optimizer, pairs)


def apply(original: Callable, optimizer: Any, grads: Sequence, trainable_variables: Any = None) -> None:
    """Applies gradients of all replicas, in the place of Keras's `apply`."""
    grads = list(grads)
    trainable_variables = None if trainable_variables is None else list(trainable_variables)
    if this_step.piece is not None and this_step.piece.takes_updates:  # Its turn comes after the piece.
        this_step.piece.updates.append((optimizer, grads, trainable_variables))
        return
    if trainable_variables is not None and not optimizer.built and this_step.recorded is None:
        recreate_with(optimizer, trainable_variables)
    exchange_gradients(optimizer)  # Such as of one that is on no model, or a copy.
    if this_step.recorded is None and trainable_variables is not None and not tf.distribute.has_strategy():
        _build_in_scope(optimizer, trainable_variables)  # Such as in a loop over single states, without replicas.
    if this_step.recorded is None and _between_replicas(optimizer):  # Otherwise in a step without values.
        _apply_to_all(original, optimizer, grads, trainable_variables)
        return
    share = this_step.share
    if this_step.is_local:
        if share is not None:
            grads = [None if each is None else mapped(each, share.own) for each in grads]
        with this_step.having(summed=True, updates_own=True):
            _update(original, optimizer, grads, trainable_variables)
        return
    if this_step.recorded is not None or this_step.summed or this_step.count == 1:
        # A single replica needn't meet others in a branch. Keras's LossScaleOptimizer does so before its own.
        alone = this_step.count == 1 and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        alone = alone and this_step.strategy is not None
        with this_step.having(updates_own=this_step.updates_own or alone):
            original(optimizer, grads, trainable_variables)
        return
    if share is None and this_step.options.local is not None:
        _say_exchanged(this_step.strategy)
    variables = list(trained_by(optimizer) if trainable_variables is None else trainable_variables)
    refuse_outside(optimizer, variables)
    with contextlib.ExitStack() as stack:
        if len(grads) == len(variables):  # Otherwise Keras says what is wrong.
            grads = _of_all(optimizer, grads, variables, stack)
        stack.enter_context(this_step.having(summed=True, updates_own=True))
        _update(original, optimizer, grads, trainable_variables)


def _update(original: Callable, optimizer: Any, grads: Sequence, variables: Any) -> None:
    """Updates this replica's variables from gradients of all replicas, compiled by XLA if the step is."""

    def alone() -> None:
        with counting_alone(optimizer):
            original(optimizer, grads, variables)

    if this_step.xla is None or this_step.piece is not None or not xla.updated(alone):
        original(optimizer, grads, variables)


def _of_all(optimizer: Any, grads: list, variables: Sequence, stack: contextlib.ExitStack) -> list:
    """Returns the gradients of all replicas, and makes the optimizer use them in `stack`."""
    share, options = this_step.share, this_step.options
    if this_step.shards_weights:
        check_untouched(grads, variables)
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if not optimizer.built and (options.optimizer_state == "sharded" or options.gradients.compression != "none"):
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))  # What it keeps says how its gradients are exchanged.
    if share is not None and share.at_tape and not tf.executing_eagerly():
        check_rate(optimizer)
    every = frozenset(number for number, each in enumerate(grads) if each is not None)
    sums = every if share is None or id(optimizer) in share.scaled_by else frozenset()
    found = share.in_graph if share is not None else exchanged_in_graph()
    provenance = provenance_of(found, grads, variables, weighted=sums) if found.identical else Provenance(weighted=sums)
    if share is not None and share.in_branch:
        check_branch(optimizer, grads, variables, provenance)
        stack.enter_context(counting_alone(optimizer))
        return shards_of_alike(grads, variables, provenance.identical) if this_step.shards_weights else grads
    sent = Gradients(
        [of_first(each) if number in provenance.drawn else each for number, each in enumerate(grads)],
        variables,
        optimizer,
        weighted=provenance.weighted,
        alike=provenance.identical & (provenance.derived if share is not None else every) | provenance.drawn,
        scale=tf.cast(optimizer.dynamic_scale, tf.float32) if scales else 1.0,
    )
    later = exchanges.exchange(sent)
    if this_step.shards_weights:
        sent.values = shards_of_alike(sent.values, variables, sent.alike)
    if later:
        stack.enter_context(accumulation.exchanged_later(optimizer, [variables[number] for number in later]))
    return finite_alike(sent.values, variables, optimizer) if scales else sent.values


def _between_replicas(optimizer: Any) -> bool:
    """Whether an optimizer of several replicas is used outside of replicas, for example in a loop in the scope."""
    return tf.distribute.in_cross_replica_context() and mesh.replica_count(optimizer._distribution_strategy) > 1


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
        apply(original, optimizer, parts, trainable_variables)

    strategy.run(apply_part)


@functools.lru_cache(maxsize=4)
def _say_exchanged(strategy: Any) -> None:  # noqa: ARG001 - Once for each.
    _LOG.warning(
        "Gradients are exchanged in each step of your own loop: replicas train by themselves in fit only, and "
        "LocalSteps has no effect here"
    )


def _overwrite_with_averages(original: Callable, optimizer: Any, variables: Sequence) -> None:
    with sharded_optimizer.by_shard():
        if not this_step.summed:
            original(optimizer, variables)
            return
        for variable, average in zip(variables, optimizer._model_variables_moving_average, strict=True):
            if average is not None:
                variable.value.assign(average.value)


# Which of an optimizer's gradients must still be exchanged if a tape has exchanged some.
#
# In the user's own step a tape has exchanged them already, and what comes to `optimizer.apply` was computed from
# what it has returned: clipped, divided by a norm, added up. The graph shows what else went into it.
#
# - identical: nothing that differs between replicas. It stays as it is if it comes from what they have exchanged. One
#   that comes from no exchange, as of a penalty on weights, has its mean taken in a step of `fit`: that changes nothing
#   if replicas have it alike, and none goes by itself should that not be so.
# - drawn: random numbers too, which each replica draws for itself. The first replica's are taken: one device's.
# - summed: anything else, such as this replica's loss. Weighted by the replica's share it is averaged once more, which
#   changes nothing of what all have alike; a gradient that no tape has exchanged is exchanged here.


@dataclasses.dataclass(frozen=True)
class Provenance:
    """The numbers of gradients, by what must be done with them; all others are summed.

    Attributes:
        identical: Those that all replicas have alike.
        derived: Those that come from what replicas have exchanged.
        drawn: Those that differ by random numbers only.
        weighted: Those that are parts of a sum already: of a scaled loss, or in the user's own loop.
    """

    identical: frozenset[int] = frozenset()
    derived: frozenset[int] = frozenset()
    drawn: frozenset[int] = frozenset()
    weighted: frozenset[int] = frozenset()


def provenance_of(
    found: ExchangedInGraph, grads: Sequence, variables: Sequence, *, weighted: frozenset[int]
) -> Provenance:
    """Returns what must be done with an optimizer's gradients.

    Args:
        found: What tapes have exchanged.
        grads: A tensor, `tf.IndexedSlices` or None for each variable.
        variables: A `keras.Variable` for each gradient.
        weighted: Those that are parts of a sum already, where no tape has exchanged what they are computed from.

    Raises:
        StrategyError: The gradient of one variable was computed from those of another, of which replicas have shards.
    """
    every = frozenset(number for number, each in enumerate(grads) if each is not None)
    parts = {number: tf.nest.flatten(grads[number], expand_composites=True) for number in every}
    if tf.executing_eagerly():
        exchanged = {id(each) for each in found.identical}
        identical = frozenset(n for n in every if all(id(each) in exchanged for each in parts[n]))
        return Provenance(identical=identical, derived=identical)
    _check_shards(found.shards, parts, variables)
    derived = frozenset(n for n, part in parts.items() if any(derives_from(each, found.identical) for each in part))
    together = differs([each for part in parts.values() for each in part], found.identical, found.drawn)
    if together is Differs.NOWHERE:
        return Provenance(identical=every, derived=derived)
    how = {number: differs(part, found.identical, found.drawn) for number, part in parts.items()}
    identical = frozenset(n for n, each in how.items() if each is Differs.NOWHERE)
    return Provenance(
        identical=identical,
        derived=derived,
        drawn=frozenset(n for n in derived if how[n] is Differs.BY_DRAWS),
        weighted=weighted - derived - identical,
    )


def _by_replica(tensors: Sequence) -> bool:
    """Whether some tensors of a step of `fit` may differ between replicas."""
    share = this_step.share
    known = share.in_graph if share is not None else exchanged_in_graph()
    return (
        differs([each for each in tensors if tf.is_tensor(each)], known.identical, known.drawn) is not Differs.NOWHERE
    )


def _check_shards(shards: dict, parts: dict[int, list], variables: Sequence) -> None:
    """Refuses, for example, a norm over gradients of which each replica has a part."""
    for number, part in parts.items():
        mine = (this_step.replica, id(variables[number]))
        others = [each for key, each in shards.items() if key[0] == mine[0] and key != mine]
        if others and any(derives_from(each, others) for each in part):
            raise StrategyError(
                asked=f"the gradient of {variables[number].path} was computed from those of sharded layers",
                found="each replica has a part of those, so that a norm over them, or a sum, is another on each",
                remedy="Clip by the optimizer's global_clipnorm or clipnorm, which know of shards, or don't shard",
            )


def check_rate(optimizer: Any) -> None:
    """Refuses a learning rate computed from this replica's values, because others would set another."""
    rates = [tf.convert_to_tensor(each) for each in optimizer.variables if each.name == "learning_rate"]
    if _by_replica(rates):
        raise StrategyError(
            asked=f"the step sets the learning rate of its {type(optimizer).__name__}",
            found="it computes it from what a replica alone knows, such as the loss of its share",
            remedy="Compute it from what all have, such as a norm of the gradients, or set it in a callback",
        )


def check_branch(optimizer: Any, grads: list, variables: Sequence, provenance: Provenance) -> None:
    """Refuses exchanges in a branch or a loop, which other replicas may not reach."""
    unknown = [variables[n].path for n, each in enumerate(grads) if each is not None and n not in provenance.identical]
    found = f"the gradient of {unknown[0]} isn't seen to be the same on every replica" if unknown else ""
    if _by_replica(decided_by()):
        found = "whether that happens is decided by what a replica alone knows, such as the loss of its share"
    if any(is_in_parts(optimizer, variable) for variable in variables):
        found = "the optimizer's state is sharded, and replicas bring parts of weights together"
    elif getattr(optimizer, "gradient_accumulation_steps", None):
        found = "the optimizer accumulates gradients, and exchanges them in its own branch"
    if found and this_step.share.in_function:
        raise StrategyError(
            asked=f"{type(optimizer).__name__}.apply was called in a tf.function with jit_compile=True within the step",
            found="XLA compiles such a function as a whole, and replicas can't meet in it",
            remedy="Leave jit_compile out there: compile the model with jit_compile=True",
        )
    if found:
        raise StrategyError(
            asked=f"{type(optimizer).__name__}.apply was called in a tf.cond or a loop, where replicas can't meet",
            found=found,
            remedy="Decide by what all have, such as a norm of the gradients, and call tape.gradient before it, or let "
            "the optimizer decide (gradient_accumulation_steps, LossScaleOptimizer)",
        )


# A LossScaleOptimizer on several replicas: losses are weighted before they are scaled, and all replicas decide alike.
#
# Keras's multiplies a loss against underflow, divides gradients by as much, and leaves out a step whose gradients
# aren't finite. `apply` has exchanged them when it looks.


def weigh_scaled_losses(optimizer: Any) -> None:
    """Gives a LossScaleOptimizer of several replicas our own methods."""
    attach(
        optimizer, scale_loss=_scale_loss, _tf_apply=_apply_where_finite, _stateful_handle_finite_grads=_apply_finite
    )


def _scale_loss(original: Callable, optimizer: Any, loss: Any) -> Any:
    """Weights a loss before its 16-bit gradients are computed: an example's gradients are as large as on one device."""
    share = this_step.share
    if share is None or this_step.view is not None:
        return original(optimizer, loss)
    scaled = original(optimizer, loss * tf.cast(share.weight, loss.dtype))
    share.scaled.append(scaled)
    share.scaled_by.add(id(optimizer))
    return scaled


def _apply_where_finite(original: Callable, optimizer: Any, grads: Any, trainable_variables: Any) -> None:
    """Keras lets the first replica's gradients decide for all. Replicas with local steps decide by their own."""
    if not this_step.is_local and this_step.piece is None:  # In a piece, replicas can't meet, and needn't.
        # They exchange here, so that they can exchange again in the branch.
        with this_step.having(summed=False, updates_own=False):
            original(optimizer, grads, trainable_variables)
        return
    with counting_alone(optimizer):
        optimizer._common_apply(grads, trainable_variables)


def _apply_finite(original: Callable, *args: Any) -> None:
    """What a LossScaleOptimizer does if gradients are finite, in each replica's own thread."""
    if this_step.count == 1 and not this_step.is_local:
        original(*args)
        return
    with this_step.having(summed=True, updates_own=True):
        original(*args)


@contextlib.contextmanager
def counting_alone(optimizer: Any) -> Iterator[None]:
    """A context in which this replica's copies of counts are set without synchronising all replicas."""
    # Where it is entered already, those have been seen to.
    counts = [each for each in optimizer.variables if not len(each.shape) and "assign" not in vars(each)]

    def assign(count: Any, value: Any) -> Any:
        with this_step.having(updates_own=True):
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
