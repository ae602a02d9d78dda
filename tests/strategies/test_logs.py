"""What a step returns is the whole batch's: a mean, a sum, a count, the same for all, or a value for each example."""

import batteries
import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies

X = np.random.default_rng(0).normal(size=(13, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(13, 3)).astype("float32")
LOGS = {
    "a mean": lambda y, p: tf.reduce_mean((y - p) ** 2),
    "a sum": lambda y, _: tf.reduce_sum(tf.nn.relu(y)),
    "a sum of integers": lambda y, _: tf.reduce_sum(tf.cast(y > 0, tf.int32)),
    "the number of rows": lambda y, _: tf.shape(y)[0],
    "means by class": lambda y, _: tf.reduce_mean(y, 0),
    "counts by class": lambda y, _: tf.math.bincount(tf.argmax(y, 1, tf.int32), minlength=3, maxlength=3),
    "a value for each example": lambda y, p: tf.reduce_mean(y * p, 1),
    "a class for each example": lambda _, p: tf.argmax(p, 1),
    "the largest": lambda y, _: tf.reduce_max(y),
    "a root": lambda y, p: tf.sqrt(tf.reduce_mean((y - p) ** 2)),
    "whether any": lambda y, _: tf.reduce_any(y > 1.5),
    "a constant": lambda *_: tf.constant(3),
}


class Own(keras.Model):
    def __init__(self, log):
        super().__init__()
        self.dense, self.log = keras.layers.Dense(3), log

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self.dense(x)
            loss = tf.reduce_mean((p - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, "own": self.log(y, p)}


class Tracking(Own):
    """Keeps a batch's mean in a metric, as Keras's guides do: the metric counts batches."""

    def __init__(self, log):
        super().__init__(log)
        self.tracker = keras.metrics.Mean("own")

    def train_step(self, data):
        self.tracker.update_state(super().train_step(data)["own"])
        return {"own": self.tracker.result()}


def returned(strategy, name, kind=Own):
    """Returns what the steps of an epoch return, whose last batch has an odd number of examples."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = kind(LOGS[name])
        model.compile(keras.optimizers.SGD(0.1))
    found = []
    kept = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: found.append(np.asarray(logs["own"])))
    model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), shuffle=False, verbose=0, callbacks=[kept])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", batteries.rows(LOGS, ["means by class", "a class for each example", "the number of rows", "the largest"])
)
def test_a_value_that_a_step_returns_is_the_whole_batchs(four_devices, name):
    one = returned(tf.distribute.get_strategy(), name)
    many = returned(strategies.create("mirrored", devices=four_devices[:2]), name)
    assert len(one) == 2
    for mine, theirs in zip(many, one, strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_mean_that_a_metric_keeps_is_the_whole_batchs(four_devices):
    one = returned(tf.distribute.get_strategy(), "a mean", Tracking)
    many = returned(strategies.create("mirrored", devices=four_devices[:3]), "a mean", Tracking)
    np.testing.assert_allclose(many, one, rtol=1e-6)
