"""The exchanges of gradients: which of them a gradient takes, and what replicas keep for them.

A new exchange is a class in its own file, and a place in EXCHANGES. Checkpoints know none of them by name.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.context import this_step
from toolkit.strategies.step import local_steps, overlap
from toolkit.strategies.step.accumulation import Later
from toolkit.strategies.step.gradients import Exchange, Gradients, Sum
from toolkit.strategies.step.powersgd import Compressed
from toolkit.strategies.step.sharded_optimizer import ScatteredSum, Shards, is_in_parts, own_part
from toolkit.strategies.step.sharded_variable import ReplicaShardedVariable
from toolkit.strategies.variables import optimizers_of

# A gradient takes the first that takes it. Checkpoints have their state in the opposite order.
EXCHANGES: tuple[type[Exchange], ...] = (Shards, Later, Compressed, ScatteredSum, Sum)


def exchange(sent: Gradients) -> list[int]:
    """Makes gradients those of all replicas, each by one exchange; of variables in parts it leaves this replica's part.

    Returns:
        The numbers of those that are exchanged in a later step.
    """
    exchanges = [kind(sent) for kind in _wanted(sent)]
    for number in reversed(range(len(sent.values))):  # The last layers' are known first.
        gradient, variable = sent.values[number], sent.variables[number]
        no_gradient = gradient is None or getattr(variable, "overwrite_with_gradient", False)  # A float8 scale.
        if number not in sent.alike and not no_gradient:
            taker = next((each for each in exchanges[:-1] if each.takes(number)), exchanges[-1])
            taker.numbers.append(number)
    if this_step.exchanges_overlap:
        now = sorted(number for each in exchanges if each.now for number in each.numbers)
        overlap.weights_first([sent.values[number] for number in now if isinstance(sent.values[number], tf.Tensor)])
    for each in exchanges:
        if each.numbers:
            each.run()
    for scattered in exchanges:
        if isinstance(scattered, ScatteredSum):
            _cut_parts(sent, scattered.numbers)
    return [number for each in exchanges if not each.now for number in each.numbers]


def _wanted(sent: Gradients) -> list[type[Exchange]]:
    """Returns the exchanges that may take some of these gradients."""
    optimizer, options = sent.optimizer, this_step.options
    wanted = {
        Shards: any(isinstance(variable, ReplicaShardedVariable) for variable in sent.variables),
        Later: bool(getattr(optimizer, "gradient_accumulation_steps", None)),
        Compressed: optimizer is not None and options.gradients.compression != "none",
        ScatteredSum: optimizer is not None and options.optimizer_state == "sharded",
    }
    return [kind for kind in EXCHANGES if wanted.get(kind, True)]


def _cut_parts(sent: Gradients, cut: list[int]) -> None:
    """Leaves this replica's part of whole gradients of variables that are updated in parts."""
    for number, variable in enumerate(sent.variables):
        if number not in cut and sent.values[number] is not None and is_in_parts(sent.optimizer, variable):
            sent.values[number] = own_part(sent.values[number], variable)


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
        kept = [variable for kind in reversed(EXCHANGES) for variable in kind.state(optimizer)]
        found.update({f"{which}/{number:04d}": variable for number, variable in enumerate(kept)})
    of_local_steps = local_steps.per_replica_state(model)
    return found | {f"local/{number:04d}": variable for number, variable in enumerate(of_local_steps)}


def slots_differ(model: keras.Model) -> bool:
    """Returns whether each replica has its own optimizer's variables, all of which are in `per_replica_state`."""
    return bool(local_steps.per_replica_state(model))


def resume(model: keras.Model) -> None:
    """Makes the exchanges of a model go on from its current weights, as from a checkpoint."""
    local_steps.resume(model)
