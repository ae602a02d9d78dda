"""What must be the same on all workers: facts, random numbers, data, weights, and the statistics that each has."""

import json
import logging
import pickle
import random
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.agreement import broadcast, extremes, gather, mean, process_names, processes
from toolkit.strategies.mesh import Among, mesh_of
from toolkit.strategies.optimizers import variables_of
from toolkit.strategies.replica_shards import ReplicaShardedVariable

__all__ = [
    "Difference",
    "FirstBatch",
    "average_statistics",
    "check_equal_weights",
    "checksum",
    "difference",
    "seed_alike",
]

_LOG = logging.getLogger(__name__)
_ROW = 1024


class Difference(NamedTuple):
    """Where a process differs from the chief.

    Attributes:
        process: The first one that differs, such as "worker:1".
        theirs: That process's facts.
        chief: The process that all others are held against.
        chiefs: The chief's facts.
        keys: Which of them differ.
    """

    process: str
    theirs: dict[str, Any]
    chief: str
    chiefs: dict[str, Any]
    keys: list[str]


def difference(strategy: tf.distribute.Strategy, facts: Mapping[str, Any]) -> Difference | None:
    """Holds every process's facts against the chief's. It is a collective, with the same result on all of them.

    Args:
        strategy: The strategy whose processes are compared.
        facts: Values that JSON can hold.
    """
    if processes(strategy) == 1:
        return None
    chiefs, *others = map(json.loads, gather(strategy, json.dumps(dict(facts), default=str).encode()))
    chief, *names = process_names(strategy)
    for process, theirs in zip(names, others, strict=True):
        keys = [key for key in {**chiefs, **theirs} if chiefs.get(key) != theirs.get(key)]
        if keys:
            return Difference(process, theirs, chief, chiefs, keys)
    return None


class FirstBatch:
    """The first batch of each process's data, of which each is to keep its share.

    Args:
        strategy: The strategy whose processes read the data.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self._sum = 0

    def take(self, *parts: np.ndarray) -> None:
        """Notes it, called when it is read."""
        for part in parts:
            raw = repr(part.tolist()).encode() if part.dtype == object else np.ascontiguousarray(part).tobytes()
            self._sum = zlib.crc32(raw, self._sum)

    def compare(self) -> None:
        """Warns where the processes' differ. It is a collective, to be called when all have read one."""
        found = difference(self._strategy, {"first batch": self._sum})
        if found is not None:
            _LOG.warning(
                "%s read a different first batch than %s. Each worker keeps its share of every batch and leaves the "
                "rest to the others, so if their data differ, most examples are never used. Give all workers the same "
                "data, or set AutoShardPolicy.OFF if each has its own",
                found.process,
                found.chief,
            )


def checksum(array: np.ndarray) -> int:
    """Returns a number that differs where an array's bits do."""
    return zlib.crc32(np.ascontiguousarray(array).tobytes())


def check_equal_weights(model: keras.Model) -> None:
    """Compares weights, optimizer and the epoch to begin with, bit for bit. It is a collective.

    Training would go on without a word where they differ. Of a sharded variable each worker holds
    shards of its own, which are compared with those of other groups, where there are any.

    Raises:
        StrategyError: On every worker, where any two differ.
    """
    variables: list[Any] = []
    sharded: list[Any] = []
    for variable in variables_of(model):
        (sharded if isinstance(variable, ReplicaShardedVariable) else variables).append(variable)
    # By number: the counters in Keras's paths (`conv2d_3`) depend on what else a process has built.
    values = [tf.convert_to_tensor(variable) for variable in variables]
    sums = tf.stack([_sum_of_bits(value) for value in values]).numpy().tolist() if values else []
    # BackupAndRestore leaves the epoch there.
    facts = {str(number): total for number, total in enumerate(sums)}
    found = difference(model.distribute_strategy, {**facts, "epoch": getattr(model, "_initial_epoch", None) or 0})
    keys = found.keys if found is not None else []
    names = ["the initial epoch" if key == "epoch" else variables[int(key)].path for key in keys]
    names += _that_differ_among_groups(model.distribute_strategy, sharded)
    if names:
        raise StrategyError(
            asked="all workers train the same model",
            found="they begin with different values of "
            f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}",
            remedy="Load the same weights on every worker, from a file that all of them can read",
        )


