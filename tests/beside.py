"""One model, trained on one device and on replicas of it: what each epoch logs and the weights that it ends with."""

import keras
import numpy as np
import tensorflow as tf

from toolkit import strategies


class OneDense(keras.Model):
    """The smallest model that is subclassed, for steps of one's own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)


def trained(strategy, build, *data, compiled, seed=1, **fit):
    """One vector of all that `fit` logs and of the weights; `build` makes the model, `compiled` compile's arguments."""
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = build()
        model.compile(*compiled())
    history = model.fit(*data, **{"epochs": 2, "shuffle": False, "verbose": 0, **fit}).history
    return np.concatenate([*history.values(), *map(np.ravel, model.get_weights())])


def assert_one_devices(devices, build, *data, atol=5e-6, rtol=0.0, **how):
    """Replicas on these devices train as one device does; returns what one device comes to."""
    one = trained(tf.distribute.get_strategy(), build, *data, **how)
    many = trained(strategies.create("mirrored", devices=devices), build, *data, **how)
    np.testing.assert_allclose(many, one, rtol=rtol, atol=atol)
    return one


def descent(rate, *more):
    """Arguments of `compile` with plain gradient descent, made where the model is."""
    return lambda: (keras.optimizers.SGD(rate), *more)
