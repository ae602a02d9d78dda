"""Losses, reports and gradients of shares of a batch, which are to be those of the whole batch."""

import batteries
import beside
import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies

random = np.random.default_rng(3)
X = random.normal(size=(33, 6)).astype("float32")
Y = random.normal(size=(33, 2)).astype("float32")
WEIGHTS = random.uniform(size=33)
BY_WORD = random.uniform(size=(33, 5))
WORDS = random.integers(1, 9, size=(33, 5)) * (np.arange(5) < random.integers(1, 6, size=(33, 1)))


def dense(reduction="sum_over_batch_size", rate=0.1):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, kernel_regularizer="l2")])
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    model.compile(keras.optimizers.SGD(rate), loss, metrics=["mae"], weighted_metrics=["mse"])
    return model


def masked(reduction="sum_over_batch_size"):
    embedding = keras.layers.Embedding(9, 4, mask_zero=True)
    model = keras.Sequential([keras.Input((5,), dtype="int32"), embedding, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


def one_number(build):
    """A model whose loss is a mean of the whole batch already, which Keras multiplies by the mean of its weights."""
    model = build()
    model.compile(
        keras.optimizers.SGD(0.1), lambda y, p: keras.ops.mean(keras.ops.square(keras.ops.cast(y, "float32") - p))
    )
    return model


class Logs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(dict(logs))

    on_test_batch_end = on_train_batch_end


def seen(strategy, build, data):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build()
    logs = Logs()
    model.fit(*data[:2], sample_weight=data[2], batch_size=7, epochs=2, shuffle=False, verbose=0, callbacks=[logs])
    model.evaluate(*data[:2], sample_weight=data[2], batch_size=7, verbose=0, callbacks=[logs])
    return logs.seen, model.get_weights()


CASES = {
    "plain": (dense, (X, Y, None)),
    "weighted": (dense, (X, Y, WEIGHTS)),
    "a sum": (lambda: dense("sum", 0.01), (X, Y, None)),
    "divided by weights": (lambda: dense("mean_with_sample_weight"), (X, Y, WEIGHTS)),
    "masked": (masked, (WORDS, WORDS % 3, None)),
    "masked, and weighted": (masked, (WORDS, WORDS % 3, BY_WORD)),
    "one number, weighted": (lambda: one_number(dense), (X, Y, WEIGHTS)),
    "one number, masked": (lambda: one_number(masked), (WORDS, WORDS[..., None] % 3, None)),
    "masked, divided by weights": (lambda: masked("mean_with_sample_weight"), (WORDS, WORDS % 3, BY_WORD)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", batteries.rows(CASES, ["one number, weighted", "masked, divided by weights"]))
def test_each_step_reports_and_learns_what_one_device_does(four_devices, case):
    one, weights = seen(tf.distribute.get_strategy(), *CASES[case])
    logs, others = seen(strategies.create("mirrored", devices=four_devices[:3]), *CASES[case])
    for mine, theirs in zip(logs, one, strict=True):
        assert mine.keys() == theirs.keys()
        assert mine == pytest.approx(theirs, rel=2e-6)
    for mine, theirs in zip(others, weights, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-7)


@pytest.mark.slow
def test_a_loop_of_ones_own_is_as_tensorflow_has_it(four_devices):
    """Gradients are summed, and Keras's losses are divided by the number of replicas, masked or not."""

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model, optimizer = masked(), keras.optimizers.SGD(0.1)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def step(words):
            with tf.GradientTape() as tape:
                loss = loss_of(words % 3, model(words))
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)

        data = tf.data.Dataset.from_tensor_slices(WORDS[:32]).batch(8)
        for words in strategy.experimental_distribute_dataset(data):
            strategy.run(step, args=(words,))
        return model.get_weights()

    many = trained(strategies.create("mirrored", devices=four_devices[:2]))
    for mine, theirs in zip(many, trained(tf.distribute.get_strategy()), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-7)


@pytest.mark.slow
def test_a_synchronised_normalisation_behind_a_mask_is_over_what_it_leaves_of_the_batch(four_devices):
    random = np.random.default_rng(12)
    series, y = random.normal(size=(20, 5, 3)).astype("float32"), random.normal(size=(20, 1)).astype("float32")
    series[:, 3:][random.random(20) < 0.4] = 0

    def build():
        norm = keras.layers.BatchNormalization(synchronized=True, momentum=0.8)
        parts = [keras.layers.Masking(), norm, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((5, 3)), *parts])

    how = {"batch_size": 9, "seed": 3, "compiled": beside.descent(0.03, "mse")}
    beside.assert_one_devices(four_devices[:2], build, series, y, **how)


@pytest.mark.slow
def test_the_log_of_a_loss_that_is_not_reduced_is_one_devices(four_devices):
    """Keras weights each example's loss by the batch's number of examples."""

    def build():
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])

    compiled = beside.descent(0.01, keras.losses.MeanSquaredError(reduction=None))
    beside.assert_one_devices(four_devices[:2], build, X, Y, batch_size=9, compiled=compiled, rtol=1e-5)
