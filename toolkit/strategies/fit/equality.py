"""Weights and statistics that all replicas must have alike: compared before and while they train, or averaged."""

import collections
import logging
import math
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.mesh import Among, layout_of, mesh_of
from toolkit.strategies.processes.agreement import (
    difference,
    extremes,
    gather,
    mean,
    process_index,
    process_names,
    processes,
)
from toolkit.strategies.step.exchanges import own_variables
from toolkit.strategies.step.local_steps import agrees
from toolkit.strategies.step.moments import normalisations, statistics_of
from toolkit.strategies.variables import variables_of

_LOG = logging.getLogger(__name__)
_ROW = 1024
_PIECE = 1 << 24  # Elements that are added up at once, in 64 bits each.
_FIRST = 1000  # Steps before the first comparison. To read the weights once costs less than a step.
_SHARE = 1e-3  # Of the time, that goes to comparisons.
_ROUNDING = 1e-4  # Relative. Processors that round differently stay within it.


def checksum(array: np.ndarray) -> int:
    """Returns a number that differs if an array's bits differ."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def check_equal_weights(model: keras.Model) -> None:
    """Compares weights, optimizers and the first epoch's number bit for bit. All must call it.

    Training would go on without a word where they differ. Of a sharded variable each worker holds
    its own shards, which are compared with those of other groups, where there are any.

    Raises:
        StrategyError: On every worker, where any two differ.
    """
    variables: list[Any] = []
    sharded: list[Any] = []
    # A run may continue in the middle of an epoch, until the end of which replicas may have their own; and a loop of
    # the script's own, in which each normalises its own share, may have trained before.
    statistics = (variable for layer in normalisations(model) for variable in statistics_of(layer))
    own = {id(each) for each in (*own_variables(model), *statistics)}
    for variable in (each for each in variables_of(model) if id(each) not in own):
        (sharded if layout_of(variable).in_shards else variables).append(variable)
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
    variables = [variable for variable in variables if layout_of(variable).among is Among.GROUP]
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
    return _sum_of_words(tf.cast(_words(value), tf.int64))


def _words(value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor's bits as integers of its elements' size, in a row."""
    words = {1: tf.uint8, 2: tf.int16, 4: tf.int32}.get(value.dtype.size, tf.int64)
    return tf.reshape(value if value.dtype == tf.bool else tf.bitcast(value, words), [-1])


def _sum_of_words(flat: tf.Tensor) -> tf.Tensor:
    rows = tf.reshape(tf.pad(flat, [[0, -tf.size(flat) % _ROW]]), [-1, _ROW])
    # Integers wrap around, and an odd factor keeps all bits. Two short rows of factors, because the host creates them.
    sums = tf.reduce_sum(rows * (2 * tf.range(_ROW, dtype=tf.int64) + 1), axis=1)
    return tf.reduce_sum(sums * (2_654_435_761 * (2 * tf.range(tf.size(sums, tf.int64)) + 1)))


