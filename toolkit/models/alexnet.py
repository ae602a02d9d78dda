"""AlexNet for 32x32 pictures: five convolutions, two FC layers of 4,096 units, 36 million parameters.

Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural Networks",
2012, with strides and kernels for pictures of 32x32, and batch normalisation for its local
response normalisation. The trunk does 83 % of the arithmetic with 6 % of the parameters (counted in
tests/models/test_models.py).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras

__all__ = ["head", "trunk"]


def trunk(input_shape: tuple[int, int, int]) -> "keras.Sequential":
    """Five 3x3 convolutions and three poolings: [32, 32, 3] to [4096]."""
    from keras import Input, Sequential, layers

    parts: list = [Input(input_shape), layers.Rescaling(1 / 64, offset=-1.9)]
    stages = ((64, True), (192, True), (384, False), (256, False), (256, True))
    for number, (filters, pool) in enumerate(stages, start=1):
        parts += [
            layers.Conv2D(filters, 3, padding="same", use_bias=False, name=f"conv{number}"),
            layers.BatchNormalization(momentum=0.9, synchronized=True, name=f"norm{number}"),
            layers.Activation("relu"),
        ]
        if pool:
            parts.append(layers.MaxPooling2D())
    return Sequential([*parts, layers.Flatten()], name="trunk")


def head(classes: int, dropout: float) -> "keras.Sequential":
    """Two hidden layers of 4,096 units: [4096] to logits [classes]."""
    from keras import Sequential, config, layers

    parts: list = []
    for number in (1, 2):
        if dropout:
            parts.append(layers.Dropout(dropout))
        parts.append(layers.Dense(4096, activation="relu", name=f"fc{number}"))
    return Sequential([*parts, layers.Dense(classes, dtype=config.floatx(), name="fc3")], name="head")
