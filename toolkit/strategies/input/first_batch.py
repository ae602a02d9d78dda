"""Compares the first batch of each process's data: if they differ, each process keeps a share of other examples."""

import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from toolkit.strategies.input.batch_split import with_cardinality
from toolkit.strategies.input.draws import Draw, other_in_each_process
from toolkit.strategies.processes.consistency import difference

__all__ = ["FirstBatch", "show_first"]

_LOG = logging.getLogger(__name__)
_SETS = (
    ". Sets of texts have another order in each worker, and so do labels that are numbered by it: use sorted(), or set "
    "PYTHONHASHSEED=0 before Python starts, as `toolkit launch` does"
)


class FirstBatch:
    """The first batch of each process's data, of which each will keep its share.

    Args:
        strategy: The strategy whose processes read the data.
        draws: Functions of the data that draw random numbers.
    """

    def __init__(self, strategy: tf.distribute.Strategy, draws: Sequence[Draw] = ()) -> None:
        self._strategy = strategy
        self._draws = draws
        self._sum = 0

    def take(self, *parts: np.ndarray) -> None:
        """Records it when it is read."""
        for part in parts:
            raw = repr(part.tolist()).encode() if part.dtype == object else np.ascontiguousarray(part).tobytes()
            self._sum = zlib.crc32(raw, self._sum)

    def compare(self) -> None:
        """Warns if the processes' first batches differ. All must call it when they have read one."""
        found = difference(self._strategy, {"first batch": self._sum})
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


def show_first(dataset: tf.data.Dataset, look: Callable) -> tf.data.Dataset:
    """Returns the same dataset, which passes its first element to a function when it is read.

    Args:
        dataset: Any dataset.
        look: Takes a NumPy array for each dense component of the first element; what it returns isn't used. An
            iterator that goes on from a checkpoint doesn't call it.
    """

    def seen(*parts: Any) -> np.bool_:
        look(*parts)
        return np.True_

    def keep(index: tf.Tensor, batch: Any) -> tf.Tensor:
        dense = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor) and leaf.dtype != tf.variant]
        # Stateless, so that the dataset's iterators can be saved. Only its result keeps it in the graph.
        first = lambda: tf.ensure_shape(tf.numpy_function(seen, dense, tf.bool, stateful=False), ())  # noqa: E731
        return tf.cond(tf.equal(index, 0), first, lambda: tf.constant(True))

    return with_cardinality(dataset.enumerate().filter(keep).map(lambda _, batch: batch), dataset.cardinality())
