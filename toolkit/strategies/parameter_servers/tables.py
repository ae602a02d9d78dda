"""Large tables of which a step needs a few rows: it pulls the rows that it looks up, and pushes their gradients.

TensorFlow reads a variable of a ps whole, unless the lookup itself runs there. Keras asks for a table's value before it
looks anything up, so `take`, through which all its lookups pass, is asked first whether the table is one of these.
"""

from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.parameter_servers import internals
from toolkit.strategies.parameter_servers.local_values import LocalValue
from toolkit.strategies.parameter_servers.placement import ServerShardedVariable, shards_of
from toolkit.strategies.step.sharded_variable import StandIn

__all__ = [
    "LocalTable",
    "Rows",
    "RowsOfVariable",
    "updates_by_rows",
    "with_each_row_once",
]

_OPTIMIZERS = ("SGD", "RMSprop", "Adam", "AdamW", "Nadam", "Adamax", "Adadelta", "Adagrad", "Ftrl", "Lion")
# Optimizers whose update of a row depends on no other row.
_BY_ELEMENT = {getattr(keras.optimizers, name).update_step for name in _OPTIMIZERS}


class LocalTable(LocalValue):
    """A table on the ps, in a step: a lookup gets only its rows, and a read gets the whole table.

    Args:
        value: The `tf.Variable` or `ServerShardedVariable`.
        trainable: Whether gradient tapes watch it.
        after: By device, operations that come before any reading there.
    """

    def __init__(self, value: Any, *, trainable: bool, after: dict[str, list]) -> None:
        # It replaces the table for tapes, so gradients of rows are gradients of it.
        super().__init__(tf.zeros([], value.dtype), trainable=trainable)
        self.shape = tf.TensorShape(value.shape)
        self._rows = Rows(value, after)

    def updated(self, served: Any) -> "LocalTable":
        """Returns the table after an update in the same step."""
        table = LocalTable(served, trainable=self.trainable, after={})
        table.handle = self.handle
        return table

    @property
    def sources(self) -> list[tf.Tensor]:
        return [shard.handle for shard in shards_of(self._rows.value)]

    def current(self) -> tf.Tensor:
        return _connected(self.handle, self._rows.whole())

    def lookup(self, indices: tf.Tensor) -> tf.Tensor:
        """Returns rows of the table: of indices [...], negative ones from the end, [..., columns]."""
        if self.trainable:
            internals.accessed(self)
        return self._rows.lookup(indices, self.handle)


class Rows:
    """The rows of a table on the ps, for lookups from elsewhere.

    Args:
        value: The `tf.Variable` or `ServerShardedVariable`.
        after: By device, operations that come before any reading there.
    """

    def __init__(self, value: Any, after: dict[str, list]) -> None:
        self.value = value
        self._after = after

    def whole(self) -> tf.Tensor:
        """Returns all rows."""
        parts = []
        for shard in shards_of(self.value):
            with tf.device(shard.device), tf.control_dependencies(self._after.get(shard.device, [])):
                parts.append(shard.read_value())
        return tf.concat(parts, 0) if len(parts) > 1 else parts[0]

    def lookup(self, indices: tf.Tensor, handle: tf.Tensor) -> tf.Tensor:
        """Returns some rows: of indices [...], [..., columns]. Each row is sent once; gradients list each use.

        Args:
            indices: Which rows, negative ones from the end.
            handle: What gradient tapes take for the table.
        """
        columns = self.value.shape[1:]
        flat = tf.reshape(indices, [-1])
        flat = tf.where(flat < 0, flat + tf.cast(self.value.shape[0], flat.dtype), flat)
        unique, places = tf.unique(flat)
        rows = _connected(handle, tf.gather(self._pulled(unique), places), indices=flat, shape=self.value.shape)
        found = tf.reshape(rows, tf.concat([tf.shape(indices), columns], 0))
        found.set_shape([*indices.shape, *columns])
        return found

    def _pulled(self, indices: tf.Tensor) -> tf.Tensor:
        if not isinstance(self.value, ServerShardedVariable):
            return self._pulled_of(self.value, indices)
        offsets = self.value.offsets
        holders = tf.searchsorted(tf.constant(offsets[1:-1], indices.dtype), indices, side="right")
        count = len(self.value.shards)
        order = tf.dynamic_partition(tf.range(tf.size(indices)), holders, count)
        theirs = tf.dynamic_partition(indices, holders, count)
        parts = [
            self._pulled_of(shard, mine - offset)
            for shard, mine, offset in zip(self.value.shards, theirs, offsets[:-1], strict=True)
        ]
        return tf.dynamic_stitch(order, parts)

    def _pulled_of(self, shard: Any, indices: tf.Tensor) -> tf.Tensor:
        with tf.device(shard.device), tf.control_dependencies(self._after.get(shard.device, [])):
            return _gathered(shard, tf.identity(indices))


