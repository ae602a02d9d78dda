"""The exchange of gradients, and the methods of Keras's that it depends on."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import StrategyError
from toolkit.strategies import gradients

ARGUMENTS = {
    "_backend_apply_gradients": ["self", "grads", "trainable_variables"],
    "_clip_gradients": ["self", "grads"],
    "_all_reduce_sum_gradients": ["self", "grads_and_vars"],
    "add_variable_from_reference": ["self", "reference_variable", "name", "initializer"],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_keras_has_the_methods_that_are_wrapped(name):
    gradients.adapt_optimizers()
    method = getattr(keras.optimizers.Optimizer, name).__wrapped__
    assert list(inspect.signature(method).parameters) == ARGUMENTS[name]


def trained(strategy, optimizer):
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(2)])
        model.compile(optimizer(), "mse")
    x, y = random.normal(size=(32, 5)).astype("float32"), random.normal(size=(32, 2)).astype("float32")
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    return np.concatenate([w.numpy().ravel() for w in model.weights])


@pytest.mark.parametrize(("dtype", "least"), [("float32", 0), ("float16", 1e-7), ("bfloat16", 1e-6)])
def test_gradients_are_exchanged_as_asked(four_devices, dtype, least):
    exchange = strategies.GradientExchange(dtype=dtype)
    mirrored = strategies.create("mirrored", devices=four_devices[:2], gradients=exchange)
    far = np.max(
        np.abs(trained(mirrored, keras.optimizers.SGD) - trained(tf.distribute.get_strategy(), keras.optimizers.SGD))
    )
    assert least <= far < max(2e-7, 2e4 * least)


@pytest.mark.slow
def test_clipping_is_by_the_norm_of_the_sum(four_devices):
    mirrored = strategies.create("mirrored", devices=four_devices[:2])
    gradients.adapt_optimizers()
    clipped = [
        trained(s, lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05))
        for s in (mirrored, tf.distribute.get_strategy())
    ]
    np.testing.assert_allclose(clipped[0], clipped[1], atol=2e-7)


@pytest.mark.parametrize("arguments", [{"dtype": "int8"}, {"bytes_per_pack": -1}])
def test_what_can_not_be_is_said(arguments):
    with pytest.raises(StrategyError, match="gradients"):
        strategies.GradientExchange(**arguments)
