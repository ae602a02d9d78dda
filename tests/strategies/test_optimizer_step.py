"""The exchange of gradients, and the methods of Keras's that it depends on."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import StrategyError

PLAIN, SCALED = keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer


def trained(strategy, optimizer):
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(2)])
        model.compile(optimizer(), "mse")
    x, y = random.normal(size=(32, 5)).astype("float32"), random.normal(size=(32, 2)).astype("float32")
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    return np.concatenate([w.numpy().ravel() for w in model.weights])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "least"), [("float32", 0), ("float16", 1e-7), ("bfloat16", 1e-6)])
def test_gradients_are_exchanged_as_asked(four_devices, dtype, least):
    exchange = strategies.GradientExchange(dtype=dtype)
    mirrored = strategies.create("mirrored", devices=four_devices[:2], gradients=exchange)
    far = np.max(
        np.abs(trained(mirrored, keras.optimizers.SGD) - trained(tf.distribute.get_strategy(), keras.optimizers.SGD))
    )
    assert least <= far < max(2e-7, 2e4 * least)


@pytest.mark.parametrize("arguments", [{"dtype": "int8"}, {"bytes_per_pack": -1}])
def test_what_can_not_be_is_said(arguments):
    with pytest.raises(StrategyError, match="gradients"):
        strategies.GradientExchange(**arguments)


WORDS = np.random.default_rng(1).integers(0, 9, size=(32, 4))


class WithPositions(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.words, self.positions = keras.layers.Embedding(9, 3), keras.layers.Embedding(4, 3)

    def call(self, x):
        return self.words(x) + self.positions(keras.ops.arange(0, keras.ops.shape(x)[-1]))


def after_training(strategy, optimizer, *, images=None, dtype="float32", batch=8):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        if images is None:
            first = [keras.Input((4,), dtype="int32"), WithPositions(), keras.layers.GlobalAveragePooling1D()]
        else:
            first = [keras.Input((4,)), keras.layers.Dense(8, activation="relu", dtype=dtype)]
        model = keras.Sequential([*first, keras.layers.Dense(2, dtype=dtype)])
        made = optimizer()
        model.compile(keras.optimizers.LossScaleOptimizer(made) if dtype == "mixed_float16" else made, "mse")
    data = WORDS if images is None else images
    model.fit(data, np.stack([data.sum(1), data[:, 0]], 1) / 10.0, batch_size=batch, epochs=2, verbose=0, shuffle=False)
    return model


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("averaged", "Nadam, averaged")]
OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "averaged": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "Nadam, accumulating": lambda: keras.optimizers.Nadam(0.01, gradient_accumulation_steps=2, clipnorm=0.01),
    "Nadam, averaged": lambda: keras.optimizers.Nadam(0.01, use_ema=True, ema_overwrite_frequency=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adam", "Nadam, accumulating", *LONG])
def test_words_and_positions_are_learned_as_on_one_device(four_devices, name):
    """A word's gradients stay beside one another, as one device has them; a position's are added before any square."""
    many = after_training(strategies.create("mirrored", devices=four_devices[:2]), OPTIMIZERS[name])
    one = after_training(tf.distribute.get_strategy(), OPTIMIZERS[name])
    for mine, theirs in zip(many.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-7)


class OfAnyLength(keras.Model):
    """Texts of any length, with a table of positions and one that is looked up by words and by classes."""

    def __init__(self, compared):
        super().__init__()
        self.compared = compared
        self.words, self.positions, self.last = (
            keras.layers.Embedding(12, 3),
            keras.layers.Embedding(9, 3),
            keras.layers.Dense(2),
        )

    def call(self, x):
        found = self.words(x) + self.positions(tf.range(start=0, limit=tf.shape(x)[-1], delta=1))
        found = tf.reduce_mean(found, 1)
        if self.compared:  # The step is given the whole batch, and looks positions up by itself.
            found *= 1.0 + tf.reduce_mean(found, 0)
        return self.last(found + tf.reduce_sum(self.words(tf.constant([1, 3, 3])), 0))


@pytest.mark.slow
@pytest.mark.parametrize("compared", [False, True])
def test_rows_that_no_example_chooses_are_added_whatever_a_batchs_length(four_devices, compared):
    lengths = np.random.default_rng(2).integers(3, 8, 32)
    texts = [list(row[:length]) for row, length in zip(np.tile(WORDS, 2), lengths, strict=True)]

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = OfAnyLength(compared)
            model.compile(keras.optimizers.Adam(0.01), "mse")
        given = tf.data.Dataset.from_tensor_slices(tf.ragged.constant(texts))
        given = given.map(lambda x: (x, tf.cast(x[:2], tf.float32))).padded_batch(7)
        model.fit(given, epochs=2, shuffle=False, verbose=0)
        return np.concatenate([*map(np.ravel, model.get_weights())])

    two = trained(strategies.create("mirrored", devices=four_devices[:2]))
    np.testing.assert_allclose(two, trained(tf.distribute.get_strategy()), atol=1e-6)


@pytest.mark.slow
def test_a_step_in_which_one_replica_overflows_is_left_out_by_all(four_devices):
    images = np.random.default_rng(2).uniform(size=(32, 4)).astype("float32")
    images = np.concatenate([images, images[:1]])  # The last batch leaves the second replica without an example.
    images[14:16] = 3e4  # The second replica's, of the second step.
    seen = []
    for strategy in (strategies.create("mirrored", devices=four_devices[:2]), tf.distribute.get_strategy()):
        model = after_training(strategy, lambda: keras.optimizers.SGD(0.01), images=images, dtype="mixed_float16")
        seen.append((float(model.optimizer.dynamic_scale.numpy()), int(model.optimizer.iterations.numpy())))
        assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert seen[0] == seen[1]
    assert seen[0][1] < 10
    assert seen[0][0] < 2.0**15


@pytest.mark.slow
def test_a_gradient_too_small_for_16_bits_is_sent_scaled(four_devices):
    exchange = strategies.GradientExchange(dtype="float16")
    mirrored = strategies.create("mirrored", devices=four_devices[:2], gradients=exchange)
    images = np.random.default_rng(2).uniform(size=(32, 4)).astype("float32") * 1e-4
    weights = []
    for strategy in (mirrored, tf.distribute.get_strategy()):
        model = after_training(strategy, lambda: keras.optimizers.SGD(1e6), images=images, dtype="mixed_float16")
        weights.append(model.get_weights()[0])
    start = after_training(
        tf.distribute.get_strategy(), lambda: keras.optimizers.SGD(0.0), images=images
    ).get_weights()[0]
    moved = np.abs(weights[1] - start).max()
    assert moved > 0
    assert np.abs(weights[0] - weights[1]).max() < 0.02 * moved
