"""A step or a layer that looks at the batch as a whole has one device's numbers on several replicas."""

import logging

import batteries
import beside
import keras
import numpy as np
import pytest
import tensorflow as tf
from conformance import whole_batch as wb
from conformance.whole_batch import BATCH
from keras import layers, ops

from toolkit import strategies

RANDOM = np.random.default_rng(0)
X, Y = (RANDOM.normal(size=(47, 6)).astype("float32") for _ in range(2))


def data():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


def trained(strategy, of):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = wb.Own(of)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        model.optimizer.build(model.trainable_variables)
    history = model.fit(data(), validation_data=data(), epochs=2, shuffle=False, verbose=0).history
    assert history["seen"] == history["val_seen"] == [47, 47]
    return np.concatenate([*(np.ravel(v) for v in history.values()), *map(np.ravel, model.get_weights())])


STEPS = [
    wb.negatives,
    wb.supervised,
    wb.barlow,
    wb.vicreg,
    wb.hardest,
    wb.mixup,
    wb.masked,
    wb.by_batch,
    wb.adversarial,
    wb.plain,
    wb.penalised,
]
IN_CI = (wb.negatives,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "count"),
    [pytest.param(of, 3 if of in IN_CI else 2, marks=() if of in IN_CI else pytest.mark.long) for of in STEPS],
)
def test_a_step_is_one_devices(four_devices, of, count):
    one = trained(strategies.create("one_device", devices=four_devices[:1]), of)
    many = trained(strategies.create("mirrored", devices=four_devices[:count]), of)
    np.testing.assert_allclose(many, one, atol=5e-6)


@pytest.mark.slow
def test_a_mean_over_rows_is_left_to_each_replica_and_what_else_travels_is_said(four_devices, caplog):
    caplog.set_level(logging.INFO)
    two = strategies.create("mirrored", devices=four_devices[:2])
    trained(two, wb.plain)
    assert "whole batch" not in caplog.text
    trained(two, wb.negatives)
    said = next(record.getMessage() for record in caplog.records if "Own.train_step computes" in record.getMessage())
    assert said.count("sequential") == 2
    assert said.count("the batch") == 1  # Only layers read y.


class Prototypes(layers.Layer):
    def build(self, shape):
        self.points = self.add_weight(shape=(2 * BATCH, shape[-1]), name="points")

    def call(self, x):
        return x, ops.normalize(self.points, axis=1)


class Named(keras.Model):
    """Compares the texts of the batch, and its rows with as many prototypes as two batches have."""

    def __init__(self):
        super().__init__()
        self.dense, self.prototypes = layers.Dense(4), Prototypes()

    def call(self, data):
        return self.prototypes(self.dense(data["x"]))[0]

    def train_step(self, data):
        same = tf.cast(data["name"][:, None] == data["name"][None, :], "float32")
        with tf.GradientTape() as tape:
            z, points = self.prototypes(self.dense(data["x"]))
            scores = tf.reduce_sum(tf.matmul(z, points, transpose_b=True))
            loss = tf.reduce_mean(same * tf.matmul(z, z, transpose_b=True)) + 0.01 * scores
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.slow
def test_a_step_may_compare_texts_and_what_has_no_rows(four_devices):
    names = [["one", "", "three and more", "\u00e9"][n % 4] for n in range(len(X))]

    given = tf.data.Dataset.from_tensor_slices({"x": X, "name": names}).batch(BATCH).take(2)
    beside.assert_one_devices(four_devices[:2], Named, given, compiled=beside.descent(0.01), rtol=2e-5)


