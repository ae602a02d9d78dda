"""Trains layers that keep state of their own, on one device and beside parameter servers; writes what they hold.

own_state.py OUT.json
"""

import json
import pathlib
import sys

import keras
import numpy as np
import one_process
import tensorflow as tf

import toolkit

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(52, 6)).astype("float32")
Y = (X @ RANDOM.normal(size=(6, 1)) + 0.1).astype("float32")
KINDS = {}


class Kept(keras.layers.Layer):
    """A layer with state, a variable of a name, an initial value and a dtype each."""

    def __init_subclass__(cls, **state):
        cls.state = state
        KINDS[cls.__name__] = cls

    def build(self, _):
        for name, (value, dtype) in self.state.items():
            made = self.add_weight(
                name=name, shape=np.shape(value), dtype=dtype, trainable=False, initializer=lambda *_, v=value, **__: v
            )
            setattr(self, f"its_{name}", made)

    def call(self, x, training=False):
        if training:
            self.note(x)
        return x


class OfExamples(
    Kept,
    count=(0, "int32"),
    kinds=(np.zeros(2), "int64"),
    sums=(np.zeros(6), "float32"),
    largest=(-9.0, "float32"),
):
    """Counts examples, kinds of examples and sums, keeps the largest, and reads what it has counted."""

    def note(self, x):
        self.its_count.assign_add(tf.shape(x)[0])
        self.its_kinds.assign_add(tf.math.bincount(tf.cast(x[:, 0] > 0, tf.int32), minlength=2, dtype=tf.int64))
        self.its_sums.assign_add(tf.reduce_sum(x, 0))
        self.its_largest.assign(tf.maximum(tf.convert_to_tensor(self.its_largest), tf.reduce_max(x)))

    def call(self, x, training=False):
        return super().call(x, training) / (1.0 + tf.cast(tf.convert_to_tensor(self.its_count), "float32") / 100)


class OfSteps(Kept, threes=(0, "int32"), float_threes=(2.0**24 - 90, "float32"), numbers=(1, "int64")):
    """Counts steps by threes, and draws numbers of 64 bits."""

    def note(self, x):
        self.its_threes.assign_add(3)
        self.its_float_threes.assign_add(3.0)
        self.its_numbers.assign(self.its_numbers * 6364136223846793005 + 1442695040888963407)


class InBranches(Kept, evens=(0, "int32"), turns=(np.zeros(2), "int32")):
    """Counts in a branch."""

    def note(self, x):
        tf.cond(tf.shape(x)[0] > 8, lambda: self.its_evens.assign_add(2), lambda: self.its_evens.assign_add(0))
        self.its_turns.assign_add([1, 2])


class Named(Kept, iteration=(0, "int32"), step_counter=(0, "int64"), learning_rate=(1.0, "float32")):
    """Has Keras's names of what optimizers keep."""

    def note(self, x):
        self.its_iteration.assign_add(tf.shape(x)[0])
        self.its_step_counter.assign_add(2)
        self.its_learning_rate.assign(0.5 * self.its_learning_rate)


class Replaced(Kept, rows=(0, "int32"), copy=(np.zeros(6), "float32")):
    """Assigns what doesn't come from the variable itself."""

    def note(self, x):
        self.its_rows.assign(tf.shape(x)[0])
        self.its_copy.assign(tf.cast(tf.fill([6], tf.shape(x)[0]), "float32"))


class OfUnknownShape(Kept, row=(np.zeros(6), "float32"), table=(np.zeros((2, 3)), "float32")):
    """Assigns tensors of whose shapes TensorFlow knows nothing, or a part."""

    def note(self, x):
        some = tf.boolean_mask(x[0], x[0] > -9.0)
        self.its_row.assign(some)
        self.its_table.assign(tf.reshape(some, [2, -1]))


class Python(Kept, factor=(2.0, "float32")):
    """Computes with a Python function, whose gradient is needed."""

    def build(self, shape):
        super().build(shape)
        self.weight = self.add_weight(name="weight", shape=(6,), initializer="ones")

    def note(self, x):
        pass

    def call(self, x, training=False):
        found = tf.py_function(lambda values: values * abs(values), [x * self.weight], tf.float32)
        return tf.ensure_shape(found, x.shape)


class Silent(keras.Model):
    """Its steps report no number, only two at once."""

    def train_step(self, data):
        super().train_step(data)
        return {"two": tf.constant([1.0, 2.0])}


def trained(kind, strategy, model=keras.Model):
    keras.utils.set_random_seed(7)
    with strategy.scope():
        given = keras.Input((6,))
        layer = KINDS[kind]()
        model = model(given, keras.layers.Dense(1)(layer(given)))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    try:
        history = model.fit(X, Y, batch_size=11, epochs=2, verbose=0, shuffle=False)
    except toolkit.errors.StrategyError as error:
        return {"refused": str(error)}
    found = {name: keras.ops.convert_to_numpy(getattr(layer, f"its_{name}")).tolist() for name in layer.state}
    found |= {"iterations": int(model.optimizer.iterations)}
    found |= {name: values for name, values in history.history.items() if name == "loss"}
    if hasattr(strategy, "session"):
        found["divided"] = strategy.session(model)._in_rounds
    return found


if __name__ == "__main__":
    out = {}
    served = one_process.served("rounds")
    for mode in ("one_device", *one_process.MODES):
        strategy = tf.distribute.get_strategy()
        if mode != "one_device":
            strategy = one_process.as_if(served, mode)
        out[mode] = {kind: trained(kind, strategy) for kind in KINDS}
        out[mode]["Silent"] = trained("Replaced", strategy, Silent)
    pathlib.Path(sys.argv[1]).write_text(json.dumps(out))
