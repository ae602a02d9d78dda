"""Compares what the processes read: if it differs, each process keeps a share of other examples.

The first batch is compared when all have trained on it. An epoch's batches are compared at its end, because tf.data's
`shuffle` draws a new order for every iterator of a dataset: one that a single worker makes shifts that worker's orders.
"""

import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from toolkit.strategies.input.batch_split import with_cardinality
from toolkit.strategies.input.draws import Draw, other_in_each_process
from toolkit.strategies.processes.agreement import extremes
from toolkit.strategies.processes.consistency import difference

__all__ = ["Order", "show"]

_LOG = logging.getLogger(__name__)
_SETS = (
    ". Sets of texts have another order in each worker, and so do labels that are numbered by it: use sorted(), or set "
    "PYTHONHASHSEED=0 before Python starts, as `toolkit launch` does"
)
_KEPT = 1024  # Batches by which a process may have read further than another.
_SHOWN = 64  # Elements of a batch's first example.


class Order:
    """The batches of each process's data, of which each keeps its share.

    Args:
        strategy: The strategy whose processes read the data.
        draws: Functions of the data that draw random numbers.
    """

    def __init__(self, strategy: tf.distribute.Strategy, draws: Sequence[Draw] = ()) -> None:
        self._strategy = strategy
        self._draws = draws
        self._differs = False
        self._sums: dict[int, int] = {}  # Of all batches up to one, by its index.
        self._first = 0

    def take(self, index: int, *parts: np.ndarray) -> None:
        """Records a batch when it is read.

        Args:
            index: Its index in its iterator.
            parts: The first batch, and the beginnings of others.
        """
        if index == 0:
            self._sums.clear()
        total = self._sums.get(index - 1, 0)
        for part in parts:
            raw = repr(part.tolist()).encode() if part.dtype == object else np.ascontiguousarray(part).tobytes()
            total = zlib.crc32(raw, total)
        self._sums[index] = total
        self._sums.pop(index - _KEPT, None)
        self._first = self._sums.get(0, self._first)

    def compare_first(self) -> None:
        """Warns if the processes' first batches differ. All must call it when they have read one."""
        found = difference(self._strategy, {"first batch": self._first})
        self._differs = found is not None
        if found is not None and (words := other_in_each_process(self._draws)):
            _LOG.warning(words)
        elif found is not None:
            sets = difference(self._strategy, {"order of sets": hash("a text")})
            _LOG.warning(
                "%s read a different first batch than %s. Each worker keeps its share of every batch and leaves the "
                "rest to the others, so if their data differ, most examples are never used. Give all workers the same "
                "data, or set AutoShardPolicy.OFF if each has its own%s",
                found.process,
                found.chief,
                "" if sets is None else _SETS,
            )

    def compare_epoch(self, epoch: int) -> None:
        """Warns once if the batches of an epoch differ. All must call it at the epoch's end."""
        if self._differs:  # All know it.
            return
        sums = dict(self._sums)
        last = int(extremes(self._strategy, np.array([max(sums, default=-1)], np.int64))[0][0])
        found = difference(self._strategy, {"order": sums.get(last)})
        self._differs = found is not None
        if found is not None:
            _LOG.warning(
                "In epoch %d %s read other batches than %s, so some examples were used twice and others not at all. A "
                "dataset shuffles differently on a worker that alone makes an iterator of it, as next(iter(data)) in a "
                "callback does: do that on all workers, or with another dataset. Leave deterministic=False out of "
                "the data's functions",
                epoch,
                found.process,
                found.chief,
            )


def show(dataset: tf.data.Dataset, look: Callable) -> tf.data.Dataset:
    """Returns the same dataset, which passes what it reads to a function.

    Args:
        dataset: Any dataset.
        look: Takes an element's index, and a NumPy array for each dense component: of the first element all of it, of
            others the beginning of the first row. What it returns isn't used. An iterator that goes on from a
            checkpoint goes on with its index.
    """

    def seen(index: np.int64, *parts: Any) -> np.bool_:
        look(int(index), *parts)
        return np.True_

    def beginning(leaf: tf.Tensor) -> tf.Tensor:
        return tf.reshape(leaf[:1] if leaf.shape.rank else leaf, [-1])[:_SHOWN]

    def keep(index: tf.Tensor, batch: Any) -> tf.Tensor:
        dense = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor) and leaf.dtype != tf.variant]

        # Stateless, so that the dataset's iterators can be saved. Only its result keeps it in the graph.
        def shown(parts: list) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(seen, [index, *parts], tf.bool, stateful=False), ())

        return tf.cond(tf.equal(index, 0), lambda: shown(dense), lambda: shown([beginning(leaf) for leaf in dense]))

    return with_cardinality(dataset.enumerate().filter(keep).map(lambda _, batch: batch), dataset.cardinality())