class Sloped(keras.Model):
    """Compares the slopes of its outputs in the batch."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(3)])

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                out = self(x, training=True)
            slopes = tf.reduce_sum(inner.batch_jacobian(out, x) ** 2, [1, 2])
            loss = tf.math.reduce_variance(slopes) + tf.reduce_mean(out**2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.long
@pytest.mark.slow
def test_slopes_of_the_batch_are_compared_as_on_one_device(four_devices):
    beside.assert_one_devices(four_devices[:2], Sloped, data(), compiled=beside.descent(0.05))


class Denoiser(keras.Model):
    """Draws noise in the shape of the whole batch, whose size is in the script."""

    def __init__(self, size):
        super().__init__()
        self.net, self.size = keras.Sequential([keras.Input((6,)), layers.Dense(6)]), size

    def train_step(self, data):
        x, _ = data
        rows = BATCH if self.size == "constant" else x.shape[0]
        noise = tf.reshape(tf.range(6.0 * rows) / (6 * rows), (rows, 6))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.net(x + noise) - noise) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.parametrize("size", ["constant", "of the batch"])
def test_a_step_may_know_the_size_of_the_batch(four_devices, size):
    whole = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH, drop_remainder=True)
    beside.assert_one_devices(four_devices[:2], lambda: Denoiser(size), whole, compiled=beside.descent(0.1), atol=1e-6)


@pytest.mark.slow
def test_a_loop_compares_its_examples_with_all_of_the_batch(four_devices):
    def trained(strategy):
        with strategy.scope():
            keras.utils.set_random_seed(1)
            net = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build(net.trainable_variables)
        batches = strategy.experimental_distribute_dataset(data().take(2))

        @tf.function
        def step(x, y):
            def one(x, y):
                with tf.GradientTape() as tape:
                    scores = tf.matmul(net(x), strategies.batch_rows(net(y)), transpose_b=True)
                    loss = -tf.reduce_sum(tf.nn.log_softmax(scores)[:, 0]) / BATCH
                optimizer.apply_gradients(
                    zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True)
                )

            strategy.run(one, (x, y))

        for x, y in batches:
            step(x, y)
        return np.concatenate([np.ravel(each) for each in net.get_weights()])

    one = trained(tf.distribute.get_strategy())
    np.testing.assert_allclose(trained(strategies.create("mirrored", devices=four_devices[:2])), one, atol=1e-6)


class TwoViews(layers.Layer):
    """As of SimCLR: a batch of pictures, and then the same ones seen otherwise."""

    def call(self, x):
        return tf.concat([x, x[:, ::-1] ** 2], 0)


class Contrasted(keras.Model):
    """Compares the two views of each example with those of the others."""

    def __init__(self):
        super().__init__()
        self.views, self.dense = TwoViews(), layers.Dense(4)

    def call(self, x):
        return self.dense(self.views(x))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            one, other = tf.split(self(data[0]), 2, 0)
            scores = tf.matmul(one, other, transpose_b=True)
            loss = -tf.reduce_mean(tf.linalg.diag_part(tf.nn.log_softmax(scores)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"contrast": loss}

    def predict_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        return tf.concat([self.dense(x), self.dense(-x)], 0)


@pytest.mark.slow
def test_a_batch_that_stands_twice_in_a_tensor_keeps_its_order(four_devices):
    def numbers(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = Contrasted()
            model.compile(keras.optimizers.SGD(0.1))
        losses = model.fit(data(), epochs=2, shuffle=False, verbose=0).history["contrast"]
        with strategy.scope():
            viewed = keras.Sequential([keras.Input((6,)), TwoViews()])
        predicted = [each.predict(X, batch_size=BATCH, verbose=0) for each in (model, viewed)]
        return np.concatenate([np.ravel(each) for each in (losses, *predicted, *model.get_weights())])

    two = strategies.create("mirrored", devices=four_devices[:2])
    np.testing.assert_allclose(numbers(two), numbers(tf.distribute.get_strategy()), atol=5e-6)


class Frequencies(keras.Model):
    """Centres complex numbers over the batch."""

    def __init__(self):
        super().__init__()
        self.dense, self.waves = layers.Dense(4), layers.Lambda(lambda x: tf.signal.fft(tf.complex(x, x * x)))

    def call(self, x):
        waves = self.waves(self.dense(x))
        centred = waves - tf.reduce_mean(waves, 0)
        return tf.abs(centred) + tf.math.imag(waves)


@pytest.mark.slow
def test_complex_rows_are_exchanged_whole(four_devices):
    def numbers(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = Frequencies()
            model.compile(keras.optimizers.SGD(0.01), "mse")
        history = model.fit(X, Y[:, :4], batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        return np.concatenate([history["loss"], *map(np.ravel, model.get_weights())])

    two = strategies.create("mirrored", devices=four_devices[:2])
    np.testing.assert_allclose(numbers(two), numbers(tf.distribute.get_strategy()), rtol=1e-5, atol=5e-6)


# Layers.


MIXING = {
    "balance of experts": wb.Router,
    "initialised by data": wb.ActNorm,
    "centred": wb.Centred,
    "counter": wb.Counter,
    "a function that centres": lambda: layers.Lambda(lambda x: x - ops.mean(x, 0)),
    "operations of the model's": lambda: lambda x: x - ops.mean(x, 0),
    "a branch that all rows decide": lambda: layers.Lambda(
        lambda x: tf.cond(tf.reduce_mean(x) > 0, lambda: x, lambda: -x)
    ),
    "a loop over rows": lambda: layers.Lambda(lambda x: tf.scan(lambda before, row: 0.5 * before + row, x)),
    "up to the largest place": lambda: layers.Lambda(
        lambda x: x * ops.sum(x[:, : ops.max(ops.argmax(x, axis=1)) + 1], axis=1, keepdims=True)
    ),
    "ranks": lambda: layers.Lambda(lambda x: ops.sort(x, 0)),
    "the number of rows": lambda: layers.Lambda(lambda x: x * ops.cast(ops.shape(x)[0], "float32") / BATCH),
    "along axis 0": lambda: layers.Softmax(axis=0),
    "layers in a loop": wb.Looped,
    "activity regularizer": lambda: layers.Dense(4, activity_regularizer=wb.gram),
}


def fitted(strategy, make):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        given = keras.Input((6,))
        h = layers.Dense(4, "tanh")(given)
        model = keras.Model(given, layers.Dense(1)(make()(h)))
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    history = model.fit(
        X, Y[:, :1], batch_size=BATCH, shuffle=False, epochs=2, verbose=0, validation_data=(X, Y[:, :1])
    )
    predicted = model.predict(X, batch_size=BATCH, verbose=0)
    return np.concatenate([*history.history.values(), *map(np.ravel, [predicted, *model.get_weights()])])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    batteries.rows(MIXING, ["initialised by data", "operations of the model's"]),
)
def test_a_layer_that_mixes_rows_is_one_devices(four_devices, name):
    one = fitted(strategies.create("one_device", devices=four_devices[:1]), MIXING[name])
    many = fitted(strategies.create("mirrored", devices=four_devices[:2]), MIXING[name])
    np.testing.assert_allclose(many, one, atol=5e-6)


class Probable(keras.Model):
    """Compares the batch's rows beside a loss of probabilities, of which Keras's losses read the logits."""

    def __init__(self):
        super().__init__()
        self.features, self.chances = layers.Dense(4), layers.Dense(3, activation="softmax")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            z = self.features(x)
            loss = keras.losses.SparseCategoricalCrossentropy()(tf.argmax(y, 1) % 3, self.chances(z))
            loss += tf.reduce_mean(tf.math.reduce_std(z, axis=0))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.slow
def test_logits_go_where_probabilities_go(four_devices):
    beside.assert_one_devices(four_devices[:2], Probable, data(), compiled=beside.descent(0.1))


@pytest.mark.slow
def test_the_gradient_of_a_bias_is_exchanged_where_replicas_have_other_numbers_of_rows(four_devices):
    """It is computed from nothing of a replica's but how many rows it has."""

    def build():
        x, y = keras.Input((6,)), keras.Input((1,))
        p = layers.Dense(1)(x)
        return keras.Model([x, y], ops.mean((y - p) ** 2) * ops.ones_like(p))

    x, y = X[:41], Y[:41, :1]
    own = beside.descent(0.05, lambda _, errors: errors)
    beside.assert_one_devices(four_devices[:2], build, [x, y], y, batch_size=11, epochs=1, seed=3, compiled=own)


