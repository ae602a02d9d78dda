"""Which gradients an optimizer is given that are still to be exchanged, and how: one route for each variable.

In a step of the user's own a tape has exchanged them already, and what comes to `optimizer.apply` was computed from
what it has returned: clipped, divided by a norm, added up. The graph shows what else went into it.

- known: nothing that differs between replicas. It stays as it is.
- drawn: random numbers too, which each replica draws for itself. The first replica's are taken: one device's.
- summed: anything else, such as this replica's loss. Weighted by the replica's share it is averaged once more, which
  changes nothing of what all have alike; a gradient that no tape has exchanged is exchanged here.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.exchange import collectives, overlap
from toolkit.strategies.exchange.gradients import (
    computed_in_half,
    mapped,
    over_groups,
    over_replicas,
    sent_as,
    with_overflow,
)
from toolkit.strategies.options import options_of
from toolkit.strategies.step import batch_share
from toolkit.strategies.step.batch_share import Share, known_here
from toolkit.strategies.variables.sharded_variable import ReplicaShardedVariable
from toolkit.strategies.variables.zero1 import own_part, scattered
from toolkit.support.graphs import Differs, derives_from, differs

__all__ = ["Routes", "batch_gradients", "by_replica", "reduced", "routes_of"]


@dataclasses.dataclass(frozen=True)
class Routes:
    """The numbers of gradients, by what is to be done with them; all others are summed.

    Attributes:
        known: Those that all replicas have alike.
        drawn: Those that differ by random numbers only.
        weighted: Those that are parts of a sum already: of a scaled loss, or in a loop of the user's own.
    """

    known: frozenset[int] = frozenset()
    drawn: frozenset[int] = frozenset()
    weighted: frozenset[int] = frozenset()


def routes_of(share: Share | None, grads: Sequence, variables: Sequence, *, scaled: bool) -> Routes:
    """Returns what is to be done with gradients that an optimizer is given.

    Args:
        share: The replica's, None outside of `fit`.
        grads: A tensor, `tf.IndexedSlices` or None for each variable.
        variables: A `keras.Variable` for each gradient.
        scaled: Whether the loss was scaled, and so weighted by the share before it was differentiated.

    Raises:
        StrategyError: The gradient of one variable was computed from those of another, of which replicas have shards.
    """
    every = frozenset(number for number, each in enumerate(grads) if each is not None)
    parts_of_sums = every if scaled or share is None else frozenset()
    found = share.known if share is not None else known_here()
    if not found.exchanged:
        return Routes(weighted=parts_of_sums)
    parts = {number: tf.nest.flatten(grads[number], expand_composites=True) for number in every}
    if tf.executing_eagerly():
        exchanged = {id(each) for each in found.exchanged}
        return Routes(known=frozenset(n for n in every if all(id(each) in exchanged for each in parts[n])))
    _check_shards(found.shards, parts, variables)
    together = differs([each for part in parts.values() for each in part], found.exchanged, found.drawn)
    if together is Differs.NOWHERE:
        return Routes(known=every)
    how = {number: differs(part, found.exchanged, found.drawn) for number, part in parts.items()}
    derived = {n for n, part in parts.items() if how[n] and any(derives_from(each, found.exchanged) for each in part)}
    return Routes(
        known=frozenset(n for n, each in how.items() if each is Differs.NOWHERE),
        drawn=frozenset(n for n in derived if how[n] is Differs.BY_DRAWS),
        weighted=parts_of_sums - derived,
    )


def by_replica(tensors: Sequence) -> bool:
    """Whether some tensors of a step of `fit` aren't seen to be the same on every replica."""
    share = batch_share.current()
    known = share.known if share is not None else known_here()
    return (
        differs([each for each in tensors if tf.is_tensor(each)], known.exchanged, known.drawn) is not Differs.NOWHERE
    )


