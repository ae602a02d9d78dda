"""Which of an optimizer's gradients must still be exchanged if a tape has exchanged some.

In the user's own step a tape has exchanged them already, and what comes to `optimizer.apply` was computed from
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
from toolkit.strategies.context import here
from toolkit.strategies.step.batch_share import Known, known_here
from toolkit.support.graphs import Differs, decided_by, derives_from, differs

__all__ = ["Routes", "check_branch", "check_rate", "routes_of"]


@dataclasses.dataclass(frozen=True)
class Routes:
    """The numbers of gradients, by what must be done with them; all others are summed.

    Attributes:
        known: Those that all replicas have alike.
        drawn: Those that differ by random numbers only.
        weighted: Those that are parts of a sum already: of a scaled loss, or in the user's own loop.
    """

    known: frozenset[int] = frozenset()
    drawn: frozenset[int] = frozenset()
    weighted: frozenset[int] = frozenset()


def routes_of(found: Known, grads: Sequence, variables: Sequence, *, weighted: frozenset[int]) -> Routes:
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
        weighted=weighted - derived,
    )


def _by_replica(tensors: Sequence) -> bool:
    """Whether some tensors of a step of `fit` may differ between replicas."""
    share = here.share
    known = share.known if share is not None else known_here()
    return (
        differs([each for each in tensors if tf.is_tensor(each)], known.exchanged, known.drawn) is not Differs.NOWHERE
    )


def _check_shards(shards: dict, parts: dict[int, list], variables: Sequence) -> None:
    """Refuses, for example, a norm over gradients of which each replica has a part."""
    for number, part in parts.items():
        mine = (here.step.replica, id(variables[number]))
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


def check_branch(optimizer: Any, grads: list, variables: Sequence, routes: Routes, in_parts: frozenset) -> None:
    """Refuses exchanges in a branch or a loop, which other replicas may not reach."""
    unknown = [variables[n].path for n, each in enumerate(grads) if each is not None and n not in routes.known]
    found = f"the gradient of {unknown[0]} isn't seen to be the same on every replica" if unknown else ""
    if _by_replica(decided_by()):
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
