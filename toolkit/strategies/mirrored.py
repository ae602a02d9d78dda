"""A replica on each device of this machine; gradients are summed by all-reduce after every step."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["create", "enable"]


def create(devices: Sequence[str]) -> "tf.distribute.MirroredStrategy":
    """Makes a `tf.distribute.MirroredStrategy` over these logical devices, such as ("GPU:0", "GPU:1").

    The devices are always named: left to itself, TensorFlow reads TF_CONFIG here and takes another
    host's devices for this one's.
    """
    return enable(_kind()(list(devices)))


def enable(strategy: "tf.distribute.MirroredStrategy") -> "tf.distribute.MirroredStrategy":
    """Has `fit` under a MirroredStrategy give one device's numbers; returns the same object."""
    from toolkit.strategies import fitting, gradients, hooks

    hooks.install()
    fitting.adapt_keras()
    gradients.adapt_optimizers()
    strategy.__class__ = _kind()  # It adds methods only, no state.
    return strategy


@functools.cache
def _kind() -> type:
    import tensorflow as tf

    from toolkit.strategies import building, hooks, sharing
    from toolkit.strategies.reducing import ReducesForKeras

    class MirroredStrategy(ReducesForKeras, tf.distribute.MirroredStrategy):
        """TensorFlow's, with the `reduce` that Keras needs, and no replica that goes without an example in `fit`."""

        def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
            count = self.num_replicas_in_sync
            iterator = building.epoch_iterator()
            keras = iterator is not None and isinstance(dataset, tf.data.Dataset) and count > 1
            if keras and not building.predicts():
                sharing.check_arrays(iterator.data_adapter, count)
            if not keras or sharing.suffices(iterator.data_adapter, count) or not sharing.may_run_short(dataset, count):
                return super().experimental_distribute_dataset(dataset, options)
            shares = sharing.shares(dataset, indices=range(count), count=count, may_be_empty=building.predicts())
            shares = shares.prefetch(2 * count)
            # TensorFlow looks in each step whether there is a batch: a step that the end of the data cuts off may have
            # counted already.
            return self.distribute_datasets_from_function(lambda _: sharing.untuned(shares))

        def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
            with hooks.input_devices_kept(self):
                return super().distribute_datasets_from_function(dataset_fn, options)

    return MirroredStrategy
