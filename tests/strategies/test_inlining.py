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


class Contrasted(keras.Model):
    """Applies the gradients of its layers in turn, within its step, which compares the batch with itself reversed."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)]

    def step(self, data):
        x, _ = data
        for part in self.parts:
            with tf.GradientTape() as tape:
                one, other = part(x), part(x[::-1])
                loss = tf.reduce_mean(tf.math.softplus(tf.reduce_sum((one - other) ** 2, 1) - 1.0))
            grads = tape.gradient(loss, part.trainable_weights)
            self.optimizer.apply_gradients(zip(grads, part.trainable_weights, strict=True))
            x = part(x)
        return {"loss": loss}


class Decorated(Contrasted):
    train_step = tf.function(Contrasted.step)


class Compiled(Contrasted):
    train_step = tf.function(Contrasted.step, jit_compile=True)


class CompiledWithin(Contrasted):
    within = tf.function(Contrasted.step, jit_compile=True)

    def train_step(self, data):
        return self.within(data)


def _contrasted(strategy, kind):
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = kind()
        model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
        model.parts[0].build((None, 4)), model.parts[1].build((None, 3))
        model.optimizer.build([v for part in model.parts for v in part.trainable_weights])
    losses = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    return np.concatenate([losses, *map(np.ravel, model.get_weights())])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Decorated, Compiled])
def test_a_function_in_the_place_of_a_step_sees_the_whole_batch_where_it_must(four_devices, kind):
    two = _contrasted(strategies.create("mirrored", devices=four_devices[:2]), kind)
    np.testing.assert_allclose(two, _contrasted(tf.distribute.get_strategy(), Decorated), atol=5e-6)


@pytest.mark.slow
def test_a_function_for_xla_that_trains_within_a_step_is_named(four_devices):
    with pytest.raises(Exception, match="jit_compile=True within the step"):  # With the lines that AutoGraph adds.
        _contrasted(strategies.create("mirrored", devices=four_devices[:2]), CompiledWithin)
