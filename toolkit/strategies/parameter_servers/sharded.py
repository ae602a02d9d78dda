"""A variable cut into rows that several ps hold, and whole for whoever reads it.

TensorFlow's own ShardedVariable breaks in Keras 3: a gradient tape asks it for the one handle that it
doesn't have, and an optimizer can't update it.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["Sharded", "offsets"]

_numbers = itertools.count()


def offsets(rows: int, parts: int) -> list[int]:
    """Returns the first row of each part, and the end: equal to within one row."""
    return [number * rows // parts for number in range(parts + 1)]


class Sharded:
    """What `keras.Variable.value` is for a sharded variable.

    Args:
        parts: `tf.Variable`s, the rows in order.
        like: The sharded variable that an optimizer's variable belongs to; None for a model's.
        trainable: As a variable's.
        name: Of the whole.
    """

    def __init__(self, parts: Sequence[Any], *, like: "Sharded | None", trainable: bool, name: str) -> None:
        self.parts = tuple(parts)
        self.like = like or self
        self.trainable = trainable
        self.name = name
        self.dtype = parts[0].dtype
        self.places = [0, *itertools.accumulate(int(part.shape[0]) for part in parts)]
        self.shape = tf.TensorShape([self.places[-1], *parts[0].shape[1:]])
        self._unique_id = f"sharded_{next(_numbers)}"
        self._distribute_strategy = parts[0]._distribute_strategy
        for number, part in enumerate(self.parts):
            part._part_of = (self, number)
            # By this Keras's optimizers find the whole of what they are given to update.
            part._distributed_container = lambda: self

    def rows(self, value: Any, number: int) -> Any:
        """Returns the rows of a value that belong to one part."""
        return value[self.places[number] : self.places[number + 1]]

    def read_value(self) -> tf.Tensor:
        """Returns all rows."""
        return tf.concat([part.read_value() for part in self.parts], 0)

    def value(self) -> tf.Tensor:
        """As `read_value`."""
        return self.read_value()

    def numpy(self) -> np.ndarray:
        """Returns all rows as an array."""
        return np.concatenate([part.numpy() for part in self.parts])

    def assign(self, value: Any, **_: Any) -> "Sharded":
        """Sets all rows."""
        return self._each("assign", value)

    def assign_add(self, value: Any, **_: Any) -> "Sharded":
        """Adds to all rows."""
        return self._each("assign_add", value)

    def assign_sub(self, value: Any, **_: Any) -> "Sharded":
        """Subtracts from all rows."""
        return self._each("assign_sub", value)

    def _each(self, method: str, value: Any) -> "Sharded":
        value = tf.convert_to_tensor(value, self.dtype)
        for number, part in enumerate(self.parts):
            getattr(part, method)(self.rows(value, number))
        return self

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        value = self.read_value()
        return value if dtype is None else tf.cast(value, dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    # tf.train.Checkpoint asks variables for what it saves.
    def _serialize_to_tensors(self) -> dict:
        return {"VARIABLE_VALUE": self.read_value()}

    def _restore_from_tensors(self, restored: dict) -> "Sharded":
        return self.assign(restored["VARIABLE_VALUE"])
