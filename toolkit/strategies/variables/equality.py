"""Weights and statistics that all replicas must have alike: compared before training, averaged at an epoch's end."""

import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.exchange.mesh import Among, mesh_of
from toolkit.strategies.options import options_of
from toolkit.strategies.processes.agreement import difference, extremes, gather, mean, processes
from toolkit.strategies.variables.model_optimizers import variables_of
from toolkit.strategies.variables.sharded_variable import ReplicaShardedVariable

__all__ = ["average_statistics", "check_equal_weights", "checksum"]

_ROW = 1024


def checksum(array: np.ndarray) -> int:
    """Returns a number that differs if an array's bits differ."""
    return zlib.crc32(np.ascontiguousarray(array).tobytes())


def check_equal_weights(model: keras.Model) -> None:
    """Compares weights, optimizers and the first epoch's number bit for bit. All must call it.

    Training would go on without a word where they differ. Of a sharded variable each worker holds
    its own shards, which are compared with those of other groups, where there are any.

    Raises:
        StrategyError: On every worker, where any two differ.
    """
    variables: list[Any] = []
    sharded: list[Any] = []
    # Replicas with local steps have different optimizers until an epoch's end, and a run may continue in the middle.
    alike = variables_of(model) if options_of(model.distribute_strategy).local is None else model.variables
    for variable in alike:
        (sharded if isinstance(variable, ReplicaShardedVariable) else variables).append(variable)
    # By number: the counters in Keras's paths (`conv2d_3`) depend on what else a process has built.
    values = [tf.convert_to_tensor(variable) for variable in variables]
    sums = tf.stack([_sum_of_bits(value) for value in values]).numpy().tolist() if values else []
    # BackupAndRestore sets the epoch there.
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
    """Returns the paths of sharded variables whose shards differ between groups."""
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
    """Returns an int64 that differs if a tensor's bits or their order differ, computed on the tensor's device."""
    words = {1: tf.uint8, 2: tf.int16, 4: tf.int32}.get(value.dtype.size, tf.int64)
    bits = value if value.dtype == tf.bool else tf.bitcast(value, words)
    flat = tf.reshape(tf.cast(bits, tf.int64), [-1])
    rows = tf.reshape(tf.pad(flat, [[0, -tf.size(flat) % _ROW]]), [-1, _ROW])
    # Integers wrap around, and an odd factor keeps all bits. Two short rows of factors, because the host creates them.
    sums = tf.reduce_sum(rows * (2 * tf.range(_ROW, dtype=tf.int64) + 1), axis=1)
    return tf.reduce_sum(sums * (2_654_435_761 * (2 * tf.range(tf.size(sums, tf.int64)) + 1)))


def average_statistics(model: keras.Model) -> None:
    """Sets a model's statistics, such as BatchNormalization's moving ones, to their mean over all replicas.

    Keras lets each replica update its own copy from its own examples, and they drift apart. Only
    variables that do differ are sent. It is a collective.
    """
    strategy = model.distribute_strategy
    others = (v for v in model.non_trainable_variables if not isinstance(v, ReplicaShardedVariable))  # Such as frozen.
    variables = [v for v in others if tf.as_dtype(v.dtype).is_floating]
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
    """Sets a variable to its mean over this process's replicas if they differ."""
    copies = [tf.convert_to_tensor(copy) for copy in getattr(variable.value, "values", ())]
    if len(copies) > 1 and any((copy.numpy() != copies[0].numpy()).any() for copy in copies[1:]):
        total = tf.reduce_mean(tf.stack([tf.cast(copy, tf.float64) for copy in copies]), 0)
        variable.assign(tf.cast(total, copies[0].dtype))
