"""Where two features meet, and broke once."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import StrategyError
from toolkit.strategies.step import exchange_schedule

X = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Twice(keras.layers.Layer):
    def call(self, x):
        return x * 2.0


class Centred(keras.layers.Layer):
    """Compares the batch's examples."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


def stateful(rows, between=keras.layers.Identity):
    inputs = keras.Input(batch_shape=(rows, 3, 2))
    model = keras.Model(inputs, keras.layers.Dense(1)(between()(keras.layers.LSTM(4, stateful=True)(inputs))))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("between", [keras.layers.Identity, Twice, Centred])
def test_a_stateful_layer_is_built_for_a_share(four_devices, between):
    given = {"batch_size": 10, "shuffle": False, "verbose": 0}
    seen = []
    for kind, devices in (("one_device", 1), ("mirrored", 2)):
        keras.utils.set_random_seed(2)
        with strategies.create(kind, devices=four_devices[:devices]).scope():
            model = stateful(10 // devices, between)
        model.fit(X.reshape(40, 3, 2), Y, epochs=2, **given)
        seen.append(np.concatenate([each.numpy().ravel() for each in model.trainable_variables]))
    np.testing.assert_allclose(*seen, atol=1e-6)
    with strategies.create("mirrored", devices=four_devices[:2]).scope():
        model = stateful(10)
    with pytest.raises(StrategyError, match=r"stateful.* keras\.Input\(batch_shape=\(5, \.\.\.\)\)"):
        model.fit(X.reshape(40, 3, 2), Y, **given)


@pytest.mark.slow
def test_gradients_are_compressed_from_the_step_asked_for_where_calls_are_short(four_devices, monkeypatch):
    """Five steps an epoch are made in calls of four and one."""
    exchange = strategies.GradientExchange(compression="powersgd", rank=1, start_step=10)
    strategy = strategies.create("mirrored", devices=four_devices[:2], gradients=exchange)
    began, send_all = [], exchange_schedule.send_all
    monkeypatch.setattr(
        exchange_schedule,
        "send_all",
        lambda model, whole: began.append((not whole, int(model.optimizer.iterations))) or send_all(model, whole),
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(32), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=4)
    model.fit(X, Y, batch_size=8, epochs=3, verbose=0)
    assert began == [(False, 0), (True, 10)]


@pytest.mark.slow
def test_class_weight_of_data_of_a_function_is_refused(four_devices):
    strategy = strategies.create("mirrored", devices=four_devices[:2])
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = strategy.distribute_datasets_from_function(lambda _: tf.data.Dataset.from_tensor_slices((X, Y)).batch(5))
    with pytest.raises(StrategyError, match="class_weight"):
        model.fit(data, class_weight={0: 1.0}, steps_per_epoch=2, verbose=0)


@pytest.mark.slow
def test_two_strategies_in_one_process_keep_their_exchanges_apart(four_devices):
    for width in (4, 7):
        with strategies.create("mirrored", devices=four_devices[:2]).scope():
            normalised = keras.layers.BatchNormalization(synchronized=True)
            layers = [keras.Input((6,)), keras.layers.Dense(width), normalised, keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            model.compile("sgd", "mse")
        assert np.isfinite(model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history["loss"]).all()


class Unseeded(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def train_step(self, data):
        x, y = data
        noisy = x + keras.random.normal(keras.ops.shape(x))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.dense(noisy) - y) ** 2)
        variables = self.dense.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.slow
def test_a_step_draws_without_a_seed(four_devices):
    keras.utils.set_random_seed(1)
    with strategies.create("mirrored", devices=four_devices[:2]).scope():
        model = Unseeded()
        model.compile("sgd")
    assert np.isfinite(model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history["loss"]).all()
    with strategies.create("mirrored", devices=four_devices[1:3]).scope():
        second = Unseeded()
        second.compile("sgd")
    assert np.isfinite(second.fit(X, Y, batch_size=8, verbose=0).history["loss"]).all()
