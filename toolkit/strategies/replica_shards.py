"""A variable of which each replica holds a part; read, saved and set it is whole.

Under tf.distribute each replica has a copy of its own of every variable. Nothing says that the copies must be equal:
here each holds its part, cut along one axis and padded with zeros to the same size. Keras sees the whole shape, so
`save`, `get_weights`, checkpoints and another number of replicas know nothing of parts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.strategies.agreement import process_index, processes
from toolkit.strategies.collectives import all_gather, replica_id_and_count, replicas

__all__ = ["ReplicaShardedVariable", "drop_snapshots", "snapshots"]

_GROUP = 1_000_009  # Far from the keys that TensorFlow counts up from 1.
_PATIENCE = 120.0  # Seconds for the other processes to read the same variable.
_reads = iter(range(1, 2**31 - 1))


class ReplicaShardedVariable(keras.Variable):
    """A `keras.Variable` with a part on each replica of the strategy in whose scope it is made.

    Args:
        initializer: Of the whole value, so that it is the same at any number of replicas.
        shape: Of the whole.
        axis: That it is cut along.
        repeats: What fills up the last parts is the whole's last value, and not zeros: an optimizer may divide by it.
        kwargs: As for `keras.Variable`.

    Attributes:
        part_shape: Of one part, padding included.
    """

    def __init__(
        self, initializer: Any, shape: Sequence[int], *, axis: int, repeats: bool = False, **kwargs: Any
    ) -> None:
        self.axis = axis
        self.repeats = repeats
        self.strategy = tf.distribute.get_strategy()
        self.count = replicas(self.strategy)
        self.part_shape = list(shape)
        self.part_shape[axis] = -(-shape[axis] // self.count)
        self._snapshot: tuple[list[np.ndarray], np.ndarray] | None = None
        super().__init__(initializer, shape=shape, aggregation="none", **kwargs)

    def _initialize_with_initializer(self, initializer: Callable) -> None:
        """Keras's hook for this; it also comes later, where a variable is made in a stateless scope."""
        whole = keras.ops.convert_to_numpy(initializer(self._shape, dtype=self._dtype))
        self._value = tf.Variable(
            tf.zeros(self.part_shape, self._dtype), dtype=self._dtype, trainable=self.trainable, name=self.name
        )
        self._set(whole)

    @property
    def parts(self) -> list[tf.Variable]:
        """This process's parts, in the order of its replicas."""
        return list(self.strategy.experimental_local_results(self._value))

    def numbers(self) -> list[int]:
        """Which replicas' parts are this process's."""
        local = len(self.parts)
        first = process_index(self.strategy) * local if processes(self.strategy) > 1 else 0
        return list(range(first, first + local))

    def cut(self, whole: np.ndarray, replica: int) -> np.ndarray:
        """Returns a replica's part of a whole array."""
        size = self.part_shape[self.axis]
        places = np.arange(replica * size, (replica + 1) * size)
        if self.repeats:
            return np.take(whole, np.minimum(places, whole.shape[self.axis] - 1), axis=self.axis)
        part = np.take(whole, places[places < whole.shape[self.axis]], axis=self.axis)
        padding = [(0, wanted - there) for wanted, there in zip(self.part_shape, part.shape, strict=True)]
        return np.pad(part, padding)

    def _set(self, whole: np.ndarray) -> None:
        self._snapshot = None
        for part, replica in zip(self.parts, self.numbers(), strict=True):
            part.assign(self.cut(whole, replica))

    def assign(self, value: Any) -> Any:
        """Sets the whole; in a step, this replica's part."""
        if _in_a_step(self.strategy):
            self._value.assign(tf.cast(value, self._value.dtype))
            return value
        array = np.asarray(keras.ops.convert_to_numpy(value))
        if array.shape != tuple(self._shape):
            raise ValueError(f"{self.path} has shape {tuple(self._shape)} and can't be set to one of {array.shape}")
        self._set(array.astype(self._value.dtype.as_numpy_dtype))
        return value

    def numpy(self) -> np.ndarray:
        """Returns the whole. In several processes it is a collective, but where a snapshot still holds."""
        parts = [part.numpy() for part in self.parts]
        if self._snapshot is not None and all(map(np.array_equal, parts, self._snapshot[0])):
            return self._snapshot[1].copy()
        if processes(self.strategy) > 1:
            parts = self._everybodys(parts)
        whole = np.concatenate(parts, axis=self.axis)
        return np.take(whole, range(self._shape[self.axis]), axis=self.axis)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def whole(self) -> tf.Tensor:
        """Returns the whole, as a tensor, outside of steps."""
        if processes(self.strategy) > 1:
            if tf.executing_eagerly():
                return tf.constant(self.numpy())
            # Read when it is run. While Keras looks for shapes it never is.
            value = tf.numpy_function(self.numpy, [], self._value.dtype)
            value.set_shape(self._shape)
            return value
        size = self._shape[self.axis]
        return tf.gather(tf.concat([part.value() for part in self.parts], self.axis), tf.range(size), axis=self.axis)

    def gathered(self, part: tf.Tensor) -> tf.Tensor:
        """Returns, in a step, the whole of which each replica has a part: of this variable, or of its gradient."""
        parts = tf.concat(tf.unstack(all_gather(part), self.count), self.axis)
        return tf.gather(parts, tf.range(self._shape[self.axis]), axis=self.axis)

    def part_of(self, whole: tf.Tensor) -> tf.Tensor:
        """Returns, in a step, this replica's part of a whole."""
        padding = [[0, 0] for _ in self._shape]
        padding[self.axis][1] = self.part_shape[self.axis] * self.count - self._shape[self.axis]
        return tf.split(tf.pad(whole, padding), self.count, self.axis)[replica_id_and_count()[0]]

    def _everybodys(self, mine: list[np.ndarray]) -> list[np.ndarray]:
        with tf.device("CPU:0"):
            got = tf.raw_ops.CollectiveGatherV2(
                input=np.stack(mine),
                group_size=processes(self.strategy),
                group_key=_GROUP,
                instance_key=next(_reads),
                ordering_token=[],
                timeout_seconds=_PATIENCE,
            )
        return list(got.numpy())

    def keep(self) -> None:
        """Keeps the whole as it is now; see `snapshots`."""
        self._snapshot = None
        self._snapshot = [part.numpy() for part in self.parts], self.numpy()

    def forget(self) -> None:
        """Lets go of what `keep` kept."""
        self._snapshot = None


def snapshots(variables: Sequence[Any]) -> None:
    """Has sharded variables keep their whole values, so that one process alone can read them until they change.

    Only the chief writes files, and to read a part of another process's both must take part. It is
    a collective.
    """
    for variable in variables:
        if isinstance(variable, ReplicaShardedVariable) and processes(variable.strategy) > 1:
            variable.keep()


def drop_snapshots(variables: Sequence[Any]) -> None:
    """Lets go of what `snapshots` kept."""
    for variable in variables:
        if isinstance(variable, ReplicaShardedVariable):
            variable.forget()


def _in_a_step(strategy: tf.distribute.Strategy) -> bool:
    return tf.distribute.get_strategy() is strategy and tf.distribute.get_replica_context() is not None
