"""Plain Keras on one device, the reference for every other strategy's results."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.errors import StrategyError

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["create", "first_device"]


def create(devices: Sequence[str]) -> "tf.distribute.Strategy":
    """Returns TensorFlow's default strategy, which is plain Keras on the first device.

    Args:
        devices: Exactly one logical device, the first of its kind, such as ("GPU:0",).

    Raises:
        StrategyError: There are several, or it isn't the device that TensorFlow uses by default.
    """
    import tensorflow as tf

    first = first_device()
    if tuple(devices) != (first,):
        raise StrategyError(
            asked=f"strategy one_device on {', '.join(devices)}",
            found=f"it uses one device, here {first}",
            remedy="Configure gpus=1, or create mirrored, which takes any devices",
        )
    return tf.distribute.get_strategy()


def first_device() -> str:
    """Returns the logical device of TensorFlow's default strategy: "GPU:0", or "CPU:0" without a GPU."""
    import tensorflow as tf

    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
