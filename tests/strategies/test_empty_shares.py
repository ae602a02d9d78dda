"""Batches with fewer examples than replicas are one device's: a replica without examples counts for nothing."""

import batteries
import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies

pytestmark = pytest.mark.slow

R = np.random.default_rng(0)
X = R.normal(size=(9, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True).astype("float32")
LABELS = R.integers(0, 3, size=(9, 1))
WEIGHTS = R.uniform(0.5, 2, size=9).astype("float32")
WORDS = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 7], [1, 0, 0, 0], [2, 3, 1, 0]])


class Largest(keras.metrics.Metric):
    """A running maximum: its state isn't a sum."""

    def __init__(self):
        super().__init__(name="largest")
        self.top = self.add_weight(shape=(), initializer="zeros", name="top")

    def update_state(self, y, p, sample_weight=None):
        self.top.assign(tf.maximum(self.top, tf.reduce_max(tf.abs(y - p))))

    def result(self):
        return self.top.value


def masked(y, p):
    kept = tf.cast(y < 1, "float32")
    return tf.reduce_sum(kept * (y - p) ** 2) / (tf.reduce_sum(kept) + 0.1)


class Own(keras.Model):
    """Takes its gradients apart, indexes its batch, and counts examples."""

    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)
        self.norm = keras.layers.BatchNormalization(synchronized=True)

    def call(self, x, training=False):
        return self.last(self.norm(self.first(x), training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = (self(x, training=True) - y) ** 2
            loss = strategies.batch_mean(errors, tf.cast(y > 0, tf.float32)) + 0.1 * tf.reduce_mean(errors)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.5)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "never_empty": tf.cast(tf.reduce_all(tf.shape(y[0]) == 1), tf.float32)}


def dense(*layers, out=1, act=None):
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), *layers, keras.layers.Dense(out, act)])


def recurrent():
    embed = keras.layers.Embedding(8, 3, mask_zero=True)
    return keras.Sequential(
        [keras.Input((4,)), embed, keras.layers.LSTM(3, return_sequences=True), keras.layers.Dense(1)]
    )


def slower(rate):
    return keras.optimizers.schedules.ExponentialDecay(rate, 1, 0.7)


def adam():
    return keras.optimizers.Adam(slower(0.02))


def sgd():
    return keras.optimizers.SGD(slower(0.1), momentum=0.5)


ARRAYS = {"x": X[:5], "y": Y[:5]}
CASES = {
    "Adam and a schedule": (dense, adam, {"loss": "mse", "metrics": ["mae"]}, ARRAYS),
    "class weights": (
        lambda: dense(out=3, act="softmax"),
        sgd,
        {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]},
        {"x": X[:5], "y": LABELS[:5], "class_weight": {0: 0.3, 1: 2.0, 2: 1.0}},
    ),
    "sample weights": (
        dense,
        adam,
        {"loss": "mse", "weighted_metrics": ["mae"]},
        {**ARRAYS, "sample_weight": WEIGHTS[:5]},
    ),
    "a masked loss": (
        recurrent,
        sgd,
        {"loss": "mse", "metrics": ["mae"]},
        {"x": WORDS, "y": R.normal(size=(5, 4, 1)).astype("float32")},
    ),
    "a loss of the whole batch": (dense, sgd, {"loss": masked, "metrics": ["mae"]}, ARRAYS),
    "synchronised normalisation": (
        lambda: dense(keras.layers.BatchNormalization(synchronized=True)),
        sgd,
        {"loss": "mse"},
        ARRAYS,
    ),
    "metrics of other kinds": (
        lambda: dense(act="sigmoid"),
        sgd,
        {"loss": "mse", "metrics": [Largest, "AUC", lambda y, p: tf.reduce_mean(tf.abs(y - p))]},
        {"x": X[:5], "y": (Y[:5] > 0).astype("float32")},
    ),
    "a step of one's own": (Own, sgd, {}, ARRAYS),
    "noise, which the first replica draws": (
        lambda: dense(keras.layers.Dropout(0.5)),
        sgd,
        {"loss": "mse"},
        {"x": X[:3], "y": Y[:3], "batch_size": 1},
    ),
    "what layers add": (lambda: dense(keras.layers.ActivityRegularization(l2=0.1)), sgd, {"loss": "mse"}, ARRAYS),
}
OFTEN = [("class weights", 2), ("synchronised normalisation", 4), ("a step of one's own", 4)]


def trained(strategy, name, *, validation=1):
    make, optimizer, compiled, data = CASES[name]
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make()
        metrics = [each() if each is Largest else each for each in compiled.get("metrics", [])]
        model.compile(optimizer(), **{**compiled, "metrics": metrics or None})
    data = dict(data)
    x, y = data.pop("x"), data.pop("y")
    data.setdefault("batch_size", 2)
    held = {"validation_data": (x[:validation], y[:validation])} if compiled else {}
    history = model.fit(x, y, epochs=3, shuffle=False, verbose=0, **held, **data).history
    return [np.asarray(each) for each in model.get_weights()], int(model.optimizer.iterations), history


@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        pytest.param(name, replicas, marks=() if (name, replicas) in OFTEN else pytest.mark.long)
        for name in CASES
        for replicas in (2, 4)
    ],
)
def test_batches_smaller_than_the_replicas_are_one_devices(name, replicas, four_devices):
    mirrored = strategies.create("mirrored", devices=four_devices[:replicas])
    (weights, iterations, history), wanted = trained(mirrored, name), trained(tf.distribute.get_strategy(), name)
    assert iterations == wanted[1] == 9
    assert history.keys() == wanted[2].keys()
    for key, values in wanted[2].items():
        np.testing.assert_allclose(history[key], values, rtol=2e-5, atol=1e-6, err_msg=key)
    for ours, one in zip(weights, wanted[0], strict=True):
        np.testing.assert_allclose(ours, one, rtol=2e-5, atol=1e-6)


def test_statistics_of_a_replica_without_examples_stay(four_devices):
    with strategies.create("mirrored", devices=four_devices, batch_statistics="replica").scope():
        norm = keras.layers.BatchNormalization(momentum=0.9)
        model = keras.Sequential([keras.Input((4,)), norm, keras.layers.Dense(1)])
        model.compile(sgd(), "mse")
    model.fit(X[:5], Y[:5], batch_size=4, shuffle=False, verbose=0)
    own = 0.1 * X[:4]  # Each replica's after the first batch; of the second, the first has the only example.
    own[0] = 0.9 * own[0] + 0.1 * X[4]
    np.testing.assert_allclose(norm.moving_mean, own.mean(0), rtol=1e-5)


class Outputs(keras.Model):
    """Its outputs are by example, a table, of the whole batch, and a scalar."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        z = self.dense(x)
        return {
            "z": z + x[0, 0],
            "table": tf.transpose(self.dense.kernel.value),
            "mean": tf.reduce_mean(z, 0, keepdims=True),
            "scalar": tf.reduce_max(z),
        }


@pytest.mark.parametrize(("examples", "batch"), batteries.rows([(9, 4), (1, 4), (8, 8)], (9, 4)))
def test_what_is_not_by_example_is_predicted_once(examples, batch, four_devices):
    def predicted(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = Outputs()
            model(X[:2])
        return model.predict(X[:examples], batch_size=batch, verbose=0)

    ours, one = (
        predicted(s) for s in (strategies.create("mirrored", devices=four_devices), tf.distribute.get_strategy())
    )
    for name, wanted in one.items():
        np.testing.assert_allclose(ours[name], wanted, rtol=1e-5, err_msg=name)
        assert ours[name].shape == wanted.shape
