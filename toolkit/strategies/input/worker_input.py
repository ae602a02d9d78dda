"""How a worker reads: the whole dataset, of which it keeps its share of each batch.

If the processes read different data, each keeps a share of other examples. `Order` compares what they read: the first
batch when all have trained on it, and an epoch's batches at its end, because tf.data's `shuffle` draws a new order for
every iterator of a dataset: one that a single worker makes shifts that worker's orders. Where each worker reads its own
data, a `JoinedDataset` ends an epoch on all workers with the shortest.
"""

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.input import batch_split
from toolkit.strategies.input.batch_split import Part, undecoded, with_cardinality
from toolkit.strategies.input.pipelines import (
    Draw,
    by_example,
    draws_of,
    epoch_iterator,
    in_order,
    other_in_each_process,
    untuned,
    whole_for_keras,
)
from toolkit.strategies.processes.agreement import difference, extremes, process_index, processes

__all__ = ["JoinedDataset", "Order", "ReadsShares", "show"]

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


class JoinedDataset:
    """A distributed dataset for Keras that ends on all workers when the first one runs out.

    TensorFlow gives a worker that has run out empty batches, whose mean is NaN, and Keras ends its
    epoch by itself, so that the others wait for ever. Here the workers ask one another, while a batch
    is read, whether each has one more: 1 to 2 ms a step.

    A generator, whose length nobody knows, is read by one iterator on all workers, so that they see
    the same batches.

    Args:
        strategy: The strategy whose workers read.
        source: The strategy's own distributed dataset.
    """

    def __init__(self, strategy: tf.distribute.Strategy, source: Any) -> None:
        self._strategy = strategy
        self._source = source
        self._warned = False

    @property
    def element_spec(self) -> Any:
        """TensorFlow's spec of an element."""
        return self._source.element_spec

    def __iter__(self) -> "_JoinedIterator":
        return _JoinedIterator(self, iter(self._source))

    def _warn(self) -> None:
        if not self._warned:
            _LOG.warning("The workers have different numbers of batches: an epoch ends when one runs out")
        self._warned = True


class _JoinedIterator(Iterator):
    def __init__(self, dataset: JoinedDataset, source: Iterator) -> None:
        self._dataset = dataset
        self._source = source
        self._begun = False

    def __next__(self) -> Any:
        # Workers can't exchange anything when an iterator is created: Keras creates some that it doesn't use, and not
        # on
        # every worker.
        if not self._begun:
            self._begun = True
            self._read_ahead()
        if not self._more:
            # Keras takes this for the end; a StopIteration would be lost on the way.
            raise tf.errors.OutOfRangeError(None, None, "a worker has run out of data")
        batch = self._held
        self._read_ahead()
        return batch

    def _read_ahead(self) -> None:
        self._held = next(self._source, None)
        lowest, highest = extremes(self._dataset._strategy, np.array([self._is_whole(self._held)], np.int64))
        self._more = bool(lowest[0])
        if lowest[0] != highest[0]:
            self._dataset._warn()

    def _is_whole(self, batch: Any) -> bool:
        """Returns whether this worker has a batch, of which TensorFlow may have given a replica nothing."""
        if batch is None or isinstance(batch, Part):
            return batch is not None
        first = tf.nest.flatten(batch)[0]
        return all(int(tf.shape(part)[0]) > 0 for part in self._dataset._strategy.experimental_local_results(first))


_READ_AHEAD = 2  # Batches, where TensorFlow has no thread that copies them to devices.
_Policy = tf.data.experimental.AutoShardPolicy


