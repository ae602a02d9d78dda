"""A script's own loop around `strategy.run` is compared with one device's, too."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import StrategyError

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(18, 6)).astype("float32"), RANDOM.integers(0, 3, 18)
GLOBAL = 9


class Trainer:
    """A loop as TensorFlow's guides have it, in an object of a script's."""

    def __init__(self, by, layers=()):
        keras.utils.set_random_seed(1)
        self.strategy = strategies.create("mirrored", devices=("CPU:0", "CPU:1"), check="first_step")
        with self.strategy.scope():
            self.model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), *(kind() for kind in layers)])
            self.model.add(keras.layers.Dense(3))
            self.optimizer = keras.optimizers.Adam(0.01)
            self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.by = by

    def step(self, batch, training):
        x, y = batch
        with tf.GradientTape() as tape:
            logits = self.model(x, training=training)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            by = GLOBAL if self.by == "the batch" else tf.shape(losses)[0]
            loss = tf.reduce_sum(losses) / tf.cast(by, losses.dtype)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.accuracy.update_state(y, logits)
        return loss

    @tf.function
    def train(self, batch, training=True):
        losses = self.strategy.run(self.step, args=(batch, training))
        return self.strategy.reduce("SUM", losses, axis=None)

    def fit(self):
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(GLOBAL)
        return [float(self.train(batch)) for batch in self.strategy.experimental_distribute_dataset(data)]


@pytest.mark.slow
def test_a_loop_that_divides_by_the_batch_is_one_devices(caplog):
    caplog.set_level(logging.INFO, "toolkit")
    losses = Trainer("the batch").fit()
    (said,) = [each.getMessage() for each in caplog.records if each.name.endswith("first_step")]
    assert said.startswith("The first step of the loop is one device's: 17 tensors are the same in float32")
    assert losses[0] > 0


@pytest.mark.slow
def test_a_loop_that_divides_by_a_replicas_examples_is_not():
    with pytest.raises(StrategyError, match="compares the first step of the loop .* adam.*: .*momentum differs by"):
        Trainer("its own").fit()


@pytest.mark.slow
def test_draws_in_a_loop_are_a_known_difference(caplog):
    Trainer("the batch", [lambda: keras.layers.Dropout(0.5)]).fit()
    assert "isn't one device's" in caplog.text
    assert "in your own loop each replica draws by its own seed" in caplog.text
