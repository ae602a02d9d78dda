"""What replaces a variable in a step: its value on the worker, which the step's assignments change.

A value is a tensor, and an assignment makes another. That can't be done in a branch, a loop or a function within the
step: what is made there is of no use outside. A variable that is assigned there has a cell, a variable of the worker's
own that lives as long as the step; functions are traced again for it (see `functions.trace`).
"""

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from toolkit.strategies.parameter_servers import internals
from toolkit.strategies.step.sharded_variable import StandIn
from toolkit.support.graphs import derives_from

__all__ = ["Cell", "LocalValue", "UpdatedValue", "in_graph_of"]

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
        return _of_handle(self.handle, value) if self.trainable else value

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
