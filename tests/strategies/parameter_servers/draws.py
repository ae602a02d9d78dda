"""Trains models that draw random numbers, on one device and beside parameter servers; writes what they make.

draws.py OUT.npz
"""

import sys

import keras
import numpy as np
import one_process
import tensorflow as tf

L = keras.layers
RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(53, 6)).astype("float32")
Y = (X @ RANDOM.normal(size=(6, 1)) + 0.1).astype("float32")


class StaysOn(L.Layer):
    """Dropout that stays on, and noise by the generator that all calls without a seed share."""

    def __init__(self):
        super().__init__()
        self.dropout = L.Dropout(0.3)

    def call(self, x):
        return self.dropout(x, training=True) + 0.1 * keras.random.normal(keras.ops.shape(x))


KINDS = {
    "dropout": (lambda: [L.Dense(9, "relu"), L.Dropout(0.5), L.GaussianNoise(0.3)], {}),
    "normalisation": (lambda: [L.Dense(9, "relu"), L.BatchNormalization(), L.Dropout(0.5)], {}),
    "what stays on": (lambda: [StaysOn(), L.Dense(9, "relu")], {}),
    "XLA": (lambda: [L.Dense(9, "relu"), L.Dropout(0.5), L.GaussianNoise(0.3)], {"jit_compile": True}),
    "accumulation": (lambda: [L.Dense(9, "relu"), L.Dropout(0.5)], {}),
}


def trained(kind, strategy):
    layers, compiled = KINDS[kind]
    keras.utils.set_random_seed(7)
    keras.random.normal(())  # Makes the generator, which Keras can't while it traces.
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), *layers(), L.Dense(1)])
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2 if kind == "accumulation" else None)
        model.compile(optimizer, "mse", steps_per_execution=2, **{"jit_compile": False, **compiled})
    history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    evaluated = model.evaluate(X, Y, batch_size=16, verbose=0)
    predicted = [model.predict(X, batch_size=16, verbose=0).ravel() for _ in range(2)]
    return np.concatenate([history.history["loss"], [evaluated], *predicted, model.layers[-1].get_weights()[0].ravel()])


if __name__ == "__main__":
    found = {f"one_device {kind}": trained(kind, tf.distribute.get_strategy()) for kind in KINDS}
    served = one_process.served("rounds")
    for mode in ("rounds", "in_turn"):
        strategy = one_process.as_if(served, mode)
        found |= {f"{mode} {kind}": trained(kind, strategy) for kind in KINDS}
    np.savez(sys.argv[1], **found)
