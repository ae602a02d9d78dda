"""Variables of which each process has only a part: all take part in reading one, unless a snapshot is valid."""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.strategies.processes.agreement import process_index, processes

__all__ = [
    "ReadTogether",
    "ReplicaCopies",
    "ReplicaSum",
    "drop_snapshots",
    "gathered",
    "snapshots_of",
    "take_snapshots",
]

_GROUP = 1_000_009  # Far from TensorFlow's keys, which count from 1.
_PATIENCE = 120.0  # Seconds in which the other processes must read the same variable.


class ReadTogether(keras.Variable):
    """A `keras.Variable` that all processes read together, outside of steps, as a whole.

    Attributes:
        strategy: The one in whose scope it was made.
    """

    strategy: tf.distribute.Strategy
    _value: Any
    _snapshot: tuple[list[np.ndarray], np.ndarray] | None = None

    @property
    def shards(self) -> list[tf.Variable]:
        """This process's parts, in the order of its replicas."""
        return list(self.strategy.experimental_local_results(self._value))

    def _whole_of(self, own: list[np.ndarray]) -> np.ndarray:
        """Returns the whole, from this process's and the others' parts. With several processes it is a collective."""
        raise NotImplementedError

    def numpy(self) -> np.ndarray:
        """Returns the whole. With several processes it is a collective, unless a snapshot is valid."""
        own = [shard.numpy() for shard in self.shards]
        if self._snapshot is not None and all(map(np.array_equal, own, self._snapshot[0])):
            return self._snapshot[1].copy()
        return self._whole_of(own)

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

    def _whole_of(self, own: list[np.ndarray]) -> np.ndarray:
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
        return np.asarray(np.stack(everybodys), dtype=dtype)

    def assign(self, value: np.ndarray) -> None:
        """Sets each replica's copy to its row of [replicas, ...]."""
        first = process_index(self._strategy) * len(self._copies) if processes(self._strategy) > 1 else 0
        for number, copy in enumerate(self._copies, first):
            copy.assign(value[number])


def gathered(own: list[np.ndarray], strategy: tf.distribute.Strategy) -> list[np.ndarray]:
    """Returns all replicas' values, in their order, from this process's. It is a collective."""
    if processes(strategy) == 1:
        return own
    sent = np.stack(own)
    with tf.device("CPU:0"):
        everybodys = tf.raw_ops.CollectiveGatherV2(
            input=sent,
            group_size=processes(strategy),
            group_key=_GROUP,
            # TensorFlow keeps the shape and dtype of each key for ever, 1.2 KiB each: a key for each read would leak.
            instance_key=zlib.crc32(f"{sent.dtype.name} {sent.shape}".encode()) % (2**31 - 1),
            ordering_token=[],
            timeout_seconds=_PATIENCE,
        )
    return list(everybodys.numpy())


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
