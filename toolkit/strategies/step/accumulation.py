"""Gradient accumulation: each replica adds gradients of several steps, and the sums are exchanged once.

Keras adds gradients of `gradient_accumulation_steps` steps up, and uses their mean. Exchanged in each of these steps
they would cost as many exchanges. So a replica's sums are its own: variables that TensorFlow keeps for each replica and
adds where they are read, saved or compared, and divides where they are set, so that a checkpoint has the whole sum and
goes on with any number of replicas.

What has to be known in every step is still exchanged in every step, each replica adding its part of the total: rows of
tables, which would come as whole tables, and gradients that a loss scale may have made infinite. Where layers or the
optimizer's state are in shards, all are exchanged in every step: norms are needed before the branch in which Keras
updates.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.context import here, known
from toolkit.strategies.exchange import collectives
from toolkit.strategies.exchange.gradients import mapped, over_replicas
from toolkit.strategies.options import options_of
from toolkit.strategies.step.compression import memories_of
from toolkit.strategies.variables.sharded_variable import ReplicaCopies, ReplicaShardedVariable, ReplicaSum
from toolkit.strategies.variables.zero1 import track_slot
from toolkit.support.wrapping import attach

__all__ = ["attach_to", "exchanged_later", "later", "per_replica_state"]


@dataclasses.dataclass(frozen=True)
class _Adding:
    """How an updating optimizer accumulates.

    Attributes:
        waits: For each variable, whether its gradients are still those of this replica.
        total: Whether they are all replicas', of which each has added its part.
        memories: The unsent part of each compressed gradient.
    """

    waits: list[bool]
    total: list[bool]
    memories: list


def attach_to(optimizer: Any) -> None:
    """Makes an optimizer of several replicas accumulate per replica, and exchange the sums when it updates."""
    attach(optimizer, "build", _build)
    attach(optimizer, "add_variable_from_reference", _add_variable)
    attach(optimizer, "_backend_apply_gradients", _apply)
    attach(optimizer, "_clip_gradients", _sum_before_clipping)


def _sum_before_clipping(original: Callable, optimizer: Any, grads: Sequence) -> Sequence:
    return original(optimizer, _sum_over_replicas(grads))


def later(optimizer: Any, grads: Sequence, variables: Sequence) -> frozenset[int]:
    """Returns the numbers of the gradients that need no exchange before Keras updates."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or not optimizer.built:
        return frozenset()
    return frozenset(
        number
        for number, (gradient, variable) in enumerate(zip(grads, variables, strict=True))
        if isinstance(gradient, tf.Tensor)
        and _adds_by_replica(optimizer, variable)
        and not getattr(variable, "overwrite_with_gradient", False)
    )


def exchanged_later(optimizer: Any, variables: Collection) -> contextlib.AbstractContextManager[None]:
    """A context in which an optimizer's gradients of these variables are this replica's."""
    return known(later=frozenset(optimizer._var_key(variable) for variable in variables))


def per_replica_state(optimizer: Any) -> list[Any]:
    """Returns the variables of which a checkpoint needs all replicas' values: what each process has accumulated."""
    strategy = optimizer._distribution_strategy
    sums = [each for each in optimizer.variables if isinstance(each, ReplicaSum)] if optimizer.built else []
    return [ReplicaCopies(each, strategy) for each in sums]


def _build(original: Callable, optimizer: Any, variables: Sequence) -> None:
    strategy = optimizer._distribution_strategy
    by_replica = (
        collectives.begins_by_itself(strategy)
        and options_of(strategy).optimizer_state == "replicated"
        and not any(isinstance(variable, ReplicaShardedVariable) for variable in variables)
    )
    with known(accumulates=by_replica):
        original(optimizer, variables)


def _add_variable(original: Callable, optimizer: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
    name = kwargs.get("name", args[0] if args else None)
    if name != "gradient_accumulator" or not here.accumulates:
        return original(optimizer, reference_variable, *args, **kwargs)

    path = f"{reference_variable.path}_{name}".replace("/", "_")
    return track_slot(
        optimizer, lambda: ReplicaSum(reference_variable.shape, dtype=reference_variable.dtype, name=path)
    )


def _adds_by_replica(optimizer: Any, variable: Any) -> bool:
    if not optimizer.gradient_accumulation_steps:
        return False
    return isinstance(optimizer._accumulated_gradients[optimizer._get_variable_index(variable)], ReplicaSum)


def _apply(original: Callable, optimizer: Any, grads: Sequence, variables: Sequence) -> None:
    count = here.step.count
    own = [count > 1 and _adds_by_replica(optimizer, variable) for variable in variables]
    if not any(own):
        original(optimizer, grads, variables)
        return
    waits = [optimizer._var_key(variable) in here.later for variable in variables]
    total = [by_replica and not wait for by_replica, wait in zip(own, waits, strict=True)]
    adding = _Adding(waits, total, memories_of(optimizer, variables))
    grads = [mapped(g, lambda values: values / count) if known else g for g, known in zip(grads, total, strict=True)]
    with known(accumulates=adding):
        original(optimizer, grads, variables)


def _sum_over_replicas(grads: Sequence) -> list:
    """Returns gradients of all replicas, from what each has accumulated, when Keras updates."""
    out = list(grads)
    adding = here.accumulates
    if adding is None:
        return out
    count = here.step.count
    out = [mapped(g, lambda values: values * count) if known else g for g, known in zip(out, adding.total, strict=True)]
    numbers = [number for number, wait in enumerate(adding.waits) if wait]
    numbers.reverse()  # The last layers' gradients are known first.
    if numbers:
        memories = [adding.memories[number] for number in numbers] if adding.memories else ()
        exchange = here.step.options.gradients
        totals = over_replicas([out[number] for number in numbers], exchange, memories)
        for number, total in zip(numbers, totals, strict=True):
            out[number] = total
    return out
