"""The names of the strategies, and what "auto" means."""

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from toolkit.errors import StrategyError

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["NAMES", "create"]

_MODULES = {"one_device": "one_device", "mirrored": "mirrored"}
NAMES = ("auto", *_MODULES)


def create(name: str = "auto", *, devices: Sequence[str] = ()) -> "tf.distribute.Strategy":
    """Makes a strategy. Build and compile the model under its `scope()`; `fit` stays Keras's own.

    Args:
        name: "one_device", "mirrored", or "auto": mirrored where there are several logical
            devices, otherwise one_device.
        devices: Logical devices, as `Setup.logical_devices` gives them; () for all GPUs TensorFlow
            shows, or else all its CPU devices.

    Returns:
        An ordinary `tf.distribute.Strategy`.

    Raises:
        StrategyError: The name is unknown, Keras runs on another backend, or TF_CONFIG describes a
            cluster, which no strategy here serves yet.
    """
    if name not in NAMES:
        raise StrategyError(
            asked=f"strategy {name!r}",
            found="there is no strategy of that name",
            remedy="Choose one of " + ", ".join(NAMES),
        )
    _check_backend()
    _check_cluster(os.environ, name)
    devices = tuple(devices) or _all_devices()
    if name == "auto":
        name = "mirrored" if len(devices) > 1 else "one_device"
    return importlib.import_module(f"toolkit.strategies.{_MODULES[name]}").create(devices)


def _all_devices() -> tuple[str, ...]:
    import tensorflow as tf

    for kind in ("GPU", "CPU"):
        found = tf.config.list_logical_devices(kind)
        if found:
            return tuple(f"{kind}:{i}" for i in range(len(found)))
    raise AssertionError("TensorFlow always has a CPU device")


def _check_backend() -> None:
    import keras

    if keras.backend.backend() != "tensorflow":
        raise StrategyError(
            asked="tf.distribute strategies train Keras models on the TensorFlow backend",
            found=f"Keras runs on {keras.backend.backend()!r}",
            remedy="Start with KERAS_BACKEND=tensorflow, or mend ~/.keras/keras.json",
        )


def _check_cluster(environ: Mapping[str, str], name: str) -> None:
    """TensorFlow reads TF_CONFIG whatever strategy is made, and this version serves no cluster."""
    value = environ.get("TF_CONFIG") or "{}"
    try:
        config = json.loads(value)
        tasks = sum(len(addresses) for addresses in config.get("cluster", {}).values())
    except (ValueError, AttributeError, TypeError):
        raise StrategyError(
            asked=f"TF_CONFIG is set to {value[:60]!r}",
            found="that doesn't describe a cluster",
            remedy="Unset TF_CONFIG to train on this machine alone, or mend it",
        ) from None
    if tasks > 1 and name == "auto":
        raise StrategyError(
            asked="strategy auto follows TF_CONFIG, which is set",
            found="this version trains on one machine only",
            remedy="Unset TF_CONFIG, or create mirrored by name",
        )
