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

from toolkit.strategies.context import this_step
from toolkit.strategies.mesh import any_in_shards
from toolkit.strategies.options import options_of
from toolkit.strategies.step import collectives
from toolkit.strategies.step.compressed import memories_of, totals
from toolkit.strategies.step.gradients import Exchange, mapped
from toolkit.strategies.step.sharded_optimizer import track_slot
from toolkit.strategies.step.sharded_variable import ReplicaCopies, ReplicaSum
from toolkit.strategies.upstream.wrapping import attach


@dataclasses.dataclass(frozen=True)
class _Adding:
    """How an updating optimizer accumulates.

    Attributes:
        waits: For each variable, whether its gradients are still those of this replica.
        total: Whether they are all replicas', of which each has added its part.
        memories: What each replica keeps for compressed gradients.
    """

    waits: list[bool]
    total: list[bool]
    memories: list


def _sum_before_clipping(original: Callable, optimizer: Any, grads: Sequence) -> Sequence:
    return original(optimizer, _sum_over_replicas(grads))


class Later(Exchange):
    """A replica adds its gradients of several steps, and the sums are exchanged when Keras updates."""

    name = "sums"
    now = False

    @staticmethod
    def begin(optimizer: Any) -> bool:
        """Makes an optimizer that accumulates do so by replica."""
        if not optimizer.gradient_accumulation_steps:
            return False
        attach(
            optimizer,
            add_variable_from_reference=_add_variable,
            _backend_apply_gradients=_apply,
            _clip_gradients=_sum_before_clipping,
        )
        return True

    @staticmethod
    def building(optimizer: Any, variables: Sequence) -> contextlib.AbstractContextManager:
        """Gives each replica its own sums where exchanges between processes cost time, and all variables are whole."""
        strategy = optimizer._distribution_strategy
        by_replica = (
            collectives.overlaps_exchanges(strategy)
            and options_of(strategy).optimizer_state == "replicated"
            and not any_in_shards(variables)
        )
        return this_step.having(accumulates=by_replica)

    def choose(self, numbers: Sequence[int]) -> list[int]:
        """Those that need no exchange before Keras updates."""
        return [number for number in numbers if self._takes(number)]

    def _takes(self, number: int) -> bool:
        optimizer, variable = self.sent.optimizer, self.sent.variables[number]
        return (
            not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
            and isinstance(self.sent.values[number], tf.Tensor)
            and _adds_by_replica(optimizer, variable)
        )

    def run(self) -> None:
        """Weights them by this replica's share."""
        for number, each in zip(self.numbers, self.sent.of_shares(self.numbers), strict=True):
            self.sent.values[number] = each

    @staticmethod
    def state(optimizer: Any) -> dict[str, Any]:
        """What each process has accumulated."""
        strategy = optimizer._distribution_strategy
        sums = [each for each in optimizer.variables if isinstance(each, ReplicaSum)] if optimizer.built else []
        return {f"{number:04d}": ReplicaCopies(each, strategy) for number, each in enumerate(sums)}


def exchanged_later(optimizer: Any, variables: Collection) -> contextlib.AbstractContextManager[None]:
    """A context in which an optimizer's gradients of these variables are this replica's."""
    return this_step.having(later=frozenset(optimizer._var_key(variable) for variable in variables))


def _add_variable(original: Callable, optimizer: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
    name = kwargs.get("name", args[0] if args else None)
    if name != "gradient_accumulator" or not this_step.accumulates:
        return original(optimizer, reference_variable, *args, **kwargs)

    path = f"{reference_variable.path}_{name}".replace("/", "_")
    return track_slot(
        optimizer, lambda: ReplicaSum(reference_variable.shape, dtype=reference_variable.dtype, name=path)
    )


def _adds_by_replica(optimizer: Any, variable: Any) -> bool:
    if not optimizer.gradient_accumulation_steps or not optimizer.built:
        return False
    return isinstance(optimizer._accumulated_gradients[optimizer._get_variable_index(variable)], ReplicaSum)


def _apply(original: Callable, optimizer: Any, grads: Sequence, variables: Sequence) -> None:
    count = this_step.count
    own = [count > 1 and _adds_by_replica(optimizer, variable) for variable in variables]
    if not any(own):
        original(optimizer, grads, variables)
        return
    waits = [optimizer._var_key(variable) in this_step.later for variable in variables]
    total = [by_replica and not wait for by_replica, wait in zip(own, waits, strict=True)]
    adding = _Adding(waits, total, memories_of(optimizer, variables))
    grads = [mapped(g, lambda values: values / count) if known else g for g, known in zip(grads, total, strict=True)]
    with this_step.having(accumulates=adding):
        original(optimizer, grads, variables)


def _sum_over_replicas(grads: Sequence) -> list:
    """Returns gradients of all replicas, from what each has accumulated, when Keras updates."""
    out = list(grads)
    adding = this_step.accumulates
    if adding is None:
        return out
    count = this_step.count
    out = [mapped(g, lambda values: values * count) if known else g for g, known in zip(out, adding.total, strict=True)]
    numbers = [number for number, wait in enumerate(adding.waits) if wait]
    numbers.reverse()  # The last layers' gradients are known first.
    if numbers:
        memories = [adding.memories[number] for number in numbers] if adding.memories else ()
        for number, total in zip(numbers, totals([out[number] for number in numbers], memories), strict=True):
            out[number] = total
    return out
