"""Variables of which each process has only a part. Reading, saving and setting one use the whole.

Under tf.distribute each replica has its own copy of every variable. Nothing says that the copies must be equal: in a
`ReplicaShardedVariable` each replica of a group holds its shard, cut along one axis and padded with zeros to the same
size. Keras sees the whole shape, so `save`, `get_weights`, checkpoints and another number of replicas know nothing of
shards. All processes take part in reading one (`ReadTogether`), unless a snapshot is valid.
"""

import contextlib
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.mesh import Layout, mesh_of
from toolkit.strategies.processes.agreement import PATIENCE, is_chief, meeting, process_index, processes
from toolkit.strategies.step.collectives import all_gather, gather_anywhere, reduce_scatter, replica_id_and_count

_GROUP = 1_000_009  # Far from TensorFlow's keys, which count from 1.


class ReadTogether(keras.Variable):
    """A `keras.Variable` that all processes read together, outside of steps, as a whole.

    Attributes:
        strategy: The one in whose scope it was made.
    """

    strategy: tf.distribute.Strategy
    _value: Any
    _snapshot: tuple[list[np.ndarray], np.ndarray] | None = None
    # Called before this process alone reads it: it makes the others take part.
    _announce: Callable[[], object] | None = None

    @property
    def shards(self) -> list[tf.Variable]:
        """This process's parts, in the order of its replicas."""
        return list(self.strategy.experimental_local_results(self._value))

    @property
    def is_among_processes(self) -> bool:
        """Whether reading the whole is a collective."""
        return processes(self.strategy) > 1

    def whole_of(self, own: list[np.ndarray]) -> np.ndarray:
        """Returns the whole, from this process's and the others' parts. With several processes it is a collective."""
        raise NotImplementedError

    def numpy(self) -> np.ndarray:
        """Returns the whole. With several processes it is a collective, unless a snapshot is valid."""
        own = [shard.numpy() for shard in self.shards]
        if self._snapshot is not None and all(map(np.array_equal, own, self._snapshot[0])):
            return self._snapshot[1].copy()
        if self._announce is not None:
            self._announce()
        return self.whole_of(own)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def take_snapshot(self) -> None:
        """Keeps the current whole; see `take_snapshots`."""
        self._snapshot = None
        self._snapshot = [shard.numpy() for shard in self.shards], self.numpy()

    def drop_snapshot(self) -> None:
        """Deletes what `take_snapshot` kept."""
        self._snapshot = None


class ReplicaSum(ReadTogether):
    """Zeros to which each replica adds its own: outside of steps it is the sum of all; setting it divides the value.

    Args:
        shape: Of each replica's, and of the sum.
        kwargs: As for `keras.Variable`.
    """

    def __init__(self, shape: Sequence[int], **kwargs: Any) -> None:
        self.strategy = tf.distribute.get_strategy()
        how = {"aggregation": "sum", "synchronization": "on_read", "trainable": False}
        super().__init__("zeros", shape=shape, **how, **kwargs)

    def whole_of(self, own: list[np.ndarray]) -> np.ndarray:
        return sum(own[1:], own[0]) if processes(self.strategy) == 1 else self.value.numpy()  # TensorFlow adds up.


