"""What an optimizer needs for sharded variables: norms, whole values, and slots in shards.

Gradients have been exchanged when it comes to this (see `optimizer`). Keras has no public hook for it: the methods of
`keras.optimizers.Optimizer` that an optimizer has of its own here stand in `attach_to`.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from toolkit.strategies.context import here, known
from toolkit.strategies.exchange import collectives
from toolkit.strategies.exchange.gradients import mapped, values_of
from toolkit.strategies.exchange.mesh import Among
from toolkit.strategies.variables.sharded_variable import ReplicaShardedVariable
from toolkit.strategies.variables.stand_in import StandIn
from toolkit.strategies.variables.zero1 import WHOLE, Parts, is_in_parts, make_part_of_slot, make_slot, shards_slots
from toolkit.support.wrapping import attach

__all__ = ["attach_to", "finite_alike"]


def attach_to(optimizer: Any) -> None:
    """Makes an optimizer of several replicas keep slots for sharded variables, and train them."""
    attach(optimizer, "add_variable_from_reference", _slot)
    attach(optimizer, "_backend_apply_gradients", _apply_shards)
    attach(optimizer, "_clip_gradients", _clip)
    attach(optimizer, "_update_model_variables_moving_average", _average)


def _apply_shards(original: Callable, optimizer: Any, grads: Sequence, variables: Sequence) -> None:
    """Gathers shards for an optimizer that needs whole variables, and the norms by which others clip.

    Of variables whose slots are sharded over all replicas, it is given this replica's parts, which come together then.
    """
    sharded = [isinstance(variable, ReplicaShardedVariable) for variable in variables]
    in_parts = [is_in_parts(optimizer, variable) for variable in variables]
    if not any(sharded + in_parts) or here.step.count == 1:
        original(optimizer, grads, variables)
        return
    if isinstance(optimizer, WHOLE):
        # Each replica has all slots of what is gathered.
        grads = [
            v.gather(tf.convert_to_tensor(g)) if is_shard else g
            for g, v, is_shard in zip(grads, variables, sharded, strict=True)
        ]
        variables = [_Whole(v) if is_shard else v for v, is_shard in zip(variables, sharded, strict=True)]
        original(optimizer, grads, variables)
        return
    clips = optimizer.clipnorm or optimizer.global_clipnorm
    squares = _squares(_to_be_clipped(optimizer, grads, variables), sharded, in_parts) if clips else None
    in_branch = bool(optimizer.gradient_accumulation_steps)
    parts = Parts(optimizer, list(itertools.compress(variables, in_parts)), in_branch=in_branch)
    part = iter(parts.each)
    with known(squares=squares, parts=parts):
        original(optimizer, grads, [next(part) if flag else v for v, flag in zip(variables, in_parts, strict=True)])
        parts.bring_together()


def _average(original: Callable, optimizer: Any, *args: Any) -> None:
    """Makes averages those of whole weights."""
    if here.parts is not None:
        here.parts.bring_together()
    original(optimizer, *args)


def _to_be_clipped(optimizer: Any, grads: Sequence, variables: Sequence) -> Sequence:
    """Returns the gradients that Keras will clip. With accumulation, it clips in a branch, without exchanges."""
    steps = optimizer.gradient_accumulation_steps
    if not steps:
        return grads
    sums = [optimizer._accumulated_gradients[optimizer._get_variable_index(variable)] for variable in variables]
    return [(gradient + total) / steps for gradient, total in zip(grads, sums, strict=True)]


def _squares(grads: Sequence, sharded: Sequence[bool], in_parts: Sequence[bool]) -> list:
    """Returns each whole gradient's sum of squares: of shards the group's, of parts all replicas'."""
    squares = [_square(gradient) for gradient in grads]
    return _added(_added(squares, sharded, Among.GROUP), in_parts, Among.ALL)


def _added(squares: Sequence, chosen: Sequence[bool], among: Among) -> list:
    """Returns sums, the chosen ones over several replicas, with one exchange for all."""
    if not any(chosen):
        return list(squares)
    totals = collectives.all_reduce(tf.stack(list(itertools.compress(squares, chosen))), among=among)
    whole = iter(tf.unstack(totals))
    return [next(whole) if summed else square for square, summed in zip(squares, chosen, strict=True)]


def _square(gradient: Any) -> tf.Tensor:
    values = values_of(gradient)
    return tf.reduce_sum(tf.square(tf.cast(values, tf.float32 if values.dtype.size < 4 else values.dtype)))


def _clip(original: Callable, optimizer: Any, grads: Sequence) -> Sequence:
    """Clips by the norms of whole variables if some are sharded, in Keras's ways."""
    squares = here.squares
    if squares is None:
        return original(optimizer, grads)
    most, norms = optimizer.clipnorm, [tf.sqrt(square) for square in squares]
    if not most:
        most, norms = optimizer.global_clipnorm, [tf.sqrt(tf.add_n(squares))] * len(squares)
        grads = [tf.convert_to_tensor(gradient) for gradient in grads]  # It adds rows that are named twice.
    scales = [most / tf.maximum(norm, most) for norm in norms]
    return [
        mapped(gradient, lambda values, scale=scale: values * tf.cast(scale, values.dtype))
        for gradient, scale in zip(grads, scales, strict=True)
    ]


class _Whole(StandIn):
    """A sharded variable for an optimizer that needs all of it."""

    def __init__(self, variable: ReplicaShardedVariable) -> None:
        self.variable = variable
        self.path, self.name = variable.path, variable.name
        self.dtype = variable.value.dtype
        self.shape = tf.TensorShape(variable.shape)
        self._unique_id = variable._value._unique_id  # By this name Keras finds its slots.
        self._tensor = variable.gather(tf.convert_to_tensor(variable.value))

    def read_value(self) -> tf.Tensor:
        return self._tensor

    def assign(self, value: tf.Tensor) -> None:
        self._tensor = value
        self.variable.value.assign(self.variable.shard_of(value))


def _slot(original: Callable, optimizer: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
    """Shards the slots of a sharded variable, such as its momentum, in the same way, and other slots if asked to."""
    return _make_slot(
        lambda: original(optimizer, reference_variable, *args, **kwargs), optimizer, reference_variable, *args, **kwargs
    )


def _make_slot(
    original: Callable, optimizer: Any, reference: Any, name: str | None = None, initializer: Any = "zeros"
) -> Any:
    if not isinstance(reference, ReplicaShardedVariable):
        sharded = shards_slots(optimizer, reference, name)
        return make_part_of_slot(optimizer, reference, name, initializer) if sharded else original()
    if isinstance(optimizer, WHOLE) and name != "average":
        return original()
    # An average replaces weights, which are padded with zeros.
    return make_slot(optimizer, reference, name, initializer, axis=reference.axis, repeats=name != "average")


def finite_alike(grads: list, variables: Sequence, in_parts: frozenset) -> list:
    """Makes all replicas come to the same answer if a shard has overflowed: each one's gradients show it."""
    shards = [
        gradient
        for number, (gradient, variable) in enumerate(zip(grads, variables, strict=True))
        if gradient is not None and (number in in_parts or isinstance(variable, ReplicaShardedVariable))
    ]
    if not shards:
        return grads
    trace = tf.add_n([tf.reduce_sum(tf.cast(values_of(gradient), tf.float32) * 0.0) for gradient in shards])
    first = next(number for number, gradient in enumerate(grads) if gradient is not None)
    poison = collectives.all_reduce(trace)  # 0, or not a number.
    grads[first] = mapped(grads[first], lambda values: values + tf.cast(poison, values.dtype))
    return grads
