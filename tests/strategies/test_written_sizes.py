"""What has as many rows as the batch because the script has written out the size has one device's numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from toolkit import strategies

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(20, 5)).astype("float32"), RANDOM.normal(size=(20, 1)).astype("float32")


class Sampler(layers.Layer):
    """Adds noise of the batch's size, as GauGAN does."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def call(self, mean):
        return mean + tf.sin(tf.reshape(tf.range(self.batch * 3, dtype="float32"), (self.batch, 3)))


class Centred(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class Generative(keras.Model):
    """Makes pictures of noise and of the batch, and judges them beside the batch."""

    def __init__(self, batch, between):
        super().__init__()
        self.encode, self.sample = layers.Dense(3), Sampler(batch)
        self.make = keras.Sequential([layers.Dense(2), between()])
        x, fake = keras.Input((5,)), keras.Input((2,))
        self.judge = keras.Model([x, fake], layers.Dense(1)(layers.Concatenate()([x, fake])))
        self.seen, self.error = keras.metrics.Mean("seen"), keras.metrics.MeanSquaredError("error")

    def call(self, x):
        return self.judge([x, self.make(self.sample(self.encode(x)))])

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            judged = self(x)
            loss = ops.mean((judged - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.seen.update_state(loss)
        self.error.update_state(y, judged)
        return {"seen": self.seen.result(), "error": self.error.result()}


class Augmented(keras.Model):
    """Augments some examples of a batch of a written-out size, as adaptive augmentation does."""

    def __init__(self, batch, **kwargs):
        super().__init__(**kwargs)
        self.batch, self.seed = batch, keras.random.SeedGenerator(3)
        self.noise, self.first, self.last = layers.GaussianNoise(0.3, seed=2), layers.Dense(4), layers.Dense(1)

    def call(self, x, training=False):
        kept = keras.random.uniform((self.batch, 1), seed=self.seed) < 0.5
        return self.last(tf.nn.relu(self.first(tf.where(kept, x, self.noise(x, training=True)))))


class Router(layers.Layer):
    """Sends each token to one of two experts that has room for it, as a switch transformer does."""

    def build(self, shape):
        self.gate = self.add_weight(shape=(shape[-1], 2), name="gate")

    def call(self, tokens):
        chosen = ops.softmax(tokens @ self.gate)
        mask = ops.one_hot(ops.argmax(chosen, -1), 2)
        self.add_loss(0.1 * ops.sum(ops.mean(mask, 0) * ops.mean(chosen, 0)))
        room = ops.cast(ops.cumsum(mask, 0) * mask <= tokens.shape[0] // 2, "float32") * mask
        return room * chosen


class Switch(layers.Layer):
    def __init__(self, tokens):
        super().__init__()
        self.tokens, self.router = tokens, Router()
        self.experts = [layers.Dense(3, "relu"), layers.Dense(3)]

    def call(self, x):
        flat = ops.reshape(x, (self.tokens, 3))
        sent = self.router(flat)
        made = sum(sent[:, n : n + 1] * expert(flat) for n, expert in enumerate(self.experts))
        return ops.reshape(made, (-1, 4, 3))


def switching(batch):
    x = keras.Input((5,))
    tokens = layers.Reshape((4, 3))(layers.Dense(12)(x))
    return keras.Model(x, layers.Dense(1)(layers.Flatten()(layers.Add()([tokens, Switch(batch * 4)(tokens)]))))


class Recurrent(keras.Model):
    """Begins with a state of the batch's size, and masks by one."""

    def __init__(self, batch):
        super().__init__()
        self.batch, self.cells, self.last = batch, layers.GRU(3), layers.Dense(1)

    def call(self, x):
        state = ops.reshape(ops.arange(self.batch * 3, dtype="float32"), (self.batch, 3)) / 10
        mask = ops.ones((self.batch, 5), "bool")
        return self.last(self.cells(x[:, :, None], initial_state=state, mask=mask))


MODELS = {
    "rows beside the batch's": lambda batch: Generative(batch, layers.LayerNormalization),
    "rows that are compared": lambda batch: Generative(batch, Centred),
    "decisions": Augmented,
    "tokens": switching,
    "a state": Recurrent,
}


def trained(strategy, name, batch):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = MODELS[name](batch)
        model.compile(keras.optimizers.SGD(0.05), "mse")
    given = tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch, drop_remainder=True)
    history = model.fit(given, epochs=2, shuffle=False, verbose=0).history
    return np.concatenate([*map(np.ravel, history.values()), *map(np.ravel, model.get_weights())])


@pytest.mark.slow
@pytest.mark.parametrize("batch", [4, 5])
@pytest.mark.parametrize("name", MODELS)
def test_a_written_out_size_is_the_whole_batchs(four_devices, name, batch):
    one = trained(tf.distribute.get_strategy(), name, batch)
    two = trained(strategies.create("mirrored", devices=four_devices[:2]), name, batch)
    np.testing.assert_allclose(two, one, atol=5e-6)
