"""Networks whose every sum is exact in float64, so that any order of adding gives the same bits.

    python exact_arithmetic.py DEVICES OUT.npz WAY    as one of two workers
    python exact_arithmetic.py served OUT.npz MODE    beside parameter servers

Weights, data and rates are small multiples of powers of two, layers have no roots and no exponentials, and each batch
and each share has a power of two of examples. One step fits into the 53 bits of a float64: each step more than doubles
how many bits its weights need.
"""

import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

import toolkit

BATCH = 16
L = keras.layers
WAYS = {
    "plain": {},
    "sharded weights": {"weights": "sharded"},
    "sharded slots": {"optimizer_state": "sharded"},
}


def eighths(seed, *shape):
    """Multiples of 1/8 between -1/2 and 1/2, of three bits."""
    return np.random.default_rng(seed).integers(-4, 5, shape) / 8


class Eighths(keras.initializers.Initializer):
    def __init__(self, seed):
        self.seed = seed

    def __call__(self, shape, dtype=None):
        return tf.constant(eighths(self.seed, *shape), dtype)


def dense(**more):
    """Keras's own step, with momentum."""
    layers = [
        L.Dense(64, "relu", kernel_initializer=Eighths(1), bias_initializer=Eighths(2)),
        L.Dense(2, kernel_initializer=Eighths(3)),
    ]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile(keras.optimizers.SGD(1 / 8, momentum=0.5), "mse", metrics=["mae"], **more)
    return model


class Own(keras.Model):
    """A step of its own, which adds two losses and looks at the batch's mean."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            mean = tf.reduce_sum(p, 0) / BATCH
            loss = tf.reduce_sum((p - y) ** 2) / BATCH + tf.reduce_sum(mean * mean) / 4
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def conv(**more):
    """A step of its own that sees the whole batch."""
    inputs = keras.Input((4, 4, 1))
    x = L.MaxPooling2D()(L.Conv2D(4, 2, padding="same", activation="relu", kernel_initializer=Eighths(4))(inputs))
    model = Own(inputs, L.Dense(2, kernel_initializer=Eighths(5))(L.Flatten()(x)))
    model.compile(keras.optimizers.SGD(1 / 16), **more)
    return model


class Running(L.Layer):
    """Adds what stands before a row in the batch."""

    def call(self, x):
        return x + tf.cumsum(x, 0) / BATCH


def ordered(**more):
    """Where the place of a row in the batch counts: in what is drawn for it, and in what is computed of it."""
    layers = [
        L.Dense(16, "relu", kernel_initializer=Eighths(1)),
        L.Dropout(0.5, seed=3),
        Running(),
        L.Dense(2, kernel_initializer=Eighths(3)),
    ]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile(keras.optimizers.SGD(1 / 8), "mse", **more)
    return model


IN_ANY_ORDER = {"dense": (dense, (64,)), "conv": (conv, (4, 4, 1))}
NETWORKS = {**IN_ANY_ORDER, "ordered": (ordered, (64,))}


def trained(strategy, name, order=None, **more):
    """A step's logs, and then the weights and predictions: of which every bit counts."""
    build, shape = NETWORKS[name]
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        with strategy.scope():
            model = build(**more)
        order = np.arange(BATCH) if order is None else order
        x, y = (eighths(seed, BATCH, *each)[order] for seed, each in ((6, shape), (7, (2,))))
        logs = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history
        found = model.predict(x[np.argsort(order)], batch_size=BATCH, verbose=0)
        return np.concatenate([*logs.values(), *map(np.ravel, [*model.get_weights(), found])])
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def of_worker(here, **more):
    """A worker's strategy with several CPU devices, as it has several GPUs: TensorFlow takes one unless it is told."""

    def local_devices(extended, resolver, worker):
        return [f"{worker}/device:CPU:{number}" for number in range(here)], "CPU"

    collective_all_reduce_strategy.CollectiveAllReduceExtended._initialize_local_devices = local_devices
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * here)
    return toolkit.strategies.create("multi_worker", **more)


def served(mode):
    """A chief's strategy beside two workers and two parameter servers."""
    sys.path += [str(pathlib.Path(__file__).parents[1] / "strategies" / "parameter_servers")]
    import one_process

    return one_process.as_if(one_process.served("rounds", ps=2), mode)


def main():
    here, out, way = sys.argv[1:]
    if here == "served":
        strategy = served(way)
    else:
        strategy = of_worker(int(here), **WAYS[way])
        assert strategy.num_replicas_in_sync == 2 * int(here)
    seen = {name: trained(strategy, name) for name in NETWORKS}
    own = pathlib.Path(out).with_suffix(f".{os.getpid()}.npz")
    np.savez(own, **seen)
    own.replace(out)


if __name__ == "__main__":
    main()
