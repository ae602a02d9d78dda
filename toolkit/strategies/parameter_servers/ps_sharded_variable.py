"""A variable whose rows are sharded over several ps, and which readers see as a whole.

TensorFlow's own ShardedVariable breaks in Keras 3: a gradient tape asks it for the one handle that it
doesn't have, and an optimizer can't update it.
"""

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from toolkit.strategies.parameter_servers import internals

__all__ = ["ServerShardedVariable", "shards_of"]

_ids = itertools.count()


class ServerShardedVariable:
    """The `keras.Variable.value` of a sharded variable.

    Args:
        shards: `tf.Variable`s with the rows in order.
        like: The sharded variable that an optimizer's variable belongs to; None for a model's own.
        trainable: Whether gradient tapes watch it.
        name: The name of the whole variable.

    Attributes:
        offsets: The first row of each shard, and the number of rows.
    """

    def __init__(
        self, shards: Sequence[Any], *, like: "ServerShardedVariable | None", trainable: bool, name: str
    ) -> None:
        self.shards = tuple(shards)
        self.like = like or self
        self.trainable = trainable
        self.name = name
        self.dtype = shards[0].dtype
        self.offsets = [0, *itertools.accumulate(int(shard.shape[0]) for shard in shards)]
        self.shape = tf.TensorShape([self.offsets[-1], *shards[0].shape[1:]])
        self._handles: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._unique_id = f"sharded_{next(_ids)}"
        self._distribute_strategy = shards[0]._distribute_strategy
        for index, shard in enumerate(self.shards):
            shard._shard_of = (self, index)
            # With this, Keras's optimizers find all of what they are given to update.
            shard._distributed_container = lambda: self

    def rows(self, value: Any, index: int) -> Any:
        """Returns the rows of a value in one shard; of some rows, those in the shard, with their positions there."""
        start, stop = self.offsets[index : index + 2]
        if not isinstance(value, tf.IndexedSlices):
            return value[start:stop]
        here = tf.logical_and(value.indices >= start, value.indices < stop)
        places = tf.boolean_mask(value.indices, here) - start
        return tf.IndexedSlices(tf.boolean_mask(value.values, here), places, tf.shape(self.shards[index]))

    def read_value(self) -> tf.Tensor:
        """Returns all rows."""
        return tf.concat([shard.read_value() for shard in self.shards], 0)

    value = read_value

    def numpy(self) -> np.ndarray:
        """Returns all rows as an array."""
        return np.concatenate([shard.numpy() for shard in self.shards])

    def _on_each(self, method: str, value: Any, **_: Any) -> "ServerShardedVariable":
        value = tf.convert_to_tensor(value, self.dtype)
        for index, shard in enumerate(self.shards):
            getattr(shard, method)(self.rows(value, index))
        return self

    assign = functools.partialmethod(_on_each, "assign")
    assign_add = functools.partialmethod(_on_each, "assign_add")
    assign_sub = functools.partialmethod(_on_each, "assign_sub")

    @property
    def handle(self) -> tf.Tensor:
        """What gradient tapes take for this variable in the user's own loop: one tensor in each function."""
        graph = tf.compat.v1.get_default_graph()
        within = graph
        while within is not None:
            if within in self._handles:
                return self._handles[within]
            within = getattr(within, "outer_graph", None)
        return self._handles.setdefault(graph, tf.zeros([], self.dtype))

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        value = self.read_value()
        if self.trainable:
            internals.accessed(self)
            value = internals.computed_from(self.handle, value, tf.convert_to_tensor)
        return value if dtype is None else tf.cast(value, dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    # tf.train.Checkpoint asks variables what to save.
    def _serialize_to_tensors(self) -> dict:
        return {"VARIABLE_VALUE": self.read_value()}

    def _restore_from_tensors(self, restored: dict) -> "ServerShardedVariable":
        return self.assign(restored["VARIABLE_VALUE"])


def shards_of(value: Any) -> Sequence[Any]:
    """Returns the `tf.Variable`s that hold a variable: its shards, or itself."""
    return value.shards if isinstance(value, ServerShardedVariable) else [value]
