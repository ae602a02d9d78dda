"""Replaces a variable while an optimizer updates it or a gradient tape watches it: a part of it, or a copy."""

from typing import Any

import tensorflow as tf

__all__ = ["StandIn"]


class StandIn:
    """Has a shape, a dtype and a value; subclasses define what reading and setting the value do.

    Attributes:
        shape: As of a `tf.Variable`.
        dtype: The same.
        device: Where it is updated: "" for where the replica computes.
    """

    device = ""
    shape: tf.TensorShape
    dtype: tf.DType

    def read_value(self) -> tf.Tensor:
        """Returns the value."""
        raise NotImplementedError

    def assign(self, value: Any) -> Any:
        """Sets the value."""
        raise NotImplementedError

    def assign_add(self, value: Any) -> Any:
        """Adds to the value."""
        return self.assign(self.read_value() + tf.convert_to_tensor(value))

    def assign_sub(self, value: Any) -> Any:
        """Subtracts from the value."""
        return self.assign(self.read_value() - tf.convert_to_tensor(value))

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        value = self.read_value()
        return value if dtype is None or dtype == self.dtype else tf.cast(value, dtype)

    def __getitem__(self, item: Any) -> tf.Tensor:
        return self.read_value()[item]

    def __mul__(self, other: Any) -> tf.Tensor:
        return self.read_value() * other

    def __sub__(self, other: Any) -> tf.Tensor:
        return self.read_value() - other