class ReadsShares:
    """A mixin in front of TensorFlow's strategies of several processes.

    Attributes:
        order: That of the data which Keras's loop was given last; None where each worker has its own data.
    """

    order: Order | None = None
    extended: Any
    num_replicas_in_sync: int
    distribute_datasets_from_function: Callable

    @whole_for_keras
    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Gives each replica its share of every global batch, unless the dataset's own options say otherwise.

        Every worker reads the whole dataset and keeps its share, so that no example counts twice;
        of what it reads it decodes its own share only, where that can be told. Under
        AutoShardPolicy.OFF each worker's batches are its own, and together they are the global
        batch; under FILE TensorFlow deals the files out. Both may leave one worker with less: an
        epoch of `fit` then ends for all with the first that runs out. A training loop of your own
        gets TensorFlow's own dataset there, and else empty shares of batches that are too small.
        """
        if not isinstance(dataset, tf.data.Dataset) or not any(by_example(dataset)):
            return super().experimental_distribute_dataset(dataset, options)  # type: ignore[misc]
        policy = dataset.options().experimental_distribute.auto_shard_policy
        self.order = None
        local = len(self.extended.worker_devices)
        # Only Keras's loop, in Python, may end together: a user's loop may be a tf.function.
        iterator = epoch_iterator()
        for_keras = iterator is not None and processes(self) > 1
        if policy not in (_Policy.AUTO, _Policy.DATA):
            if not for_keras or policy != _Policy.OFF:
                theirs = super().experimental_distribute_dataset(dataset, options)  # type: ignore[misc]
                return JoinedDataset(self, theirs) if for_keras else theirs
            own = batch_split.split(dataset, indices=range(local), count=local)
            return JoinedDataset(self, self.distribute_datasets_from_function(lambda _: own, options))
        undivided, decode = undecoded(dataset)
        if for_keras:
            self.order = Order(self, draws_of(dataset))
            undivided = show(in_order(undivided), self.order.take)

        def share(context: tf.distribute.InputContext) -> tf.data.Dataset:
            mine = batch_split.shares_of_worker(context)
            return decode(batch_split.split(undivided, indices=mine, count=self.num_replicas_in_sync))

        if iterator is None:
            return self.distribute_datasets_from_function(
                lambda context: batch_split.without_copies(share(context)), options
            )
        if not for_keras:
            return self.distribute_datasets_from_function(share, options)
        shared = self._read_evenly(share)
        # Keras also knows the length of arrays, whose datasets don't have it.
        batches = iterator.data_adapter.num_batches
        self._check_lengths(-1 if batches is None else int(batches))
        unknown = batches is None and dataset.cardinality() != tf.data.INFINITE_CARDINALITY
        return JoinedDataset(self, shared) if unknown else shared

    def _has_one_device(self) -> bool:
        return len(self.extended.worker_devices) == 1

    def _read_evenly(self, share: Callable) -> Any:
        """Returns what Keras reads this worker's shares from; no worker has more batches than another."""
        if self._has_one_device():
            # As Keras reads for one device without a strategy. TensorFlow's distributed iterators, which copy batches
            # to
            # devices, take 80 ms to create in each epoch, and at times crash if one is dropped before its end, as Keras
            # does in
            # each epoch (2.21: a SIGSEGV in MultiDeviceBuffer::BackgroundThread, in one of some hundred evaluations on
            # arrays).
            pipelines, index = processes(self), process_index(self)
            return untuned(share(tf.distribute.InputContext(pipelines, index, pipelines)).prefetch(_READ_AHEAD))
        extended = self.extended
        before = extended.experimental_enable_get_next_as_optional
        # Otherwise all workers ask one another in each step whether each has a batch.
        extended.experimental_enable_get_next_as_optional = False
        try:
            return self.distribute_datasets_from_function(lambda context: untuned(share(context)))
        finally:
            extended.experimental_enable_get_next_as_optional = before

    def _check_lengths(self, batches: int) -> None:
        """Checks that the workers read equally long data; otherwise they would wait for ever."""
        lowest, highest = (int(value[0]) for value in extremes(self, np.array([batches], np.int64)))
        if lowest != highest:
            raise StrategyError(
                asked="every worker is to read the whole data set, and to keep its share of each batch",
                found=f"the workers' data have different lengths, such as {lowest} and {highest} batches",
                remedy="Give all workers the same data, or set AutoShardPolicy.OFF where each has its own data",
            )
