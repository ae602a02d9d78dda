"""The names of the strategies, and what "auto" means."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from toolkit.cluster import Membership, discover
from toolkit.errors import StrategyError
from toolkit.strategies import mirrored, one_device

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["NAMES", "create"]

NAMES = ("auto", "one_device", "mirrored", "multi_worker")


def create(
    name: str = "auto",
    *,
    devices: Sequence[str] = (),
    membership: Membership | None = None,
    start_timeout: float | None = None,
) -> "tf.distribute.Strategy":
    """Makes a strategy. Build and compile the model under its `scope()`; `fit` stays Keras's own.

    Args:
        name: "one_device", "mirrored", "multi_worker", or "auto": multi_worker where the process is
            one of several that train together, otherwise mirrored where there are several logical
            devices, otherwise one_device.
        devices: Logical devices, as `Setup.logical_devices` gives them; () for all GPUs TensorFlow
            shows, or else all its CPU devices.
        membership: Who takes part and who this process is; None for what the environment says, as
            `toolkit.cluster.discover` reads it.
        start_timeout: Seconds to wait for the other tasks; None for 300, or what the launcher says.

    Returns:
        An ordinary `tf.distribute.Strategy`.

    Raises:
        StrategyError: The name is unknown, Keras runs on another backend, or the strategy doesn't
            fit the cluster.
        ClusterError: TF_CONFIG is wrong, or another task can't be met.
    """
    if name not in NAMES:
        raise StrategyError(
            asked=f"strategy {name!r}",
            found="there is no strategy of that name",
            remedy="Choose one of " + ", ".join(NAMES),
        )
    _check_backend()
    # TensorFlow reads TF_CONFIG whatever strategy is made, so a broken one is said in any case.
    membership = membership or discover(os.environ)
    if name == "multi_worker" or (name == "auto" and membership is not None and len(membership.cluster.tasks) > 1):
        return _multi_worker(name, membership, devices, start_timeout)
    devices = tuple(devices) or _all_devices()
    if name == "mirrored" or (name == "auto" and len(devices) > 1):
        return mirrored.create(devices)
    return one_device.create(devices)


def _multi_worker(
    name: str, membership: Membership | None, devices: Sequence[str], start_timeout: float | None
) -> "tf.distribute.Strategy":
    if membership is None:
        raise StrategyError(
            asked=f"strategy {name} trains in several processes",
            found="nothing says who takes part: TF_CONFIG is not set",
            remedy="Start with toolkit launch --workers=2, set TF_CONFIG, or name a file of tf_configs/",
        )
    from toolkit.strategies import multi_worker

    return multi_worker.create(membership.cluster, membership.task, devices=tuple(devices), start_timeout=start_timeout)


def _all_devices() -> tuple[str, ...]:
    import tensorflow as tf

    for kind in ("GPU", "CPU"):
        found = tf.config.list_logical_devices(kind)
        if found:
            return tuple(f"{kind}:{i}" for i in range(len(found)))
    raise AssertionError("TensorFlow always has a CPU device")


def _check_backend() -> None:
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    if backend == "tensorflow":  # Else importing Keras may fail, where that backend isn't installed.
        import keras

        backend = keras.backend.backend()
    if backend != "tensorflow":
        raise StrategyError(
            asked="tf.distribute strategies train Keras models on the TensorFlow backend",
            found=f"Keras runs on {backend!r}",
            remedy="Start with KERAS_BACKEND=tensorflow, or mend ~/.keras/keras.json",
        )
