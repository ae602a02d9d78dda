"""A replica on each device of this machine; gradients are summed by all-reduce after every step."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from toolkit.strategies import batches
from toolkit.strategies.fit.adapt import adapt_replicas
from toolkit.strategies.pipelines import (
    by_example,
    epoch_iterator,
    input_devices_kept,
    untuned,
    untuned_for_device,
    whole_for_keras,
)
from toolkit.strategies.step.collectives import number_by_call
from toolkit.strategies.step.replicas import ReducesForKeras, know_steps
from toolkit.strategies.upstream import replaced


class MirroredStrategy(ReducesForKeras, tf.distribute.MirroredStrategy):
    """TensorFlow's strategy with the `reduce` that Keras needs, and with our shares of batches in `fit`."""

    @whole_for_keras
    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Gives each replica its share of a batch from Keras, without empty ones; other datasets are TensorFlow's."""
        count = self.num_replicas_in_sync
        iterator = epoch_iterator()
        ours = iterator is not None and isinstance(dataset, tf.data.Dataset) and count > 1
        if not (ours and any(by_example(dataset))) or batches.divided_by_tensorflow(
            dataset, iterator.data_adapter, count
        ):
            return super().experimental_distribute_dataset(dataset, options)
        shares = batches.split(dataset, indices=range(count), count=count).prefetch(2 * count)
        # TensorFlow checks in each step whether there is a batch; a step that the end of the data interrupts may
        # already have counted.
        return self.distribute_datasets_from_function(lambda _: untuned(shares))

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        """As TensorFlow does, for this dataset only."""
        with input_devices_kept(self):
            return super().distribute_datasets_from_function(dataset_fn, options)


def create(devices: Sequence[str]) -> MirroredStrategy:
    """Creates a strategy over these logical devices, such as ("GPU:0", "GPU:1").

    The devices are always named: left to itself, TensorFlow reads TF_CONFIG here and takes another
    host's devices for this one's.
    """
    # Each strategy's exchanges have their own keys. Otherwise those of a second strategy in the process would be
    # confused with the first's. TensorFlow's tests of its own strategies also count them up.
    MirroredStrategy._collective_key_base = (MirroredStrategy._collective_key_base + 100_000) % 2**30
    return enable(MirroredStrategy(list(devices)))


def enable(strategy: tf.distribute.MirroredStrategy) -> MirroredStrategy:
    """Gives `fit` under a MirroredStrategy one device's numbers; returns the same object."""
    adapt_replicas()
    replaced.DEVICE_DATASET.answer(mirrored=untuned_for_device)  # A worker with one device reads as Keras does.
    strategy.__class__ = MirroredStrategy  # It adds only methods, no state.
    number_by_call(strategy)
    know_steps(strategy)
    return strategy
