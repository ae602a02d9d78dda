"""A `tf.function` that a step calls is a part of the step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.strategies.step.train_step import call_function, inlining
from toolkit.strategies.upstream import replaced

X = np.random.default_rng(0).normal(size=(31, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
GRAPHS = []


def double(x):
    """A Python `if`, which AutoGraph converts, and the graph that it stands in."""
    GRAPHS.append(tf.compat.v1.get_default_graph())
    if x > 0:
        x = x * 2
    return x


@pytest.mark.parametrize("own", [True, False])
def test_it_is_traced_where_it_is_called_within_a_step_only(own):
    replaced.FUNCTION.answer(step=call_function)
    GRAPHS.clear()
    function = tf.function(double)

    @tf.function(autograph=False)
    def step(x):
        if own:
            return function(x)
        with inlining():
            return function(x)

    assert [float(step(tf.constant(value))) for value in (3.0, -3.0)] == [6.0, -3.0]
    outer = step.get_concrete_function(tf.constant(1.0)).graph
    assert all((graph is outer) is not own for graph in GRAPHS)


def test_one_for_xla_stays_a_function():
    replaced.FUNCTION.answer(step=call_function)
    GRAPHS.clear()
    compiled = tf.function(double, jit_compile=True)

    @tf.function(autograph=False)
    def step(x):
        with inlining():
            return compiled(x)

    outer = step.get_concrete_function(tf.constant(1.0)).graph
    assert GRAPHS
    assert all(graph is not outer for graph in GRAPHS)


class WhollyAFunction(keras.Model):
    """Many tutorials decorate the whole step."""

    @tf.function
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        if loss > 1e9:  # AutoGraph's.
            loss = loss * 0.0
        return {"loss": loss}


@pytest.mark.slow
def test_a_train_step_that_is_wholly_a_function_gives_one_devices_numbers(four_devices):
    def trained(strategy):
        keras.utils.set_random_seed(2)
        with strategy.scope():
            given = keras.Input((4,))
            model = WhollyAFunction(given, keras.layers.Dense(1)(keras.layers.Dense(5, "tanh")(given)))
            model.compile(keras.optimizers.Adam(0.01))
        return model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]

    many = trained(strategies.create("mirrored", devices=four_devices[:2]))
    np.testing.assert_allclose(many, trained(tf.distribute.get_strategy()), rtol=1e-5)