def _that_differ_among_groups(strategy: tf.distribute.Strategy, variables: list) -> list[str]:
    """Returns the paths of sharded variables of which some group holds other shards than the first."""
    mesh = mesh_of(strategy)
    variables = [variable for variable in variables if variable.among is Among.GROUP]
    if mesh.groups == 1 or not variables:
        return []
    own = [_sum_of_bits(shard.value()) for variable in variables for shard in variable.shards]
    sums = np.frombuffer(b"".join(gather(strategy, tf.stack(own).numpy().tobytes())), np.int64)
    # By process, variable, and replica of the process.
    by_variable = sums.reshape(processes(strategy), len(variables), -1).swapaxes(0, 1)
    by_group = by_variable.reshape(len(variables), mesh.groups, mesh.shards)
    return [v.path for v, each in zip(variables, by_group, strict=True) if (each != each[:1]).any()]


def _sum_of_bits(value: tf.Tensor) -> tf.Tensor:
    """Returns an int64 that differs where a tensor's bits do, or their order; made where the tensor is."""
    words = {1: tf.uint8, 2: tf.int16, 4: tf.int32}.get(value.dtype.size, tf.int64)
    bits = value if value.dtype == tf.bool else tf.bitcast(value, words)
    flat = tf.reshape(tf.cast(bits, tf.int64), [-1])
    rows = tf.reshape(tf.pad(flat, [[0, -tf.size(flat) % _ROW]]), [-1, _ROW])
    # Whole numbers wrap around, and an odd factor keeps all bits. Two short rows of factors: they are made on the host.
    sums = tf.reduce_sum(rows * (2 * tf.range(_ROW, dtype=tf.int64) + 1), axis=1)
    return tf.reduce_sum(sums * (2_654_435_761 * (2 * tf.range(tf.size(sums, tf.int64)) + 1)))


def average_statistics(model: keras.Model) -> None:
    """Sets a model's statistics, such as BatchNormalization's moving ones, to their mean over all replicas.

    Keras lets each replica update its own copy from its own examples, and they drift apart. Only
    variables that do differ are sent. It is a collective.
    """
    strategy = model.distribute_strategy
    variables = [v for v in model.non_trainable_variables if tf.as_dtype(v.dtype).is_floating]
    with strategy.scope():
        for variable in variables:
            _average_here(variable)
    if not variables or processes(strategy) == 1:
        return
    sums = tf.stack([tf.reduce_sum(tf.cast(tf.convert_to_tensor(v), tf.float64)) for v in variables])
    lowest, highest = extremes(strategy, sums.numpy())
    with strategy.scope():
        for variable, alike in zip(variables, lowest == highest, strict=True):
            if not alike:
                variable.assign(mean(strategy, tf.convert_to_tensor(variable)))


def _average_here(variable: keras.Variable) -> None:
    """Sets a variable to its mean over this process's replicas, where they differ."""
    copies = [tf.convert_to_tensor(copy) for copy in getattr(variable.value, "values", ())]
    if len(copies) > 1 and any((copy.numpy() != copies[0].numpy()).any() for copy in copies[1:]):
        total = tf.reduce_mean(tf.stack([tf.cast(copy, tf.float64) for copy in copies]), 0)
        variable.assign(tf.cast(total, copies[0].dtype))


def seed_alike(strategy: tf.distribute.Strategy) -> None:
    """Seeds those of TensorFlow's, NumPy's and Python's generators that differ between the processes.

    Each worker takes its share of every global batch. If their shuffles differed, some examples of
    an epoch would be used twice and others not at all, and nothing would say so. A generator that the
    user seeded alike everywhere is left alone. The common seed is drawn from the chief's `random`.
    """
    states = (random.getstate(), np.random.get_state(legacy=True))
    lowest, highest = extremes(strategy, np.array([zlib.crc32(pickle.dumps(state)) for state in states], np.int64))
    differ = lowest != highest
    try:
        unseeded = tf.compat.v1.random.get_seed(None) == (None, None)
    except RuntimeError:  # Under enable_op_determinism TensorFlow asks the user for a seed, where one is needed.
        unseeded = False
    if not unseeded and not differ.any():
        return
    drawn = random.getrandbits(31) if differ[0] or unseeded else 0
    seed = int(broadcast(strategy, np.array([drawn], np.int64))[0])
    if unseeded:
        tf.random.set_seed(seed)
    if differ[0]:
        random.seed(seed)
    if differ[1]:
        np.random.seed(seed)
    _LOG.info("All workers use seed %d, so that their shuffles agree", seed)
