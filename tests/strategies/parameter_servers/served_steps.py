"""Trains with steps of one's own, on one device and beside parameter servers; writes what they return and leave.

served_steps.py OUT.json
"""

import json
import pathlib
import sys

import keras
import numpy as np
import one_process
import tensorflow as tf

sys.path += [str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(__file__).parents[2])]
import beside
import test_logs

RANDOM = np.random.default_rng(11)
X = RANDOM.normal(size=(52, 6)).astype("float32")
Y = (X @ RANDOM.normal(size=(6, 1)) + 0.1).astype("float32")


class Own(beside.OneDense):
    """A `train_step` that does something before and after it applies gradients, and adds to its logs."""

    def __init__(self, before, after, logs, scaled=False):
        super().__init__()
        self.before, self.after, self.logs = before, after, logs
        self.seen, self.scaled = keras.metrics.Mean("loss"), scaled

    @property
    def metrics(self):
        return [self.seen]

    def train_step(self, data):
        x, y = data
        optimizer = self.optimizer
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.dense(x) - y) ** 2)
            target = optimizer.scale_loss(loss) if self.scaled else loss
        self.before(optimizer)
        watched = tape.watched_variables()
        optimizer.apply_gradients(zip(tape.gradient(target, watched), watched, strict=True))
        self.after(optimizer)
        self.seen.update_state(loss)
        return {"loss": self.seen.result(), **self.logs(optimizer)}


class Clips(keras.layers.Layer):
    """Clips to the largest that it has seen, a running mean that it assigns and reads again in the same call."""

    def build(self, _):
        self.largest = self.add_weight(name="largest", shape=(), initializer="ones", trainable=False)

    def call(self, x, training=False):
        if training:
            self.largest.assign(0.9 * self.largest + 0.1 * tf.reduce_max(x))
        largest = tf.convert_to_tensor(self.largest)
        return x * largest + tf.clip_by_value(x, -largest, largest)


def nothing(_):
    return {}


def rate_of_step(optimizer):
    optimizer.learning_rate.assign(0.1 / (1.0 + tf.cast(optimizer.iterations, tf.float32)))


def decay(optimizer):
    optimizer.learning_rate.assign(0.7 * optimizer.learning_rate)


def constant(optimizer):
    optimizer.learning_rate = 0.02


def two_more(optimizer):
    optimizer.iterations.assign_add(2)


def counts(optimizer):
    return {"step": optimizer.iterations, "rate": optimizer.learning_rate}


KINDS = {
    "as usual": (nothing, nothing, nothing),
    "a rate by the step": (rate_of_step, nothing, counts),
    "a rate that decays": (decay, nothing, counts),
    "a constant rate": (constant, nothing, nothing),
    "a rate for the next step": (nothing, decay, counts),
    "its own steps": (two_more, nothing, counts),
    "counts": (nothing, nothing, counts),
    "texts": (nothing, nothing, lambda _: {"text": tf.constant("a"), "more": {"flag": tf.constant(True)}}),
}


def fitted(model, strategy, data):
    history = model.fit(data, epochs=2, verbose=0).history
    weights = np.concatenate([np.ravel(each) for each in model.get_weights()])
    found = {name: [np.asarray(each).tolist() for each in values] for name, values in history.items()}
    found |= {"weights": weights.tolist(), "iterations": int(model.optimizer.iterations)}
    if hasattr(strategy, "session"):
        found["divided"] = strategy.session(model)._in_rounds
    return found


def stepped(strategy, kind, *, schedule=False, scaled=False):
    keras.utils.set_random_seed(3)
    rate = keras.optimizers.schedules.InverseTimeDecay(0.1, 1, 0.5) if schedule else 0.1
    with strategy.scope():
        model = Own(*KINDS[kind], scaled=scaled)
        model.build((None, 6))
        optimizer = keras.optimizers.SGD(rate)
        model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer)
    found = fitted(model, strategy, tf.data.Dataset.from_tensor_slices((X, Y)).batch(11))
    if not schedule and not scaled:
        found["rate at the end"] = float(model.optimizer.learning_rate)
    return found


def clipped(strategy):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), Clips(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    return fitted(model, strategy, tf.data.Dataset.from_tensor_slices((X, Y)).batch(11))


def logged(strategy, name):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = test_logs.Own(test_logs.LOGS[name])
        model.compile(keras.optimizers.SGD(0.1))
    return fitted(model, strategy, tf.data.Dataset.from_tensor_slices((test_logs.X, test_logs.Y)).batch(8))


if __name__ == "__main__":
    out = {}
    served = one_process.served("rounds")
    for mode in ("one_device", "rounds", "in_turn"):
        strategy = tf.distribute.get_strategy()
        if mode != "one_device":
            strategy = one_process.as_if(served, mode)
        out[mode] = {kind: stepped(strategy, kind) for kind in KINDS}
        out[mode]["a schedule"] = stepped(strategy, "counts", schedule=True)
        out[mode]["a scaled loss"] = stepped(strategy, "counts", scaled=True)
        out[mode]["clips"] = clipped(strategy)
        out[mode] |= {f"logs {name}": logged(strategy, name) for name in test_logs.LOGS}
    pathlib.Path(sys.argv[1]).write_text(json.dumps(out, default=lambda each: each.decode()))
