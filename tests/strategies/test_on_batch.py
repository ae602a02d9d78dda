"""A batch that a script hands over itself is divided, and has one device's numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(11, 6)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")


class Positives(keras.metrics.Metric):
    """A count, which is no mean."""

    def __init__(self):
        super().__init__(name="positives")
        self.n = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.n.assign_add(keras.ops.sum(y_true))

    def result(self):
        return self.n + 0.0


def contrastive(y_true, y_pred):
    z = keras.ops.normalize(y_pred)
    return -keras.ops.mean(keras.ops.diagonal(keras.ops.log_softmax(keras.ops.matmul(z, keras.ops.transpose(z)))))


class Own(keras.Model):
    """Has no call, a sum for its loss, and batches of another structure to test."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.seen = Positives()

    @property
    def metrics(self):
        return [self.seen]

    def train_step(self, data):
        (a, b, scale), y, _ = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.dense(a) * self.dense(b) * scale - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.seen.update_state(y, None)
        return {"loss": loss, "seen": self.seen.result()}

    def test_step(self, data):
        x, y, _ = data
        self.seen.update_state(y, None)
        return {"loss": tf.reduce_mean((self.dense(x) - y) ** 2), "seen": self.seen.result()}


def compiled(loss, units, metrics=("mae",)):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(units)])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, loss, metrics=[Positives(), *metrics], weighted_metrics=["mse"])
    return model


CASES = {
    "a sum": lambda: compiled(keras.losses.MeanSquaredError(reduction="sum"), 1),
    "a loss that compares examples": lambda: compiled(contrastive, 3, metrics=()),
    "several steps at once": lambda: several(compiled("mse", 1)),
}


def several(model):
    model.steps_per_execution = 3
    return model


def numbers(model, rows):
    x, y = X[:rows], Y[:rows]
    weights = np.linspace(0.1, 2, rows).astype("float32")
    found = [
        model.train_on_batch(x, y),
        model.train_on_batch(x, y, sample_weight=weights),
        model.train_on_batch(tf.constant(x), y, class_weight={0: 0.5, 1: 3.0}),
        list(model.train_on_batch(x, y, return_dict=True).values()),
        model.test_on_batch(x, y),
        list(model.test_on_batch(x, y, sample_weight=weights, return_dict=True).values()),
        [float(each.result()) for each in model.metrics if each.name == "loss"],
        np.ravel(model.predict_on_batch(x)),
        *(np.ravel(each) for each in model.get_weights()),
    ]
    return np.concatenate([np.ravel(each) for each in found])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [7, 2])
def test_a_batch_has_one_devices_numbers(four_devices, case, rows):
    seen = []
    for strategy in (tf.distribute.get_strategy(), strategies.create("mirrored", devices=four_devices[:3])):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = CASES[case]()
        seen.append(numbers(model, rows))
    np.testing.assert_allclose(seen[1], seen[0], rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [7, 1])
def test_a_step_of_ones_own_has_its_share_of_whatever_is_by_example(four_devices, rows):
    seen = []
    for strategy in (tf.distribute.get_strategy(), strategies.create("mirrored", devices=four_devices[:2])):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = Own()
            model.compile(keras.optimizers.SGD(0.1))
        x, y = X[:rows], Y[:rows]
        trained = [model.train_on_batch((x, x[:, ::-1], np.float32(0.5)), y) for _ in range(2)]
        data = tf.data.Dataset.from_tensors(((x, x, np.float32([0.5] * rows)[:, None]), y, y))
        fitted = model.fit(data, shuffle=False, verbose=0)
        tested = model.test_on_batch(x, y)
        seen.append(np.concatenate([*trained, *fitted.history.values(), tested, *map(np.ravel, model.get_weights())]))
    np.testing.assert_allclose(seen[1], seen[0], atol=2e-6)


@pytest.mark.slow
def test_a_stateful_model_has_its_batch_on_one_replica(four_devices):
    seen = []
    x = RANDOM.normal(size=(5, 4, 2)).astype("float32")
    for strategy in (tf.distribute.get_strategy(), strategies.create("mirrored", devices=four_devices[:2])):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input(batch_shape=(5, 4, 2)), keras.layers.LSTM(3, stateful=True)])
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[Positives()])
        losses = [model.train_on_batch(x, x[:, 0, :1]) for _ in range(3)]
        predicted = model.predict_on_batch(x)
        seen.append(np.concatenate([*losses, *map(np.ravel, [predicted, *model.trainable_weights])]))
    np.testing.assert_allclose(seen[1], seen[0], atol=2e-6)