def _gathered(variable: Any, indices: tf.Tensor) -> tf.Tensor:
    rows = tf.raw_ops.ResourceGather(resource=variable.handle, indices=indices, dtype=variable.dtype)
    return tf.ensure_shape(rows, [None, *variable.shape[1:]])


def _connected(stand_in: tf.Tensor, value: tf.Tensor, *, indices: Any = None, shape: Any = None) -> tf.Tensor:
    """Returns a value whose gradient is the stand-in's: of some rows of a table, if `indices` names them."""

    def gradient(upstream: Any) -> Any:
        upstream = tf.convert_to_tensor(upstream)
        return upstream if indices is None else tf.IndexedSlices(upstream, indices, tf.constant(list(shape), tf.int64))

    return internals.computed_from(stand_in, value, gradient)


class RowsOfVariable(StandIn):
    """Replaces a variable while an optimizer updates some of its rows.

    Args:
        variable: A `tf.Variable`.
        indices: Which rows. One that is named twice is seen twice, and what is added to both is added.
    """

    def __init__(self, variable: Any, indices: tf.Tensor) -> None:
        self._variable = variable
        self._indices = indices
        self.dtype = variable.dtype
        self.shape = tf.TensorShape([None, *variable.shape[1:]])
        # By these attributes, Keras's optimizers find a variable's slots.
        self._unique_id = variable._unique_id
        if hasattr(variable, "_distributed_container"):
            self._distributed_container = variable._distributed_container

    def read_value(self) -> tf.Tensor:
        """Returns the rows."""
        return _gathered(self._variable, self._indices)

    def _slices(self, value: Any) -> tf.IndexedSlices:
        return tf.IndexedSlices(tf.convert_to_tensor(value, self.dtype), self._indices)

    def assign(self, value: Any) -> Any:
        """Sets the rows."""
        return self._variable.scatter_update(self._slices(value))

    def assign_add(self, value: Any) -> Any:
        """Adds to the rows."""
        return self._variable.scatter_add(self._slices(value))

    def assign_sub(self, value: Any) -> Any:
        """Subtracts from the rows."""
        return self._variable.scatter_sub(self._slices(value))


def updates_by_rows(optimizer: Any, table: Any, *, min_lazy_bytes: int) -> str:
    """Returns how an optimizer updates only the rows of a table that a step has looked up; "" if it can't.

    "exact": SGD without momentum and Adagrad change no other row anyway. Others go on moving each row after the step
    that has looked it up; for a large table they are "lazy": a row moves when it is looked up.

    Args:
        optimizer: A Keras optimizer.
        table: The variable.
        min_lazy_bytes: The size of a table from which on optimizers are lazy.
    """
    if type(optimizer).update_step not in _BY_ELEMENT:
        return ""
    exact = isinstance(optimizer, keras.optimizers.Adagrad) or (
        isinstance(optimizer, keras.optimizers.SGD) and not optimizer.momentum
    )
    if exact:
        return "exact"
    return "lazy" if table.shape.num_elements() * table.dtype.size >= min_lazy_bytes else ""


def with_each_row_once(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the gradient of some rows, with all gradients of a row added."""
    unique, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(unique))
    return tf.IndexedSlices(values, unique, gradient.dense_shape)
