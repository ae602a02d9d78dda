"""Everything on one device: the reference that every other strategy's numbers are held against."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.errors import StrategyError

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["create"]


def create(devices: Sequence[str]) -> "tf.distribute.OneDeviceStrategy":
    """Makes a `tf.distribute.OneDeviceStrategy`.

    Args:
        devices: Exactly one logical device, such as ("GPU:0",).

    Raises:
        StrategyError: There is more than one.
    """
    import tensorflow as tf

    if len(devices) != 1:
        raise StrategyError(
            asked="strategy one_device uses one device",
            found=f"{len(devices)} were given ({', '.join(devices)})",
            remedy="Configure gpus=1, or create mirrored",
        )
    return tf.distribute.OneDeviceStrategy(f"/{devices[0]}")
