"""A vision transformer for 32x32 pictures: patches of 4x4, four blocks of four heads, 798 thousand parameters.

Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv 2010.11929, with normalisation before each part of a block. A
depthwise convolution over the patches says where they are, in the place of a table of positions, and their mean is
classified: Chu et al., "Conditional Positional Encodings for Vision Transformers", arXiv 2102.10882.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras

__all__ = ["head", "trunk"]

_PATCH, _FEATURES, _HEADS, _BLOCKS = 4, 128, 4, 4


def trunk(input_shape: tuple[int, int, int]) -> "keras.Model":
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


def head(classes: int, dropout: float) -> "keras.Sequential":
    """One layer: [128] to logits [classes]."""
    from keras import Sequential, config, layers

    parts: list = [layers.Dropout(dropout)] if dropout else []
    return Sequential([*parts, layers.Dense(classes, dtype=config.floatx(), name="fc")], name="head")
