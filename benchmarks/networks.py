"""The networks that benchmarks.two_hosts trains, in Keras; `benchmarks.torch_worker` has them in PyTorch.

fc          pictures; convolutions of 32 and 64 filters (3x3, each pooled), FC layers of 4096, 2048, 2048 and 10: 12.6 M
            parameters, 99 % of them FC
conv        pictures; convolutions of 32, 128, 256, 512 and 512 filters (3x3, all but the last pooled), the mean over
            places and an FC layer of 10: 3.9 M parameters, almost all of them convolutions
vit         pictures; `toolkit.models`' vision transformer: 798 thousand parameters and much attention
wide_ffn    16 tokens; two blocks of a text transformer, 256 features and FC layers of 8192: 9.4 M parameters
"""

from typing import Any

import numpy as np

__all__ = [
    "BATCH",
    "BLOCKS",
    "FFN",
    "FILTERS",
    "HEADS",
    "LENGTH",
    "NAMES",
    "VOCABULARY",
    "WIDTH",
    "examples",
    "in_keras",
]

BATCH = {"fc": 64, "conv": 64, "vit": 16, "wide_ffn": 8}  # Examples of each replica.
NAMES = list(BATCH)
FILTERS = {"fc": (32, 64), "conv": (32, 128, 256, 512, 512)}
VOCABULARY, LENGTH, WIDTH, HEADS, FFN, BLOCKS = 2000, 16, 256, 4, 8192, 2  # Of wide_ffn.


def examples(name: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a replica's examples, the same in every library: pictures [n, 32, 32, 3] or tokens [n, 16]; labels."""
    random = np.random.default_rng(rank)
    if name == "wide_ffn":
        x: np.ndarray = random.integers(0, VOCABULARY, (BATCH[name], LENGTH)).astype("int32")
    else:
        x = random.normal(size=(BATCH[name], 32, 32, 3)).astype("float32")
    return x, random.integers(0, 10, BATCH[name])


def in_keras(name: str) -> Any:
    """Returns a network of Keras's own layers, built, with logits of ten classes."""
    import keras
    from keras import layers

    import toolkit

    if name == "vit":
        return toolkit.models.build("vit", classes=10)
    if name in FILTERS:
        parts: list = [keras.Input((32, 32, 3))]
        for filters in FILTERS[name]:
            parts += [layers.Conv2D(filters, 3, padding="same", activation="relu"), layers.MaxPooling2D()]
        if name == "conv":
            parts[-1] = layers.GlobalAveragePooling2D()
        else:
            parts += [layers.Flatten(), *(layers.Dense(2048, activation="relu") for _ in range(2))]
        return keras.Sequential([*parts, layers.Dense(10)])
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y)])
        y = layers.Dense(FFN, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(y)])
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
