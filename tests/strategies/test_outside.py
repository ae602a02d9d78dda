"""What was made outside of the strategy's scope trains as on one device, and what the user holds of it stays true."""

import beside
import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import StrategyError

X = np.random.default_rng(0).normal(size=(23, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
HOW = {"batch_size": 10, "shuffle": False, "verbose": 0}


def both(four_devices, train):
    """Returns what `train` returns on one device and on two replicas."""
    seen = []
    for kind, count in (("one_device", 1), ("mirrored", 2)):
        keras.utils.set_random_seed(3)
        seen.append(train(strategies.create(kind, devices=four_devices[:count])))
    return seen


def backbone(dropout=0.0):
    inputs = keras.Input((6,))
    return keras.Model(inputs, keras.layers.Dropout(dropout)(keras.layers.Dense(4, "tanh")(inputs)))


@pytest.mark.slow
def test_a_backbone_of_which_a_traced_function_reads_on(four_devices):
    def train(strategy):
        base = backbone()
        read = tf.function(lambda: base(X[:3]))
        before = read().numpy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), base, keras.layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.1), "mse")
        model.fit(X, Y, epochs=2, **HOW)
        after = read().numpy()
        assert np.abs(after - before).max() > 0.01
        np.testing.assert_allclose(after, base.predict(X[:3], verbose=0), atol=1e-6)
        return model.get_weights()

    for alone, mine in zip(*both(four_devices, train), strict=True):
        np.testing.assert_allclose(mine, alone, atol=1e-5)


@pytest.mark.parametrize("compiled_again", [False, True])
@pytest.mark.slow
def test_a_model_that_was_trained_already_goes_on(four_devices, tmp_path, compiled_again):
    model = backbone()
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    model.fit(X, np.tile(Y, 4), **HOW)
    model.save(tmp_path / "trained.keras")

    def train(strategy):
        model = keras.models.load_model(tmp_path / "trained.keras")
        with strategy.scope():
            if compiled_again:
                model.compile(model.optimizer, "mse", metrics=["mae"])
            history = model.fit(X, np.tile(Y, 4), epochs=2, **HOW).history
        assert int(model.optimizer.iterations) == 9
        return history["loss"] + history["mae"]

    alone, mine = both(four_devices, train)
    assert mine == pytest.approx(alone, rel=1e-5)


class Counting(beside.OneDense):
    """Counts its steps in a variable of TensorFlow's, and trains with optimizers that it was given before."""

    def __init__(self, optimizer):
        super().__init__()
        self.steps = tf.Variable(0, trainable=False)
        self.inner = optimizer

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.inner.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.steps.assign_add(1)
        return {"loss": loss, "steps": tf.cast(self.steps, "float32")}


@pytest.mark.slow
def test_attributes_of_a_model(four_devices):
    def train(strategy):
        model = Counting(keras.optimizers.Adam(0.1))
        model(X)
        with strategy.scope():
            model.compile(loss="mse")
        history = model.fit(X, Y, epochs=2, **HOW).history
        return [*history["steps"], *history["loss"], int(model.inner.iterations), *model.get_weights()[0].ravel()]

    alone, mine = both(four_devices, train)
    assert mine == pytest.approx(alone, rel=1e-4)


@pytest.mark.slow
def test_a_loop_that_updates_what_each_replica_would_is_refused(four_devices):
    strategy = strategies.create("mirrored", devices=four_devices[:2])
    layer, optimizer = keras.layers.Dense(1), keras.optimizers.SGD(0.1)
    layer.build((None, 6))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(X))
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)

    with pytest.raises(StrategyError, match="made outside of strategy.scope") as refused:
        strategy.run(step)
    assert "with strategy.scope()" in str(refused.value)


@pytest.mark.slow
def test_state_that_is_whole_is_not_taken_in_parts(four_devices):
    model = backbone()
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(X, np.tile(Y, 4), **HOW)
    strategy = strategies.create("mirrored", devices=four_devices[:2], optimizer_state="sharded")
    with strategy.scope(), pytest.raises(StrategyError, match="keeps whole"):
        model.fit(X, np.tile(Y, 4), **HOW)


@pytest.mark.slow
def test_a_sum_beyond_float16_is_an_overflow_as_on_one_device(four_devices):
    """Each share's gradient is 40,000 x scale / 2 of the whole's: finite alone, beyond 65,504 together."""

    def train(strategy):
        with strategy.scope():
            dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype="mixed_float16")
            model = keras.Sequential([keras.Input((1,)), dense])
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-3), initial_scale=64.0)
            model.compile(optimizer, loss=lambda y, p: y * tf.cast(p, "float32"))
        ones = np.full((4, 1), 32.0, "float32")
        model.fit(ones, ones, batch_size=4, epochs=3, verbose=0)
        return [float(optimizer.dynamic_scale), int(optimizer.inner_optimizer.iterations), *model.get_weights()[0][0]]

    alone, mine = both(four_devices, train)
    assert alone[0] == 32.0  # So that there is an overflow, once.
    assert mine == pytest.approx(alone)


@pytest.mark.slow
@pytest.mark.parametrize("on_batch", [False, True])
def test_metrics_made_outside_count_as_on_one_device(four_devices, on_batch):
    def train(strategy):
        metrics = [keras.metrics.MeanAbsoluteError(), keras.metrics.AUC(name="auc")]
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])
            model.compile("adam", "mse", metrics=metrics)
        labels = (Y > 0).astype("float32")
        first = {"batch": [model.train_on_batch(X, labels)]} if on_batch else {}
        history = model.fit(X, labels, epochs=2, **HOW).history
        return first | history, [float(metric.result()) for metric in metrics]

    (one, mine), (two, theirs) = both(four_devices, train)
    for name, values in one.items():
        np.testing.assert_allclose(two[name], values, atol=1e-6)
    np.testing.assert_allclose(theirs, mine, atol=1e-6)
