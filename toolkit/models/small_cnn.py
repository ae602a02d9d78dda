"""Three convolutions and one hidden FC layer: 357 thousand parameters, minutes on a CPU."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras

__all__ = ["head", "trunk"]


def trunk(input_shape: tuple[int, int, int]) -> "keras.Sequential":
    """Convolutions of 32, 64 and 128 filters, each normalised and pooled: [32, 32, 3] to [2048]."""
    from keras import Input, Sequential, layers

    # The mean of pictures is 121, their deviation 64.
    parts: list = [Input(input_shape), layers.Rescaling(1 / 64, offset=-1.9)]
    for number, filters in enumerate((32, 64, 128), start=1):
        parts += [
            layers.Conv2D(filters, 3, padding="same", use_bias=False, name=f"conv{number}"),
            # Synchronised statistics are those of the global batch, so the numbers don't depend on the number of
            # replicas.
            # TensorFlow's collectives, which sum them, keep the size of a group of devices for the life of the process:
            # training on two replicas and then on four needs two processes.
            layers.BatchNormalization(momentum=0.9, synchronized=True, name=f"norm{number}"),
            layers.Activation("relu"),
            layers.MaxPooling2D(),
        ]
    return Sequential([*parts, layers.Flatten()], name="trunk")


def head(classes: int, dropout: float) -> "keras.Sequential":
    """One hidden layer of 128 units: [2048] to logits [classes]."""
    from keras import Sequential, config, layers

    parts: list = [layers.Dense(128, activation="relu", name="fc1")]
    if dropout:
        parts.append(layers.Dropout(dropout))
    return Sequential([*parts, layers.Dense(classes, dtype=config.floatx(), name="fc2")], name="head")
