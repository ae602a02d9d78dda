"""Data sets by name, and the meaning of "auto"."""

import importlib.util
import logging
import os

from toolkit.data import cifar10, shapes
from toolkit.data.examples import Examples
from toolkit.errors import DataError

__all__ = ["NAMES", "load"]

NAMES = ("auto", "cifar10", "shapes")
_LOG = logging.getLogger(__name__)


def load(name: str = "auto", *, data_dir: str | os.PathLike | None = None, seed: int = 0) -> Examples:
    """Loads a data set into memory.

    Args:
        name: "cifar10", "shapes" (generated, nothing to download), or "auto": a CIFAR-10 that TFDS
            has prepared under `data_dir`, if TFDS is installed, and otherwise shapes; which of the two is logged.
        data_dir: TFDS's directory; None for its default.
        seed: Seed of the generated pictures; CIFAR-10 is what it is.

    Raises:
        DataError: The name is unknown, or CIFAR-10 was asked for and can't be had.
    """
    DataError.check_choice(name, NAMES, asked=f"data={name!r}", found="there is no data set of that name")
    if name == "auto":
        directory = data_dir if data_dir is not None else cifar10.default_directory()
        if data_dir is not None and not os.path.isdir(os.path.expanduser(data_dir)):
            return cifar10.load(data_dir)  # Named, but not a directory: the function below says what is wrong.
        name = "shapes"
        if not cifar10.is_prepared(directory):
            _LOG.info("No prepared CIFAR-10 in %s: training on the embedded data set, shapes", directory)
        elif data_dir is None and importlib.util.find_spec("tensorflow_datasets") is None:
            _LOG.info("TensorFlow Datasets isn't installed, so CIFAR-10 can't be read: training on shapes")
        else:
            name = "cifar10"
    return cifar10.load(data_dir) if name == "cifar10" else shapes.load(seed=seed)
