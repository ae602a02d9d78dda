"""The names of the models, and `build`."""

import importlib
from typing import TYPE_CHECKING

from toolkit.errors import ModelError

if TYPE_CHECKING:
    import keras

__all__ = ["NAMES", "build"]

NAMES = ("small_cnn", "alexnet", "vit")


def build(
    name: str, *, classes: int = 10, input_shape: tuple[int, int, int] = (32, 32, 3), dropout: float = 0.0
) -> "keras.Sequential":
    """Builds a model with all variables; call it under the strategy's scope.

    Args:
        name: One of `NAMES`.
        classes: Number of outputs.
        input_shape: (height, width, channels) of the uint8 pictures.
        dropout: Share of the units dropped before FC layers in training, in [0, 1).

    Returns:
        A model from uint8 or float pictures [batch, height, width, channels], values 0 to 255, to float32 logits
        [batch, classes].

    Raises:
        ModelError: The name is unknown, or an argument is out of its range.
    """
    ModelError.check_choice(name, NAMES, asked=f"model={name!r}", found="there is no model of that name")
    if not 0 <= dropout < 1:
        raise ModelError(
            asked=f"dropout={dropout} drops that share of the units",
            found="it is not in [0, 1)",
            remedy="Give 0 to switch it off",
        )
    import keras

    parts = importlib.import_module(f"toolkit.models.{name}")
    return keras.Sequential(
        [keras.Input(input_shape), parts.trunk(input_shape), parts.head(classes, dropout)], name=name
    )