class WeightsWatch:
    """Compares the trainable weights of all replicas, bit for bit, while a model trains.

    Each replica updates its own copy by the same gradients. A script that sets the weights of one, or memory that
    fails, would go unnoticed. What differs by its meaning isn't compared: shards, statistics, an optimizer's state,
    and weights between two averages of local steps.

    It compares at the end of each epoch, and within one as often as costs a thousandth of the time.

    Args:
        model: Whose replicas train.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._alike = "They weren't compared before."
        self._epoch = self._batch = self._steps = 0
        self._due, self._last = _FIRST, (0, time.monotonic())  # Steps; steps and time of the last comparison.
        self._warned = False

    def begin(self, epoch: int) -> None:
        """Called when an epoch begins, with its number from 0."""
        self._epoch, self._batch = epoch, 0

    def after_step(self, batch: int) -> None:
        """Compares if it is due. All must call it.

        Args:
            batch: How many steps of the epoch are done.

        Raises:
            StrategyError: As `compare`.
        """
        self._steps += max(0, batch - self._batch)
        self._batch = batch
        if self._steps >= self._due and agrees(self._model):
            self.compare(f"step {batch:,} of epoch {self._epoch + 1:,}")

    def compare(self, now: str) -> None:
        """Compares the weights. All must call it, at moments in which replicas agree.

        Args:
            now: Where training stands, in words.

        Raises:
            StrategyError: On every worker, where the weights of any two replicas differ by more than rounding.
        """
        strategy = self._model.distribute_strategy
        began = time.monotonic()
        copies = _copies(self._model)
        if not copies[0]:
            return
        digests = [_digest(copy) for copy in copies]
        seconds = (began - self._last[1]) / max(1, self._steps - self._last[0])
        interval = min(1 << 40, math.ceil((time.monotonic() - began) / _SHARE / max(seconds, 1e-9)))
        lowest, highest = extremes(strategy, np.array([*digests, interval], np.int64))
        self._last = (self._steps, time.monotonic())
        self._due = self._steps + max(1, int(highest[-1]))
        if len({*lowest[:-1], *highest[:-1]}) > 1:
            self._tell(copies, now)
        else:
            self._alike = f"After {now} they were still equal."

    def _tell(self, copies: Sequence[list[tf.Tensor]], now: str) -> None:
        """Says which replica differs, and in what."""
        strategy = self._model.distribute_strategy
        sums = np.array([[int(_sum_of_bits(value)) for value in copy] for copy in copies], np.int64)
        table = np.concatenate([np.frombuffer(each, np.int64) for each in gather(strategy, sums.tobytes())])
        table = table.reshape(-1, sums.shape[1])  # A row for each replica.
        rows = [row.tobytes() for row in table]
        most = rows.index(collections.Counter(rows).most_common(1)[0][0])  # Of two alone, the first.
        others = [number for number, row in enumerate(rows) if row != rows[most]]
        numbers = np.flatnonzero((table[others] != table[most]).any(axis=0))
        names = [_weights(self._model)[number].path for number in numbers]
        if not names:  # Devices of two kinds, whose digests aren't the same.
            return
        away = max(self._distance([copy[number] for copy in copies], most) for number in numbers)
        found = (
            f"after {now}, {' and '.join(map(self._name, others[:3]))}{' and others' if len(others) > 3 else ''} had "
            f"other values of {', '.join(names[:3])}{' and others' if len(names) > 3 else ''} than {self._name(most)}. "
            f"{self._alike}"
        )
        if away <= _ROUNDING:
            if not self._warned:
                _LOG.warning(
                    "All replicas are to have the same weights, but %s They differ by at most %.1g of the largest "
                    "element, as processors of different kinds do by rounding; this is said once",
                    *(found, away),
                )
            self._warned = True
            return
        raise StrategyError(
            asked="all replicas have the same weights while they train",
            found=found.removesuffix("."),
            remedy="If the script sets weights, do it with the same values on every worker. Otherwise look at that "
            "device's memory, and resume from a checkpoint of a step at which they were equal",
        )

    def _distance(self, copies: Sequence[tf.Tensor], most: int) -> float:
        """Returns how far replicas' values of a weight are from those of replica `most`, relative to the largest."""
        strategy = self._model.distribute_strategy
        mine, theirs = divmod(most, len(copies))
        values = [copy.numpy().astype(np.float64) for copy in copies]
        here = processes(strategy) == 1 or process_index(strategy) == mine
        right = _from(strategy, values[theirs] if here else np.zeros_like(values[0]))
        with np.errstate(all="ignore"):
            away = max(float(np.max(np.abs(value - right), initial=0)) for value in values)
            found = away / max(float(np.max(np.abs(right), initial=0)), 1e-30)
        return float(extremes(strategy, np.array([found if math.isfinite(found) else math.inf]))[1][0])

    def _name(self, replica: int) -> str:
        strategy = self._model.distribute_strategy
        here = strategy.num_replicas_in_sync // processes(strategy)
        process, number = divmod(replica, here)
        name = process_names(strategy)[process] if processes(strategy) > 1 else ""
        of = f"replica {number} of {name}" if name else f"replica {number}"
        return name if name and here == 1 else of


def _from(strategy: tf.distribute.Strategy, value: np.ndarray) -> np.ndarray:
    """Returns the value of the one process where it isn't zero."""
    return mean(strategy, value).numpy() * processes(strategy) if processes(strategy) > 1 else value


def _weights(model: keras.Model) -> list[Any]:
    """Returns the weights of which each replica has the same values after each step."""
    on_read = tf.VariableSynchronization.ON_READ
    return [
        each
        for each in model.trainable_variables
        if not layout_of(each).in_shards
        and getattr(each.value, "synchronization", None) is not on_read
        and tf.as_dtype(each.dtype) not in (tf.string, tf.variant)
    ]


def _copies(model: keras.Model) -> list[list[tf.Tensor]]:
    """Returns the weights of each of this process's replicas."""
    strategy = model.distribute_strategy
    by_weight = [strategy.experimental_local_results(each.value) for each in _weights(model)]
    replicas = strategy.num_replicas_in_sync // processes(strategy)
    return [[tf.convert_to_tensor(each[number]) for each in by_weight] for number in range(replicas)]


def _digest(values: Sequence[tf.Tensor]) -> int:
    """Returns a number that differs if any bit of these tensors differs. It is another one on a GPU."""
    if not values:
        return 0
    if "GPU" not in values[0].device:  # Their memory can be read where it is, at some gigabytes a second.
        total = 0
        for value in values:
            held: Any = np.ascontiguousarray(np.asarray(value)).reshape(-1).view(np.uint8)
            total = zlib.crc32(held, total)
        return total
    with tf.device(values[0].device):
        return int(_sum_of_words(tf.stack([_sum_of_words(piece) for piece in _pieces(values)])))


def _pieces(values: Sequence[tf.Tensor]) -> Iterator[tf.Tensor]:
    """Yields the bits of tensors in pieces: many small ones together, since each operation takes its time."""
    small: list[tf.Tensor] = []
    room = _PIECE
    for flat in map(_words, values):
        size = int(flat.shape[0])
        if size * 16 > _PIECE:
            for begin in range(0, size, _PIECE):
                yield tf.cast(flat[begin : begin + _PIECE], tf.int64)
            continue
        small.append(tf.cast(flat, tf.int64))
        room -= size
        if room < 0:
            yield tf.concat(small, 0)
            small, room = [], _PIECE
    if small:
        yield tf.concat(small, 0)


def average_statistics(model: keras.Model) -> None:
    """Sets a model's statistics, such as BatchNormalization's moving ones, to their mean over all replicas.

    Where each replica normalises its own share of a batch, it updates its own copy from its own examples, and they
    drift apart. Only variables that do differ are sent. It is a collective.
    """
    strategy = model.distribute_strategy
    others = (v for v in model.non_trainable_variables if not layout_of(v).in_shards)  # Such as frozen.
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
