"""Compiled losses and metrics that aren't means or sums over examples are one device's on several replicas."""

import beside
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers import compile_utils

from toolkit import strategies
from toolkit.strategies.step.whole_batch import Kind, loss_kind, metric_kind

X = np.random.default_rng(0).normal(size=(43, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True).astype("float32")
BATCH = 12  # Of three replicas, the last batch has 7.


def summed(y, p):
    return tf.reduce_sum(tf.abs(y - p)) / BATCH


def masked(y, p):
    kept = tf.cast(y < 900, "float32")
    return tf.reduce_sum(kept * (y - p) ** 2) / tf.reduce_sum(kept)


def root(y, p):
    return tf.sqrt(tf.reduce_mean((y - p) ** 2))


def plain(y, p):
    return tf.reduce_mean(tf.where(tf.abs(y - p) < 1, (y - p) ** 2, tf.abs(y - p)))


class Largest(keras.metrics.Metric):
    """A running maximum."""

    def __init__(self):
        super().__init__(name="largest")
        self.top = self.add_weight(shape=(), initializer="zeros", name="top")

    def update_state(self, y, p, sample_weight=None):
        self.top.assign(tf.maximum(self.top, tf.reduce_max(tf.abs(y - p))))

    def result(self):
        return self.top.value


def tensors():
    return tf.zeros((5, 3)), tf.zeros((5, 3))


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (plain, Kind.MEAN),
        ("mse", Kind.EXAMPLES),
        (lambda y, p: (y - p) ** 2, Kind.EXAMPLES),
        (summed, Kind.SUM),
        (masked, Kind.NEITHER),
        (root, Kind.NEITHER),
        (lambda _, p: tf.reduce_mean(tf.matmul(p, p, transpose_b=True)), Kind.NEITHER),
        (lambda y, p: tf.reduce_mean(tf.boolean_mask(p, y >= 0)), Kind.NEITHER),
        ("dice", Kind.NEITHER),
    ],
)
def test_a_loss_is_told_by_its_values(loss, kind):
    if not isinstance(loss, keras.losses.Loss):
        loss = compile_utils.get_loss(loss, *tensors())
    assert loss_kind(loss, *tensors()) is kind


@pytest.mark.parametrize(
    ("metric", "kind"),
    [
        (lambda: keras.metrics.MeanMetricWrapper(plain), Kind.MEAN),
        (lambda: keras.metrics.MeanMetricWrapper(root), Kind.SUM),
        (lambda: keras.metrics.PearsonCorrelation(axis=0), Kind.SUM),
        (keras.metrics.MeanAbsoluteError, Kind.EXAMPLES),
        (Largest, Kind.NEITHER),
    ],
)
def test_a_metric_is_told_by_its_state_which_stays(metric, kind):
    metric = metric()
    before = [v.numpy() for v in metric.variables]
    assert metric_kind(metric, tensors(), {}) is kind
    assert before == [v.numpy() for v in metric.variables]


def trained(strategy, loss, labels):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        given = keras.Input((4,))
        model = keras.Model(given, keras.layers.Dense(1)(keras.layers.Dense(5, "tanh")(given)))
        model.compile(keras.optimizers.SGD(0.05), loss, metrics=[Largest(), root, plain])
    history = model.fit(X, labels, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    history = {name: [float(value) for value in values] for name, values in history.items()}
    return history, model.evaluate(X, labels, batch_size=BATCH, verbose=0), model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [summed, masked, root])
def test_training_is_that_of_one_device(four_devices, loss):
    labels = Y.copy()
    if loss is masked:
        labels[:5] = 999  # All of the first replica's examples in the first batch.
    one = trained(tf.distribute.get_strategy(), loss, labels)
    many = trained(strategies.create("mirrored", devices=four_devices[:3]), loss, labels)
    assert many[0].keys() == one[0].keys()
    for name, values in one[0].items():
        np.testing.assert_allclose(many[0][name], values, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(many[1], one[1], rtol=1e-5)
    for mine, theirs in zip(many[2], one[2], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-6)


class OwnStep(beside.OneDense):
    """Its step hands a metric the weights by position, as Keras unpacks them: None where there are none."""

    def __init__(self):
        super().__init__()
        self.own = keras.metrics.MeanMetricWrapper(plain, name="own")

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self(x)
            loss = tf.reduce_mean((predicted - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.own.update_state(y, predicted, weight)
        return {"own": self.own.result()}


@pytest.mark.slow
def test_a_metric_may_be_given_no_weights_by_position(four_devices):
    found = []
    for strategy in (tf.distribute.get_strategy(), strategies.create("mirrored", devices=four_devices[:3])):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = OwnStep()
            model.compile(keras.optimizers.SGD(0.05))
        found += model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0).history["own"]
    assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-5)
