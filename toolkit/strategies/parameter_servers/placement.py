"""Which task holds which variable, a table of it, and variables whose rows are sharded over several ps.

What optimizers and seed generators count, running metrics and a learning rate stay with the chief: workers get their
values with each step. What a model counts by itself is on a ps, as all else that its steps assign.

A `ServerShardedVariable` is one that readers see as a whole. TensorFlow's own ShardedVariable breaks in Keras 3: a
gradient tape asks it for the one handle that it doesn't have, and an optimizer can't update it.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from toolkit.strategies.batches import row_range
from toolkit.strategies.options import ParameterServerOptions
from toolkit.strategies.parameter_servers import internals

CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"
SEED = "seed_generator_state"  # Keras's name of what a seed generator counts.
# Its names of what optimizers count and of what callbacks set.
_OF_OPTIMIZERS = ("iteration", "step_counter", "learning_rate", "dynamic_scale")


class Placement:
    """Chooses the task that holds each new variable under the strategy's scope. Create it outside of that scope.

    Args:
        servers: The number of ps tasks.
        options: How they are used.
    """

    def __init__(self, servers: int, options: ParameterServerOptions) -> None:
        self.servers = servers
        self.options = options
        self._next = 0
        self._bytes = [0] * servers
        # TensorFlow places a variable beside another if it is asked to.
        self._anchors = [_anchor(f"/job:ps/task:{index}/device:CPU:0") for index in range(servers)]
        self._chief = _anchor(CHIEF)

    def create(self, make: Callable, **kwargs: Any) -> Any:
        """Creates a variable; for `tf.variable_creator_scope`.

        Args:
            make: TensorFlow's next creator.
            kwargs: As `tf.Variable` takes them.
        """
        beside = kwargs.pop("colocate_with", None)
        value = kwargs.pop("initial_value", None)
        if value is None:
            return make(initial_value=None, **kwargs)
        with tf.init_scope(), tf.device("CPU:0"):
            value = tf.convert_to_tensor(value() if callable(value) else value, dtype=kwargs.get("dtype"))
        kwargs.pop("shape", None)
        if isinstance(beside, ServerShardedVariable):
            return _sharded(make, value, beside.shards, like=beside, **kwargs)
        if beside is None and _stays_with_chief(value, kwargs):
            beside = self._chief
        elif beside is None:
            first = min(range(self.servers), key=self._bytes.__getitem__)
            # In turn, beginning with the task that holds the fewest bytes.
            holders = [(first + index) % self.servers for index in range(self._shard_count(value))]
            if len(holders) > 1:
                whole = _sharded(make, value, [self._anchors[index] for index in holders], like=None, **kwargs)
                for index, shard in zip(holders, whole.shards, strict=True):
                    self._bytes[index] += _size(shard)
                return whole
            if self.options.variables == "round_robin":
                first = self._next % self.servers
                self._next += 1
            self._bytes[first] += _size(value)
            beside = self._anchors[first]
        return make(initial_value=value, colocate_with=beside, **kwargs)

    def _shard_count(self, value: tf.Tensor) -> int:
        if self.options.variables != "sharded" or not value.shape.rank:
            return 1
        wanted = self.options.shards or self.servers
        return max(1, min(wanted, _size(value) // self.options.min_shard_bytes, value.shape[0]))


def table(variables: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns the placement of some `keras.Variable`s: name, shape, bytes and task of each, a row for each shard."""
    rows = []
    for variable in variables:
        for index, shard in enumerate(shards_of(variable.value)):
            spec = tf.DeviceSpec.from_string(shard.device)
            rows.append(
                {
                    "name": variable.path + (f"[{index}]" if isinstance(variable.value, ServerShardedVariable) else ""),
                    "shape": list(shard.shape),
                    "bytes": _size(shard),
                    "task": f"{spec.job or 'chief'}:{spec.task or 0}",
                }
            )
    return rows


def bytes_by_task(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Returns the bytes that each task holds, from the rows of a table."""
    total: dict[str, int] = {}
    for row in rows:
        total[row["task"]] = total.get(row["task"], 0) + row["bytes"]
    return dict(sorted(total.items()))


def _sharded(
    make: Callable, value: tf.Tensor, beside: Sequence, *, like: "ServerShardedVariable | None", **kwargs: Any
) -> "ServerShardedVariable":
    name = kwargs.pop("name", None) or "variable"
    shards = []
    for index, neighbour in enumerate(beside):
        start, stop = row_range(value.shape[0], index, len(beside)) if like is None else like.offsets[index : index + 2]
        shards.append(
            make(initial_value=value[start:stop], colocate_with=neighbour, name=f"{name}_part_{index}", **kwargs)
        )
    return ServerShardedVariable(shards, like=like, trainable=kwargs.get("trainable") is not False, name=name)


def _stays_with_chief(value: tf.Tensor, kwargs: dict) -> bool:
    if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:  # Metrics.
        return True
    # A variable that is made again has the name of its owner before its own.
    name = (kwargs.get("name") or "").rpartition("/")[2]
    if kwargs.get("trainable") is not False:
        return False
    return name == SEED or (not value.shape.rank and name in _OF_OPTIMIZERS)


def _anchor(device: str) -> tf.Variable:
    with tf.device(device):
        return tf.Variable(0, trainable=False, name="anchor")


def _size(value: Any) -> int:
    return value.shape.num_elements() * value.dtype.size


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
        inside = tf.logical_and(value.indices >= start, value.indices < stop)
        places = tf.boolean_mask(value.indices, inside) - start
        return tf.IndexedSlices(tf.boolean_mask(value.values, inside), places, tf.shape(self.shards[index]))

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