PARTS = {
    "half": lambda x, _: x[: tf.shape(x)[0] // 2],
    "every third": lambda x, _: x[::3],
    "what a mask leaves": tf.boolean_mask,
    "twice": lambda x, _: tf.concat([x, x], 0),
}


class Partly(keras.Model):
    """Gives a part of the batch to a layer that adds to the loss, and to the loss that it was compiled with."""

    def __init__(self, part):
        super().__init__()
        self.part, self.first, self.last = part, layers.Dense(5), layers.Dense(6, activity_regularizer="l2")

    def call(self, x):
        return self.last(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            z = self.first(x)
            part, labels = (PARTS[self.part](each, x[:, 0] > 0) for each in (z, y))
            loss = self.compute_loss(part, labels, self.last(part)) + tf.reduce_mean(tf.math.reduce_std(z, 0))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"total": loss}


@pytest.mark.slow
@pytest.mark.usefixtures("regularizers_are_means")
@pytest.mark.parametrize("part", batteries.rows(PARTS, "half"))
def test_a_part_of_the_batch_counts_by_its_own_rows(four_devices, part):
    given = tf.data.Dataset.from_tensor_slices((X, Y)).batch(11)
    how = {"seed": 3, "compiled": beside.descent(0.1, "mse")}
    beside.assert_one_devices(four_devices[:2], lambda: Partly(part), given, **how)


class Watched(layers.Layer):
    """Updates metrics of its own with values of the batch."""

    def __init__(self, value):
        super().__init__()
        self.watch, self.value = keras.metrics.Mean(name="watch"), value

    def call(self, x):
        self.watch.update_state(self.value(x))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("value", [ops.max, ops.sum, pytest.param(ops.mean, marks=pytest.mark.long)])
def test_a_metric_that_a_layer_updates_is_of_the_whole_batch(four_devices, value):
    def seen(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), Watched(value), layers.Dense(6)])
            model.compile("sgd", "mse")
        first = model.fit(X, Y, batch_size=11, shuffle=False, verbose=0).history["watch"]
        return [*first, model.evaluate(X, Y, batch_size=11, verbose=0, return_dict=True)["watch"]]

    one = seen(tf.distribute.get_strategy())
    np.testing.assert_allclose(seen(strategies.create("mirrored", devices=four_devices[:2])), one, rtol=1e-5)
