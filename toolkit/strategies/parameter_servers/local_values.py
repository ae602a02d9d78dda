"""What replaces a variable in a step: its value on the worker, which the step's assignments change, or a table's rows.

A value is a tensor, and an assignment makes another. That can't be done in a branch, a loop or a function within the
step: what is made there is of no use outside. A variable that is assigned there has a cell, a variable of the worker's
own that lives as long as the step; functions are traced again for it (see `functions.trace`).

Of a large table a step needs a few rows: it pulls the rows that it looks up, and pushes their gradients. TensorFlow
reads a variable of a ps whole, unless the lookup itself runs there. Keras asks for a table's value before it looks
anything up, so `take`, through which all its lookups pass, is asked first whether the table is one of these.
"""

import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.parameter_servers import internals
from toolkit.strategies.parameter_servers.placement import ServerShardedVariable, shards_of
from toolkit.strategies.step.sharded_variable import StandIn
from toolkit.support.graphs import derives_from

_numbers = itertools.count()


def in_graph_of(tensor: tf.Tensor) -> bool:
    """Returns whether new operations go into a tensor's graph, and not into a branch, loop or function within it."""
    return tf.executing_eagerly() or tensor.graph is tf.compat.v1.get_default_graph()


class LocalValue(StandIn):
    """A variable's value in a step.

    Args:
        handle: What gradient tapes take for the variable, from the step's beginning to its end: its value then.
        trainable: Whether gradient tapes watch it, as they do the variable.
        value: Its value now; None for the handle.
        base: The value that the ps has, as far as the step knows; None for this one.
    """

    def __init__(
        self, handle: tf.Tensor, *, trainable: bool, value: Any = None, base: "LocalValue | None" = None
    ) -> None:
        self.handle = handle
        self.trainable = trainable
        self.shape = tf.TensorShape(handle.shape if value is None else value.shape)
        self.dtype = handle.dtype
        self.base = base
        self._value = value

    def read_value(self) -> tf.Tensor:
        """Returns the value, and records that it was read."""
        if self.trainable:
            internals.accessed(self)
        return self.current()

    def current(self) -> tf.Tensor:
        """Returns the value; gradients of what is computed from it are the handle's."""
        return self.handle if self._value is None else self._connected(self._value)

    def _connected(self, value: tf.Tensor) -> tf.Tensor:
        # What was assigned has no gradient through the variable.
        return _of_handle(self.handle, value) if self.trainable else tf.stop_gradient(value)

    def assigned(self, value: tf.Tensor) -> "LocalValue":
        """Returns the variable after the step has assigned a value to it."""
        value = tf.cast(value, self.dtype)
        return LocalValue(self.handle, trainable=self.trainable, value=value, base=self.base or self)

    def updated(self, served: Any) -> "LocalValue":
        """Returns the variable after an update on the ps."""
        return UpdatedValue(self, served)

    @property
    def sources(self) -> list[tf.Tensor]:
        """The tensors of which one is among those that anything read from the variable is computed from."""
        return [self.handle]

    @property
    def moved(self) -> bool:
        """Whether the step has computed the value from the ps's, as by an addition, rather than replaced that."""
        return self._value is not None and derives_from(self._value, (self.base or self).sources)

    @property
    def change(self) -> tf.Tensor:
        """What the step's assignments have added to the ps's value."""
        return self.current() - (self.base or self).current()


class UpdatedValue(LocalValue):
    """A variable that this step has updated on its ps. It is read from there again, but only if it is needed.

    Args:
        before: What it was before.
        served: The variable on the ps.
    """

    def __init__(self, before: LocalValue, served: Any) -> None:
        super().__init__(before.handle, trainable=before.trainable)
        self.shape = before.shape
        self._served = served
        self._read: tf.Tensor | None = None

    @property
    def sources(self) -> list[tf.Tensor]:
        return [self.handle, *([] if self._read is None else [self._read])]

    def current(self) -> tf.Tensor:
        if self._read is None or not in_graph_of(self._read):
            self._read = self._served.read_value()
        return self._connected(self._read)


class Cell(StandIn):
    """A variable's value in a step, in a local variable of the worker, which branches and loops may assign.

    Args:
        value: Its value at first, a tensor.
        trainable: Whether gradient tapes watch it, as they do the variable.

    Attributes:
        handle: What gradient tapes take for the variable.
        send: What an assignment is handed to beside: a function of the value before it, the value after it, and whether
            that was computed from the variable's own. None for no such function.
    """

    def __init__(self, value: tf.Tensor, *, trainable: bool) -> None:
        self.trainable = trainable
        self.shape = value.shape
        self.dtype = value.dtype
        self.send: Callable[[tf.Tensor, tf.Tensor, bool], Any] | None = None
        # Each traced step has a separate name. A worker runs one step after another, so they don't share it.
        self.handle = tf.raw_ops.VarHandleOp(
            dtype=value.dtype, shape=value.shape, shared_name=f"toolkit_cell_{next(_numbers)}"
        )
        self.set(value)

    def read_value(self) -> tf.Tensor:
        """Returns the value at this point of the step."""
        if self.trainable:
            internals.accessed(self)
        value = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)
        value.set_shape(self.shape)
        return value

    def set(self, value: tf.Tensor) -> None:
        """Sets the value, without `send`."""
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=tf.cast(value, self.dtype))

    def assign(self, value: Any) -> None:
        """Sets the value, as the step assigns it."""
        value = tf.cast(value, self.dtype)
        if self.send is not None:
            self.send(self.read_value(), value, derives_from(value, [self.handle]))
        self.set(value)


@tf.custom_gradient
def _of_handle(_handle: tf.Tensor, value: tf.Tensor) -> tuple:
    """Returns a value whose gradients are those of another tensor, which stands for the variable."""
    return tf.identity(value), lambda upstream: (upstream, None)


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
        self._rows = ServedTable(value, after)

    def updated(self, served: Any) -> "LocalTable":
        """Returns the table after an update in the same step."""
        table = LocalTable(served, trainable=self.trainable, after={})
        table.handle = self.handle
        return table

    @property
    def sources(self) -> list[tf.Tensor]:
        return [shard.handle for shard in shards_of(self._rows.value)]

    def current(self) -> tf.Tensor:
        return _with_gradient_of(self.handle, self._rows.whole())

    def lookup(self, indices: tf.Tensor) -> tf.Tensor:
        """Returns rows of the table: of indices [...], negative ones from the end, [..., columns]."""
        if self.trainable:
            internals.accessed(self)
        return self._rows.lookup(indices, self.handle)


class ServedTable:
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
        rows = _with_gradient_of(handle, tf.gather(self._pulled(unique), places), indices=flat, shape=self.value.shape)
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


def _with_gradient_of(stand_in: tf.Tensor, value: tf.Tensor, *, indices: Any = None, shape: Any = None) -> tf.Tensor:
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
