"""How a worker reads: the whole dataset, of which it keeps its share of each batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.input import batch_split
from toolkit.strategies.input.components import by_example
from toolkit.strategies.input.draws import draws_of
from toolkit.strategies.input.early_split import undecoded
from toolkit.strategies.input.epoch_iterator import epoch_iterator, whole_for_keras
from toolkit.strategies.input.pipelines import in_order, untuned
from toolkit.strategies.input.same_order import Order, show
from toolkit.strategies.input.uneven_inputs import JoinedDataset
from toolkit.strategies.processes.agreement import extremes, process_index, processes

__all__ = ["ReadsShares"]

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
