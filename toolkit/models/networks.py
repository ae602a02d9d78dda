"""CIFAR-10 models by name: each a trunk of convolutions or blocks, and a fully connected head.

small_cnn: three convolutions and one hidden FC layer, 357 thousand parameters, minutes on a CPU.

alexnet: AlexNet for 32x32 pictures, five convolutions, two FC layers of 4,096 units, 36 million parameters. Krizhevsky,
Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural Networks", 2012, with strides and kernels for
pictures of 32x32, and batch normalisation for its local response normalisation. The trunk does 83 % of the arithmetic
with 6 % of the parameters (counted in tests/models/test_models.py).

vit: a vision transformer, patches of 4x4, four blocks of four heads, 798 thousand parameters. Dosovitskiy et al., "An
Image is Worth 16x16 Words", arXiv 2010.11929, with normalisation before each part of a block. A depthwise convolution
over the patches says where they are, in the place of a table of positions, and their mean is classified: Chu et al.,
"Conditional Positional Encodings for Vision Transformers", arXiv 2102.10882.
"""

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

    trunk, head = _PARTS[name]
    return keras.Sequential([keras.Input(input_shape), trunk(input_shape), head(classes, dropout)], name=name)


def _small_cnn_trunk(input_shape: tuple[int, int, int]) -> "keras.Sequential":
    """Convolutions of 32, 64 and 128 filters, each normalised and pooled: [32, 32, 3] to [2048]."""
    from keras import Input, Sequential, layers

    # The mean of pictures is 121, their deviation 64.
    parts: list = [Input(input_shape), layers.Rescaling(1 / 64, offset=-1.9)]
    for number, filters in enumerate((32, 64, 128), start=1):
        parts += [
            layers.Conv2D(filters, 3, padding="same", use_bias=False, name=f"conv{number}"),
            # Synchronised statistics are those of the global batch, so the numbers don't depend on the number of
            # replicas. TensorFlow's collectives, which sum them, keep the size of a group of devices for the life of
            # the process: training on two replicas and then on four needs two processes.
            layers.BatchNormalization(momentum=0.9, synchronized=True, name=f"norm{number}"),
            layers.Activation("relu"),
            layers.MaxPooling2D(),
        ]
    return Sequential([*parts, layers.Flatten()], name="trunk")


def _small_cnn_head(classes: int, dropout: float) -> "keras.Sequential":
    """One hidden layer of 128 units: [2048] to logits [classes]."""
    from keras import Sequential, config, layers

    parts: list = [layers.Dense(128, activation="relu", name="fc1")]
    if dropout:
        parts.append(layers.Dropout(dropout))
    return Sequential([*parts, layers.Dense(classes, dtype=config.floatx(), name="fc2")], name="head")


def _alexnet_trunk(input_shape: tuple[int, int, int]) -> "keras.Sequential":
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


def _alexnet_head(classes: int, dropout: float) -> "keras.Sequential":
    """Two hidden layers of 4,096 units: [4096] to logits [classes]."""
    from keras import Sequential, config, layers

    parts: list = []
    for number in (1, 2):
        if dropout:
            parts.append(layers.Dropout(dropout))
        parts.append(layers.Dense(4096, activation="relu", name=f"fc{number}"))
    return Sequential([*parts, layers.Dense(classes, dtype=config.floatx(), name="fc3")], name="head")


_PATCH, _FEATURES, _HEADS, _BLOCKS = 4, 128, 4, 4


def _vit_trunk(input_shape: tuple[int, int, int]) -> "keras.Model":
    """Patches as words, and four blocks of attention and FC layers: [height, width, channels] to [128]."""
    import keras
    from keras import layers

    inputs = keras.Input(input_shape)
    x = layers.Rescaling(1 / 64, offset=-1.9)(inputs)
    x = layers.Conv2D(_FEATURES, _PATCH, strides=_PATCH, padding="same", name="patches")(x)
    places = layers.DepthwiseConv2D(3, padding="same", name="places")(x)
    x = layers.Add()([layers.Reshape((-1, _FEATURES))(each) for each in (x, places)])
    for number in range(1, _BLOCKS + 1):
        y = layers.LayerNormalization(epsilon=1e-6, name=f"norm{number}a")(x)
        y = layers.MultiHeadAttention(_HEADS, _FEATURES // _HEADS, name=f"attention{number}")(y, y)
        x = layers.Add()([x, y])
        y = layers.LayerNormalization(epsilon=1e-6, name=f"norm{number}b")(x)
        y = layers.Dense(4 * _FEATURES, activation="gelu", name=f"up{number}")(y)
        x = layers.Add()([x, layers.Dense(_FEATURES, name=f"down{number}")(y)])
    x = layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    return keras.Model(inputs, layers.GlobalAveragePooling1D()(x), name="trunk")


def _vit_head(classes: int, dropout: float) -> "keras.Sequential":
    """One layer: [128] to logits [classes]."""
    from keras import Sequential, config, layers

    parts: list = [layers.Dropout(dropout)] if dropout else []
    return Sequential([*parts, layers.Dense(classes, dtype=config.floatx(), name="fc")], name="head")


_PARTS = {
    "small_cnn": (_small_cnn_trunk, _small_cnn_head),
    "alexnet": (_alexnet_trunk, _alexnet_head),
    "vit": (_vit_trunk, _vit_head),
}