class ReplicaCopies:
    """All replicas' values of a variable that differs by replica, as one array for a checkpoint.

    Args:
        variable: A variable of which each replica of its strategy has a copy.
        strategy: In whose scope it was made.

    Attributes:
        shape: [replicas, ...].
        dtype: The variable's.
        name: The variable's.
    """

    def __init__(self, variable: Any, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self._copies = list(strategy.experimental_local_results(getattr(variable, "value", variable)))
        self.shape = (strategy.num_replicas_in_sync, *variable.shape)
        self.dtype, self.name = variable.dtype, variable.name

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        everybodys = gathered([each.numpy() for each in self._copies], self._strategy)
        return np.asarray(everybodys, dtype=dtype)

    def assign(self, value: np.ndarray) -> None:
        """Sets each replica's copy to its row of [replicas, ...]."""
        first = process_index(self._strategy) * len(self._copies) if processes(self._strategy) > 1 else 0
        for number, copy in enumerate(self._copies, first):
            copy.assign(value[number])


def gathered(own: list[np.ndarray], strategy: tf.distribute.Strategy) -> np.ndarray:
    """Returns all replicas' values, [replicas, ...], from this process's. It is a collective."""
    sent = np.stack(own) if len(own) > 1 else own[0][None]
    if processes(strategy) == 1:
        return sent
    with tf.device("CPU:0"), meeting(strategy):
        everybodys = tf.raw_ops.CollectiveGatherV2(
            input=sent,
            group_size=processes(strategy),
            group_key=_GROUP,
            # TensorFlow keeps the shape and dtype of each key for ever, 1.2 KiB each: a key for each read would leak.
            instance_key=zlib.crc32(f"{sent.dtype.name} {sent.shape}".encode()) % (2**31 - 1),
            ordering_token=[],
            timeout_seconds=PATIENCE,
        )
    return everybodys.numpy()


def snapshots_of(variables: Sequence[Any]) -> Iterator[ReadTogether]:
    """Yields those of some variables that all processes must read together."""
    return (each for each in variables if isinstance(each, ReadTogether) and processes(each.strategy) > 1)


def take_snapshots(variables: Sequence[Any]) -> None:
    """Makes variables keep their whole values, so that one process alone can read them until they change.

    Only the chief writes files, and to read what another process has both must take part. It is a collective.
    """
    for variable in snapshots_of(variables):
        variable.take_snapshot()


def drop_snapshots(variables: Sequence[Any]) -> None:
    """Deletes what `take_snapshots` kept."""
    for variable in snapshots_of(variables):
        variable.drop_snapshot()


@contextlib.contextmanager
def chief_reads(strategy: tf.distribute.Strategy, variables: Sequence[Any]) -> Iterator[None]:
    """A context in which the chief alone reads variables, such as to save them: each process has one whole at a time.

    All processes must enter it. The others take part in what the chief reads, and enter when it has left.

    Args:
        strategy: Whose processes they are.
        variables: The same on each.
    """
    read = list(snapshots_of(variables))
    if not read:
        yield
        return

    def announced(number: int) -> int:
        return int(gathered([np.array([number], np.int64)], strategy)[0, 0])  # The chief is the first.

    if not is_chief(strategy):
        while (number := announced(-1)) >= 0:
            read[number].whole_of([shard.numpy() for shard in read[number].shards])
        yield
        return
    for number, variable in enumerate(read):
        variable._announce = functools.partial(announced, number)
    try:
        yield
    finally:
        for variable in read:
            variable._announce = None
        announced(-1)


class ReplicaShardedVariable(ReadTogether):
    """A `keras.Variable` with a shard on each replica of a group of the strategy in whose scope it is created.

    Args:
        initializer: Makes the whole value, so that it is the same at any number of replicas.
        shape: The shape of the whole.
        layout: How it lies at rest.
        kwargs: As for `keras.Variable`.

    Attributes:
        laid_out: Its layout.
        count: How many shards there are.
        shard_shape: The shape of each shard, padding included.
    """

    laid_out: Layout
    count: int
    shard_shape: list[int]
    _plain: tf.Variable | None = None

    def __init__(self, initializer: Any, shape: Sequence[int], *, layout: Layout, **kwargs: Any) -> None:
        self._lay_out(shape, layout)
        super().__init__(initializer, shape=shape, aggregation="none", **kwargs)

    def _lay_out(self, shape: Sequence[int], layout: Layout) -> None:
        self.laid_out = layout
        self.strategy = tf.distribute.get_strategy()
        self.count = len(mesh_of(self.strategy).members(0, layout.among))
        self._whole_shape = [math.prod(shape)] if layout.axis is None else list(shape)
        self._axis = layout.axis or 0
        self.shard_shape = list(self._whole_shape)
        self.shard_shape[self._axis] = -(-self._whole_shape[self._axis] // self.count)

    def _initialize_with_initializer(self, initializer: Callable) -> None:
        """Keras's hook for this; it is also called later, if a variable was created in a stateless scope."""
        whole = keras.ops.convert_to_numpy(initializer(self._shape, dtype=self._dtype))
        self._make_shards(trainable=self.trainable)
        self._set(whole)

    def _make_shards(self, *, trainable: bool) -> None:
        zeros = tf.zeros(self.shard_shape, self._dtype)
        self._value = tf.Variable(zeros, dtype=self._dtype, trainable=trainable, name=self.name)

    def _own_shards(self) -> Iterator[tuple[int, tf.Variable]]:
        """Yields this process's shards, each with its replica's id."""
        shards = self.shards
        first = process_index(self.strategy) * len(shards) if processes(self.strategy) > 1 else 0
        yield from enumerate(shards, first)

    def _set(self, whole: np.ndarray) -> None:
        self._snapshot = None
        for replica_id, shard in self._own_shards():
            shard.assign(self._cut(whole, replica_id))

    def _cut(self, whole: np.ndarray, replica_id: int) -> np.ndarray:
        """Returns a replica's shard of a whole array."""
        whole = whole.reshape(self._whole_shape)
        size = self.shard_shape[self._axis]
        begin = replica_id % self.count * size
        if self.laid_out.repeats:
            indices = np.minimum(np.arange(begin, begin + size), whole.shape[self._axis] - 1)
            return np.take(whole, indices, axis=self._axis)
        shard = whole[(slice(None),) * self._axis + (slice(begin, begin + size),)]
        return np.pad(shard, [(0, size - there) for size, there in zip(self.shard_shape, shard.shape, strict=True)])

    def assign(self, value: Any) -> Any:
        """Sets the whole. In a step, sets this replica's shard, from a shard or from a whole that each replica has."""
        if tf.distribute.get_strategy() is self.strategy and tf.distribute.get_replica_context() is not None:
            new = tf.cast(value, self._value.dtype)
            self._value.assign(new if list(new.shape) == self.shard_shape else self.shard_of(new))
            return value
        # Keras would copy what is an array already, or what lies in a file.
        array = np.asarray(value if hasattr(value, "__array__") else keras.ops.convert_to_numpy(value))
        if array.shape != tuple(self._shape):
            raise ValueError(f"{self.path} has shape {tuple(self._shape)} and can't be set to one of {array.shape}")
        self._set(array.astype(self._value.dtype.as_numpy_dtype, copy=False))
        return value

    def whole_of(self, own: list[np.ndarray]) -> np.ndarray:
        shards = gathered(own, self.strategy)[: self.count]  # The first group's.
        # One after another in memory, they are the whole already.
        whole = np.concatenate(shards, axis=self._axis) if self._axis else shards.reshape(-1, *self.shard_shape[1:])
        return whole[tuple(slice(size) for size in self._whole_shape)].reshape(self._shape)

    @contextlib.contextmanager
    def in_one_place(self) -> Iterator[None]:
        """A context in which this holds the whole in one plain variable. With several processes it is a collective.

        A step must not be run meanwhile.
        """
        shards, whole = self._value, self.numpy()
        self._value = self._plain = tf.Variable(whole, trainable=self.trainable, name=self.name)
        try:
            yield
        finally:
            self._value, self._plain = shards, None

    # tf.train.Checkpoint asks variables what to save.
    def _serialize_to_tensors(self) -> dict:
        return {"VARIABLE_VALUE": self.whole()}

    def _restore_from_tensors(self, restored: dict) -> Any:
        self.assign(restored["VARIABLE_VALUE"])
        return self._value

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        if self._plain is None:
            raise StrategyError(
                asked=f"tf.saved_model.save of a model with {self.path}",
                found="each replica holds a shard of it, and a SavedModel has one variable for all replicas",
                remedy="Use model.export(path), which writes whole weights",
            )
        return super()._export_to_saved_model_graph(*args, **kwargs)

    def whole(self) -> tf.Tensor:
        """Returns the whole as a tensor, outside of steps."""
        if self._plain is not None:
            return self._plain.read_value()
        if self._value is None:  # Keras infers shapes first, and creates variables afterwards.
            return tf.convert_to_tensor(self.value)
        if processes(self.strategy) > 1:
            if tf.executing_eagerly():
                return tf.constant(self.numpy())
            # Read when it runs. While Keras infers shapes, it never does.
            value = tf.numpy_function(self.numpy, [], self._value.dtype)
            value.set_shape(self._shape)
            return value
        return self._joined(tf.stack([shard.value() for shard in self.shards[: self.count]]))

    def gather(self, shard: tf.Tensor) -> tf.Tensor:
        """Returns, in a step, the whole of which each replica has a shard: of this variable, or of its gradient."""
        return self._joined(all_gather(shard, among=self.laid_out.among))

    def gather_anywhere(self, shard: tf.Tensor) -> tf.Tensor:
        """Returns what `gather` does, with no place in the order of the step's exchanges, and without a gradient."""
        return self._joined(gather_anywhere(shard, among=self.laid_out.among))

    def scatter(self, whole: tf.Tensor, dtype: tf.DType | None) -> tf.Tensor:
        """Returns, in a step, this replica's shard of the sum of what each replica has whole, such as its gradient.

        Args:
            whole: Of the whole's shape.
            dtype: In which elements are sent; None for their own.
        """
        return reduce_scatter(self._shards_of(whole), among=self.laid_out.among, dtype=dtype)

    def _joined(self, shards: tf.Tensor) -> tf.Tensor:
        """Returns the whole of all shards, [shards, ...]."""
        if self._axis:
            laid_out = tf.concat(tf.unstack(shards, self.count), self._axis)
        else:  # A tensor's memory is that of its shards, one after another.
            laid_out = tf.reshape(shards, [-1, *self.shard_shape[1:]])
        if laid_out.shape[self._axis] != self._whole_shape[self._axis]:
            laid_out = tf.slice(laid_out, [0] * len(self._whole_shape), self._whole_shape)
        return tf.reshape(laid_out, self._shape)

    def shard_of(self, whole: tf.Tensor) -> tf.Tensor:
        """Returns, in a step, this replica's shard of a whole."""
        return self._shards_of(whole)[replica_id_and_count(self.laid_out.among)[0]]

    def _shards_of(self, whole: tf.Tensor) -> tf.Tensor:
        """Returns all shards of a whole, [shards, ...]."""
        whole = tf.reshape(whole, self._whole_shape)
        padding = [[0, 0] for _ in self._whole_shape]
        padding[self._axis][1] = self.shard_shape[self._axis] * self.count - self._whole_shape[self._axis]
        padded = tf.pad(whole, padding) if padding[self._axis][1] else whole
        if self._axis:
            return tf.stack(tf.split(padded, self.count, self._axis))
        return tf.reshape(padded, [self.count, *self.shard_shape])


# Replaces a variable while an optimizer updates it or a gradient tape watches it: a part of it, or a copy.


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
