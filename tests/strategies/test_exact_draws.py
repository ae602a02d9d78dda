"""Several replicas draw one device's random numbers: dropout, noise, augmentation."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import parallel, strategies
from toolkit.strategies import LocalSteps

L = keras.layers
random = np.random.default_rng(0)
COUNT = 53  # In batches of 16: the last one has 5, of which three replicas have 2, 2 and 1.
CLASSES = random.integers(0, 3, COUNT)


def vectors(kind):
    return (7,), [L.Dense(33, "relu"), L.Dropout(0.5), L.GaussianNoise(0.3), L.Dense(5), L.Dropout(0.2)]


def pictures(kind):
    if kind == "float32":
        turned = [L.RandomRotation(0.2), L.RandomShear(0.1, 0.1), L.RandomHue(0.1, value_range=(0, 1))]
    else:
        turned = []  # Keras turns no picture in float64.
    moved = [L.RandomFlip(), L.RandomTranslation(0.1, 0.1), L.RandomZoom(0.2), *turned]
    coloured = [L.RandomContrast(0.3), L.RandomBrightness(0.2, value_range=(0, 1))]
    noises = [L.SpatialDropout2D(0.3), L.GaussianDropout(0.2), L.AlphaDropout(0.1)]
    return (9, 9, 3), [*moved, *coloured, L.Conv2D(5, 3), *noises, L.Flatten()]


def sequences(kind):
    recurrent = L.LSTM(5, dropout=0.3, recurrent_dropout=0.2, return_sequences=True)
    return (6, 4), [recurrent, L.TimeDistributed(L.Dropout(0.3)), L.Flatten()]


class Attends(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        # The bias of keys has no gradient but rounding, which Adam makes as large as any.
        self.attention = L.MultiHeadAttention(2, 4, dropout=0.3, use_bias=False)
        self.dropout = L.Dropout(0.2, noise_shape=(None, 1, 8))

    def call(self, x, training=None):
        return self.dropout(self.attention(x, x, training=training), training=training)


def attention(kind):
    return (6, 8), [Attends(), L.Flatten()]


class Distributions(keras.layers.Layer):
    """Draws of each distribution, along rows and along other axes, and without rows."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(4)

    def call(self, x):
        n, seed, x = keras.ops.shape(x)[0], self.seed, keras.ops.convert_to_tensor(x)
        drawn = [
            x * keras.random.uniform((7,), dtype=x.dtype, seed=seed),
            keras.random.truncated_normal((n, 3), seed=seed),
            keras.random.truncated_normal((n, 3), dtype="float64", seed=seed),
            keras.random.normal((n, 5), dtype="float64", seed=seed),
            keras.random.normal((n, 5), dtype="bfloat16", seed=seed),
            keras.random.randint((n, 3), 0, 9, dtype="int64", seed=seed),
            keras.ops.transpose(keras.random.randint((5, n), 0, 9, seed=seed)),
            keras.ops.reshape(keras.random.uniform((n * 3, 3), seed=seed), (-1, 9)),
            keras.random.gamma((n,), keras.ops.exp(x[:, 0]), seed=seed)[:, None],
            keras.random.binomial((n, 2), 3.0, 0.4, seed=seed),
            keras.random.beta((n, 1), 0.4, 0.7, seed=seed),
            keras.random.categorical(x[:, :4], 2, seed=seed),
            keras.random.normal((n, 3), seed=7),
            tf.random.stateless_poisson([n, 2], [1, 2], 3.0),
        ]
        return keras.ops.concatenate([keras.ops.cast(each, x.dtype) for each in drawn], 1)


def distributions(kind):
    return (7,), [Distributions()]


def data_of(shape, kind="float32"):
    return np.random.default_rng(1).uniform(size=(COUNT, *shape)).astype(kind)


def trained(strategy, layers, kind="float32", *, epochs=2, **compiled):
    keras.utils.set_random_seed(1)
    keras.config.set_floatx(kind)
    keras.config.set_dtype_policy(kind)
    try:
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            shape, made = layers(kind)
            model = keras.Sequential([keras.Input(shape), *made, L.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"], **{"jit_compile": False, **compiled})
        history = model.fit(data_of(shape, kind), CLASSES, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
        weights = [each for each in model.get_weights() if each.dtype.kind == "f"]
        return model, np.concatenate([history.history["loss"], *(each.ravel() for each in weights)])
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


LONG = pytest.mark.long


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "kind", "count"),
    [
        (distributions, "float32", 3),
        pytest.param(distributions, "float32", 2, marks=LONG),
        *(
            pytest.param(layers, kind, count, marks=[] if (layers, kind, count) == (pictures, "float32", 3) else LONG)
            for layers in (vectors, pictures, sequences, attention)
            for kind in ("float32", "float64")
            for count in (2, 3)
        ),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_model_draws_as_on_one_device(four_devices, layers, kind, count):
    _, one = trained(None, layers, kind)
    _, several = trained(strategies.create("mirrored", devices=four_devices[:count]), layers, kind)
    np.testing.assert_allclose(several, one, rtol=0, atol={"float32": 1e-5, "float64": 1e-10}[kind])
