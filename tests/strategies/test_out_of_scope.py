"""What users do outside of steps and of a strategy's scope gives one device's answers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies

X = np.random.default_rng(0).normal(size=(54, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, use_ema=True),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9))
        ),
        lambda: "adam",
    ],
    ids=["accumulating", "scaled", "by its name"],
)
@pytest.mark.slow
def test_any_optimizer_may_be_made_before_the_scope(four_devices, make):
    optimizer = make()
    with strategies.create("mirrored", devices=four_devices[:2]).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    assert np.isfinite(model.fit(X, Y, batch_size=18, verbose=0).history["loss"]).all()


@pytest.mark.parametrize("rows", [8, 11, 1])
def test_a_single_batch_is_predicted_once(four_devices, rows):
    with strategies.create("mirrored", devices=four_devices[:2]).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    np.testing.assert_allclose(model.predict_on_batch(X[:rows]), model(X[:rows]), atol=1e-6)


class Kept(keras.optimizers.SGD):
    def __init__(self, rate):
        super().__init__(rate)

    def get_config(self):
        return {"name": self.name}


def test_an_optimizer_that_no_config_makes_again_stays_the_object_it_is(four_devices):
    optimizer = Kept(0.1)
    strategy = strategies.create("mirrored", devices=four_devices[:2])
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(optimizer, "mse")
    assert model.optimizer is optimizer
    assert all(strategy.extended.variable_created_in_scope(each.value) for each in optimizer.variables)
    assert float(optimizer.learning_rate) == pytest.approx(0.1)


def test_replicas_draw_for_themselves(four_devices):
    strategy = strategies.create("mirrored", devices=four_devices[:2])
    with strategy.scope():
        seed = keras.random.SeedGenerator(1)

    @tf.function
    def drawn():
        return strategy.run(lambda: keras.random.normal((3,), seed=seed))

    one, other = (draw.numpy() for draw in strategy.experimental_local_results(drawn()))
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal(one, keras.random.normal((3,), seed=keras.random.SeedGenerator(1)))
