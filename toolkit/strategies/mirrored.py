"""A replica on each device of this machine; gradients are summed by all-reduce after every step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["create"]


def create(devices: Sequence[str]) -> "tf.distribute.MirroredStrategy":
    """Makes a `tf.distribute.MirroredStrategy` over these logical devices, such as ("GPU:0", "GPU:1").

    The devices are always named: left to itself, TensorFlow reads TF_CONFIG here and takes another
    host's devices for this one's.
    """
    import tensorflow as tf

    from toolkit.strategies import gradients, hooks
    from toolkit.strategies.reducing import ReducesForKeras

    class MirroredStrategy(ReducesForKeras, tf.distribute.MirroredStrategy):
        """TensorFlow's, with the `reduce` that Keras needs."""

    hooks.install()
    gradients.adapt_optimizers()
    return MirroredStrategy(list(devices))
