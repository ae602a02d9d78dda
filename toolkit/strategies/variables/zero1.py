"""Optimizer state in shards: for a replicated layer, each replica keeps the slots of its part.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054, stage 1:
gradients are summed by a reduce-scatter, so that each replica has the sum of its part; it updates that part of the
weights with its part of the slots, and an all-gather brings the weights together: as many bytes as an all-reduce.

A part is a stretch of the flattened variable, which optimizers that look at elements don't notice. Those that look at
layers as a whole are refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.context import here
from toolkit.strategies.exchange import collectives
from toolkit.strategies.exchange.mesh import Among, replica_count
from toolkit.strategies.options import options_of
from toolkit.strategies.variables.sharded_variable import ReplicaShardedVariable
from toolkit.strategies.variables.stand_in import StandIn
from toolkit.support.graphs import outside

__all__ = [
    "WHOLE",
    "Parts",
    "in_parts_among",
    "is_in_parts",
    "make_in_scope",
    "make_part_of_slot",
    "make_slot",
    "own_part",
    "scattered",
    "shards_slots",
    "track_slot",
]

# They use a layer's whole variable.
WHOLE = (keras.optimizers.Adafactor, keras.optimizers.Lamb, keras.optimizers.Muon)


def shards_slots(optimizer: Any, variable: Any, name: str | None) -> bool:
    """Returns whether an optimizer's slot of this name is sharded for a variable.

    Raises:
        StrategyError: It is asked for, and the optimizer looks at variables as a whole.
    """
    strategy = optimizer._distribution_strategy
    if options_of(strategy).optimizer_state == "replicated" or replica_count(strategy) == 1:
        return False
    if isinstance(optimizer, WHOLE):
        raise StrategyError(
            asked=f"optimizer_state='sharded' with {type(optimizer).__name__}",
            found="its update of a weight depends on the whole layer",
            remedy="Use one that updates each element by itself, such as AdamW, or leave optimizer_state out",
        )
    # Averages may become everyone's weights at the next step.
    return isinstance(variable, keras.Variable) and name != "average"


def make_part_of_slot(
    optimizer: Any, reference: keras.Variable, name: str | None, initializer: Any
) -> ReplicaShardedVariable:
    """Creates a sharded slot for a replicated variable, and records that its update is sharded."""
    optimizer.__dict__.setdefault("_toolkit_in_parts", set()).add(optimizer._var_key(reference))
    return make_slot(optimizer, reference, name, initializer, axis=None, among=Among.ALL, repeats=True)


def make_slot(
    optimizer: Any, reference: keras.Variable, name: str | None, initializer: Any, **how: Any
) -> ReplicaShardedVariable:
    """Creates a slot of which replicas have shards.

    Args:
        optimizer: A Keras optimizer.
        reference: The variable that it is for.
        name: The slot's.
        initializer: As for `add_variable_from_reference`.
        how: `axis`, `among` and `repeats` of the `ReplicaShardedVariable`.
    """

    def make() -> ReplicaShardedVariable:
        return ReplicaShardedVariable(
            keras.initializers.get(initializer),
            tuple(reference.shape),
            dtype=reference.dtype,
            trainable=False,
            name=f"{reference.path}_{name}".replace("/", "_"),
            **how,
        )

    return track_slot(optimizer, make)


def track_slot(optimizer: Any, make: Callable[[], Any]) -> Any:
    """Returns a slot that a function creates, as one of the optimizer's variables."""
    slot = make_in_scope(optimizer, make)
    optimizer._track_variable(slot)
    return slot


def make_in_scope(optimizer: Any, make: Callable[[], Any]) -> Any:
    """Returns what a function creates in the scope of an optimizer's strategy, and under its name."""

    def inside() -> Any:
        with optimizer._distribution_strategy.scope(), keras.name_scope(optimizer.name):
            return make()

    # The user's own loop may be the first to use an optimizer, in a replica of a step.
    return inside() if tf.distribute.in_cross_replica_context() else outside(inside)


def is_in_parts(optimizer: Any, variable: Any) -> bool:
    """Returns whether each replica updates only its part of a variable."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # Of a LossScaleOptimizer.
    in_parts = optimizer.__dict__.get("_toolkit_in_parts")
    return bool(in_parts) and optimizer._var_key(variable) in in_parts


def in_parts_among(optimizer: Any, variables: Sequence[Any]) -> frozenset[int]:
    """Returns the numbers of the variables whose updates are sharded. Builds an optimizer that isn't built yet."""
    if not optimizer.built and options_of(optimizer._distribution_strategy).optimizer_state == "sharded":
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))
    return frozenset(number for number, variable in enumerate(variables) if is_in_parts(optimizer, variable))