def batch_gradients(gradients: Sequence, variables: Sequence) -> list:
    """Returns the sums of all replicas' gradients in a loop of the user's own; see `strategies.batch_gradients`."""
    grads, count = list(gradients), collectives.replica_id_and_count()[1]
    if count == 1 or batch_share.current() is not None:  # In `fit` a tape has exchanged them.
        return grads
    if tf.executing_eagerly():
        raise StrategyError(
            asked="batch_gradients in a loop that isn't traced",
            found="what is computed from its gradients can't be told from others there",
            remedy="Call strategy.run in a tf.function",
        )
    totals = reduced(grads, variables, weighted=frozenset(range(len(grads))))
    known_here().add(
        [each for each in totals if each is not None],
        [variable for each, variable in zip(totals, variables, strict=True) if each is not None],
        ReplicaShardedVariable,
    )
    return totals


def _check_shards(shards: dict, parts: dict[int, list], variables: Sequence) -> None:
    """Refuses such as a norm over gradients of which each replica has a part."""
    for number, part in parts.items():
        mine = (collectives.own_id(), id(variables[number]))
        others = [each for key, each in shards.items() if key[0] == mine[0] and key != mine]
        if others and any(derives_from(each, others) for each in part):
            raise StrategyError(
                asked=f"the gradient of {variables[number].path} was computed from those of sharded layers",
                found="each replica has a part of those, so that a norm over them, or a sum, is another on each",
                remedy="Clip by the optimizer's global_clipnorm or clipnorm, which know of shards, or don't shard",
            )


def reduced(
    grads: Sequence,
    variables: Sequence,
    in_parts: frozenset = frozenset(),
    later: frozenset = frozenset(),
    *,
    weighted: frozenset = frozenset(),
    known: frozenset = frozenset(),
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
        weighted: The numbers of those that are weighted by this replica's share already, as of a scaled loss.
        known: The numbers of those that all replicas have alike already.
        memories: What is kept of each gradient that is compressed, None for others; () where none is.
        scale: By what gradients are multiplied in this step.
    """
    strategy = tf.distribute.get_strategy()
    exchange, share = options_of(strategy).gradients, batch_share.current()
    dtype = sent_as(exchange)
    out = list(grads)
    for number in known & in_parts:
        out[number] = own_part(out[number], variables[number])
    unsent = {number for number, each in enumerate(out) if each is not None} - known
    if unsent and collectives.begins_by_itself(strategy):
        overlap.weights_first([out[n] for n in sorted(unsent - later) if isinstance(out[n], tf.Tensor)])
    for number, variable in enumerate(variables):
        if number in unsent and isinstance(variable, ReplicaShardedVariable):
            out[number] = over_groups(out[number], dtype)
    summed = [
        number
        for number, variable in enumerate(variables)
        if number in unsent
        and not isinstance(variable, ReplicaShardedVariable)
        and not getattr(variable, "overwrite_with_gradient", False)  # No gradient, but such as a scale of float8.
    ]
    if not summed:
        return out
    summed.reverse()  # The last layers' gradients are known first: they are sent while others are computed.

    def by_share(number: int) -> Any:
        gradient = out[number]
        if share is None:
            count = collectives.replica_id_and_count()[1]
            return gradient if number in weighted else mapped(gradient, lambda values: values / count)
        weight = tf.cast(share.weight, gradient.dtype)
        factor = 1 if number in weighted else weight
        # A replica without examples has no mean: 0 / 0.
        return mapped(gradient, lambda values: tf.where(weight > 0, values * factor, tf.zeros_like(values)))

    def overflowing(number: int, total: Any) -> Any:
        return with_overflow(total) if share and number in weighted and computed_in_half(grads[number]) else total

    for number in later:
        out[number] = by_share(number)
    summed = [number for number in summed if number not in later]
    kept = dict(enumerate(memories))
    dense = [
        number
        for number in summed
        if number in in_parts and not isinstance(out[number], tf.IndexedSlices) and kept.get(number) is None
    ]
    if dense:
        parts = scattered([by_share(number) for number in dense], dtype=dtype)
        for number, part in zip(dense, parts, strict=True):
            out[number] = overflowing(number, part)
    summed = [number for number in summed if number not in dense]
    if not summed:
        return out
    compressed = [kept[number] for number in summed] if memories else ()
    totals = over_replicas([by_share(number) for number in summed], exchange, compressed, scale)
    for number, each in zip(summed, totals, strict=True):
        total = overflowing(number, each)
        out[number] = own_part(total, variables[number]) if number in in_parts else total
    return out
