"""The trained model as a file for plain Keras."""

import logging
import pathlib
from typing import TYPE_CHECKING

from toolkit.support import files

if TYPE_CHECKING:
    import keras

__all__ = ["write"]

_LOG = logging.getLogger(__name__)


def write(model: "keras.Model", path: pathlib.Path) -> None:
    """Writes a model, whole or not at all.

    Of a model that Keras can't save, such as one with a layer of the user's own without `get_config`, it writes the
    weights instead, beside `path` as model.weights.h5.

    Args:
        model: Trained.
        path: A file that ends in .keras.

    Raises:
        OSError: It can't be written. An earlier file is untouched.
    """
    try:
        with files.replacing(path, name=".writing.keras") as aside:  # Keras tells the format by the name's end.
            model.save(aside)
            files.sync(aside)
    except OSError:
        raise
    except Exception as error:  # Whatever a user's own classes raise.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        _LOG.warning(
            "%s can't be written (%s); model.weights.h5 has the weights, for load_weights", path.name, lines[0]
        )
        with files.replacing(path.with_name("model.weights.h5"), name=".writing.weights.h5") as aside:
            model.built = True  # It has trained. To Keras a model that can't be called isn't built.
            model.save_weights(aside)
            files.sync(aside)
    files.sync(path.parent)
