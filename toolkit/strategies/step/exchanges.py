"""The exchanges of gradients: which of them a gradient takes, and what replicas keep for them.

A new exchange is a class in its own file, and a place in EXCHANGES. Optimizers know none by name. A new way of sending
fewer bytes is a `Compression`, which is given as an option.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.context import this_step
from toolkit.strategies.step import local_steps, overlap
from toolkit.strategies.step.accumulation import Later
from toolkit.strategies.step.compressed import Compressed
from toolkit.strategies.step.gradients import Exchange, Gradients, Sum
from toolkit.strategies.step.moments import own_statistics
from toolkit.strategies.step.sharded_optimizer import ScatteredSum, Shards
from toolkit.strategies.step.sharded_variable import ReplicaCopies
from toolkit.strategies.variables import optimizers_of

# A gradient takes the first that chooses it.
EXCHANGES: tuple[type[Exchange], ...] = (Shards, Later, Compressed, ScatteredSum, Sum)
_KINDS = "_toolkit_exchanges"


def exchange(sent: Gradients) -> list[int]:
    """Makes gradients those of all replicas, each by one exchange; of variables in parts it leaves this replica's part.

    Returns:
        The numbers of those that are exchanged in a later step.

    Raises:
        StrategyError: No exchange takes one of them.
    """
    optimizer = sent.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # Of a LossScaleOptimizer.
    kinds = [kind for kind in EXCHANGES if kind.at_tape] if inner is None else vars(inner)[_KINDS]
    exchanges = [kind(sent) for kind in kinds]
    left = [number for number in reversed(range(len(sent.values))) if _is_sent(sent, number)]
    for each in exchanges:
        each.numbers = each.choose(left)
        left = [number for number in left if number not in each.numbers]
    if left:
        raise StrategyError(
            asked=f"the gradient of {sent.variables[left[0]].path} is to become that of all replicas",
            found=f"none of {', '.join(kind.__name__ for kind in kinds)} takes it, so replicas would drift apart",
            remedy="Report this with the optimizer's and the strategy's settings: it is a mistake of this library's",
        )
    if this_step.exchanges_overlap:
        now = sorted(number for each in exchanges if each.now for number in each.numbers)
        overlap.weights_first([sent.values[number] for number in now if isinstance(sent.values[number], tf.Tensor)])
    for each in exchanges:
        if each.numbers:
            each.run()
    for each in exchanges:
        each.end()
    return [number for each in exchanges if not each.now for number in each.numbers]


def _is_sent(sent: Gradients, number: int) -> bool:
    no_gradient = getattr(sent.variables[number], "overwrite_with_gradient", False)  # A float8 scale.
    return number not in sent.alike and sent.values[number] is not None and not no_gradient


def begin(optimizer: Any) -> None:
    """Gives an optimizer of several replicas what exchanges need of it, before it is built."""
    vars(optimizer)[_KINDS] = [kind for kind in EXCHANGES if kind.begin(optimizer)]


@contextlib.contextmanager
def building(optimizer: Any, variables: Sequence) -> Iterator[None]:
    """A context in which Keras builds what all optimizers have, for these variables."""
    with contextlib.ExitStack() as stack:
        for kind in vars(optimizer).get(_KINDS, ()):
            stack.enter_context(kind.building(optimizer, variables))
        yield


def reduced(gradients: Sequence, variables: Sequence, weighted: frozenset[int] = frozenset()) -> list:
    """Returns gradients of all replicas, as of a tape.

    Args:
        gradients: A tensor, `tf.IndexedSlices` or None for each variable.
        variables: A `keras.Variable` for each gradient.
        weighted: As of `Gradients`.
    """
    sent = Gradients(list(gradients), variables, weighted=weighted)
    exchange(sent)
    return sent.values


def per_replica_state(model: keras.Model) -> dict[str, Any]:
    """Returns the variables of which a checkpoint needs all replicas' values, by names that don't change."""
    found = {}
    for which, optimizer in enumerate(optimizers_of(model)):
        for exchange_kind in EXCHANGES:
            kept = exchange_kind.state(optimizer)
            found.update({f"{which}/{exchange_kind.name}/{name}": variable for name, variable in kept.items()})
    copies = [ReplicaCopies(each, model.distribute_strategy) for each in own_statistics(model)]
    for kind, each_kept in (("local", local_steps.per_replica_state(model)), ("statistics", copies)):
        found.update({f"{kind}/{number:04d}": variable for number, variable in enumerate(each_kept)})
    return found


def own_variables(model: keras.Model) -> list[Any]:
    """Returns variables of the model and its optimizers of which each replica may have its own value."""
    slots = [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]
    return [*own_statistics(model), *(slots if local_steps.per_replica_state(model) else [])]


def resume(model: keras.Model) -> None:
    """Makes the exchanges of a model go on from its current weights, as from a checkpoint."""
    local_steps.resume(model)