def scattered(gradients: Sequence[tf.Tensor], *, dtype: tf.DType | None) -> list[tf.Tensor]:
    """Returns this replica's flat part of each gradient's sum over all replicas, with one exchange for each dtype."""
    count = here.step.count
    rows = [_rows(gradient, count) for gradient in gradients]
    out: dict[int, tf.Tensor] = {}
    for numbers in _by_dtype(rows):
        joined = tf.concat([rows[number] for number in numbers], 1)
        part = collectives.reduce_scatter(joined, among=Among.ALL, dtype=dtype)
        parts = tf.split(part, [rows[number].shape[1] for number in numbers])
        out.update(zip(numbers, parts, strict=True))
    return [out[number] for number in range(len(rows))]


class Parts:
    """This replica's parts of variables, while an optimizer updates them.

    Args:
        optimizer: A Keras optimizer.
        variables: Those that are cut.
        in_branch: Whether updates are made in a branch, out of which no tensor comes.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], *, in_branch: bool) -> None:
        self.each = [_Part(optimizer, variable, in_branch=in_branch) for variable in variables]

    def bring_together(self) -> None:
        """Sets every replica's copies from all replicas' parts. Later calls do nothing."""
        each, self.each = self.each, []
        values = [tf.convert_to_tensor(part) for part in each]
        for numbers in _by_dtype(values):
            joined = tf.concat([values[number] for number in numbers], 0)
            everybodys = collectives.all_gather(joined, among=Among.ALL)
            sizes = [values[number].shape[0] for number in numbers]
            for number, whole in zip(numbers, tf.split(everybodys, sizes, axis=1), strict=True):
                each[number].set_whole(tf.reshape(whole, [-1]))


class _Part(StandIn):
    """This replica's flat part of a variable, for an optimizer."""

    def __init__(self, optimizer: Any, variable: Any, *, in_branch: bool) -> None:
        strategy = tf.distribute.get_strategy()
        copies = strategy.experimental_local_results(variable.value)
        place, count = here.step.place, here.step.count
        self._copy = copies[place % len(copies)]
        self._whole = variable.shape
        self._size = _size(variable, count)
        self._first = place * self._size
        self._tensor = None if in_branch else self._read()
        self._unique_id = optimizer._var_key(variable)  # By this name Keras finds its slots.
        self.path, self.name = variable.path, variable.name
        self.dtype = self._copy.dtype
        self.shape = tf.TensorShape([self._size])

    def read_value(self) -> tf.Tensor:
        """Returns the current part."""
        return self._read() if self._tensor is None else self._tensor

    def _read(self) -> tf.Tensor:
        flat = tf.reshape(self._copy.read_value(), [-1])
        missing = max(0, self._first + self._size - flat.shape[0])
        part = tf.pad(flat[self._first : self._first + self._size], [[0, missing]])[: self._size]
        part.set_shape([self._size])
        return part

    def assign(self, value: Any) -> None:
        """Sets the part; in a branch, in the replica's copy."""
        value = tf.convert_to_tensor(value)
        if self._tensor is not None:
            self._tensor = value
            return
        flat = tf.reshape(self._copy.read_value(), [-1])
        joined = tf.concat([flat[: self._first], value, flat[self._first + self._size :]], 0)
        self.set_whole(joined)

    scatter_add, scatter_sub = StandIn.assign_add, StandIn.assign_sub  # Of some elements.

    def set_whole(self, flat: tf.Tensor) -> None:
        """Sets the replica's copy to a flat whole, padded or not."""
        size = self._copy.shape.num_elements()
        self._copy.assign(tf.reshape(flat[:size], self._whole))


def own_part(gradient: Any, variable: Any) -> Any:
    """Returns this replica's flat part of a tensor; of some rows, element by element, [k] of that part."""
    place, count = here.step.place, here.step.count
    size = _size(variable, count)
    if not isinstance(gradient, tf.IndexedSlices):
        return _rows(gradient, count)[place]
    columns = _elements(variable) // variable.shape[0]
    first = tf.cast(gradient.indices, tf.int64)[:, None] * columns + tf.range(columns, dtype=tf.int64)
    own = tf.reshape(first, [-1]) - place * size
    kept = (own >= 0) & (own < size)
    values = tf.boolean_mask(tf.reshape(gradient.values, [-1]), kept)
    return tf.IndexedSlices(values, tf.boolean_mask(own, kept), tf.constant([size], tf.int64))


def _elements(variable: Any) -> int:
    return tf.TensorShape(variable.shape).num_elements()


def _size(variable: Any, count: int) -> int:
    return -(-_elements(variable) // count)


def _rows(tensor: tf.Tensor, count: int) -> tf.Tensor:
    """Returns a tensor flat and padded, with a row for each replica."""
    flat = tf.reshape(tensor, [-1])
    size = -(-flat.shape[0] // count)
    return tf.reshape(tf.pad(flat, [[0, size * count - flat.shape[0]]]), [count, size])


def _by_dtype(tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    found: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(number)
    return list(found.values())
