"""One device that can't hold a batch is given its first rows, and so are replicas; the script's own step has all."""

import logging

import keras
import numpy as np
import pytest
import small
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import StrategyError
from toolkit.strategies.check import fewer_rows
from toolkit.strategies.step import share

X = np.random.default_rng(0).normal(size=(33, 6)).astype("float32")
Y = np.arange(33) % 3


def mirrored(check="first_step"):
    keras.utils.set_random_seed(1)
    return strategies.create("mirrored", devices=("CPU:0", "CPU:1"), check=check)


def built(strategy, held=small.HELD):
    with strategy.scope():
        layers = [
            keras.layers.Dense(5),
            keras.layers.Dropout(0.3),
            keras.layers.BatchNormalization(),
            small.Small(held),
        ]
        model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def said(caplog):
    return [each.getMessage() for each in caplog.records if "first step of" in each.getMessage()]


@pytest.mark.slow
def test_the_first_rows_are_compared_and_nothing_of_the_script_changes(caplog):
    caplog.set_level(logging.INFO, "toolkit")

    def left(check):
        model = built(mirrored(check))
        history = model.fit(X, Y, batch_size=16, epochs=1, verbose=0, validation_data=(X[:4], Y[:4]))
        values = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
        return [*map(np.asarray, history.history.values()), *values, model.train_on_batch(X[:13], Y[:13])]

    checked, unchecked = left("first_step"), left("none")
    assert all(np.array_equal(*pair) for pair in zip(checked, unchecked, strict=True))
    fit, evaluate = said(caplog)
    assert fit.startswith("The first step of fit is one device's: ")
    assert ", of the first 3 of 16 rows: one device can't hold " in fit
    assert evaluate.startswith("The first step of evaluate is one device's: ")
    assert "rows" not in evaluate


@pytest.mark.slow
@pytest.mark.long
def test_batches_of_a_script_s_own_too(caplog):
    caplog.set_level(logging.INFO, "toolkit")
    built(mirrored()).train_on_batch(X[:13], Y[:13])
    (step,) = said(caplog)
    assert ", of the first 5 of 13 rows: " in step


@pytest.mark.slow
def test_what_differs_is_named(monkeypatch):
    model = built(mirrored())
    monkeypatch.setattr(share.Share, "weight", property(lambda _: tf.constant(0.5, tf.float64)))
    with pytest.raises(StrategyError, match="the gradient of .*, of the first 3 of 16 rows"):
        model.fit(X, Y, batch_size=16, epochs=1, verbose=0)


@pytest.mark.slow
def test_no_row_at_all_is_said(caplog):
    built(mirrored(), held=0).fit(X, Y, batch_size=16, epochs=1, verbose=0)
    (step,) = said(caplog)
    assert "isn't compared with one device's: one device can't hold the batch: ResourceExhaustedError: " in step


@pytest.mark.slow
def test_a_loop_of_a_script_s_own(caplog):
    caplog.set_level(logging.INFO, "toolkit")
    strategy = mirrored()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), small.Small()])
        optimizer = keras.optimizers.SGD(0.1)

    def step(x, y, training):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=training), from_logits=True)
            loss = tf.reduce_sum(losses) / 12.0
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train(batch, training=True):
        return strategy.reduce("SUM", strategy.run(step, args=(*batch, training)), axis=None)

    for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(12)):
        train(batch)
    (found,) = said(caplog)
    assert found.startswith("The first step of the loop is one device's: ")
    assert ", of the first 5 of 12 rows: " in found
    assert int(optimizer.iterations) == 3


@pytest.mark.parametrize(
    ("rows", "shares", "fewer"), [(64, 2, 31), (33, 2, 15), (16, 2, 7), (9, 4, 5), (4, 2, 3), (3, 2, 1), (1, 2, 0)]
)
def test_shares_of_fewer_rows_are_uneven(rows, shares, fewer):
    assert fewer_rows.halved(rows, shares) == fewer


def test_first_rows_of_every_kind():
    nodes, edges = tf.range(4), tf.range(8)
    sparse = tf.sparse.from_dense(tf.eye(4, 3))
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(6), [1, 2, 0, 3])
    whole = {"nodes": nodes, "edges": edges, "sparse": sparse, "ragged": ragged, "table": tf.ones([7]), "none": None}
    divided = [name in ("edges", "nodes", "ragged", "sparse") for name in sorted(whole)]
    found = fewer_rows.first_rows(whole, divided, 3)
    assert (found["nodes"].shape[0], found["edges"].shape[0], found["table"].shape[0]) == (3, 6, 7)
    assert tf.sparse.to_dense(found["sparse"]).numpy().tolist() == np.eye(3).tolist()
    assert found["ragged"].to_list() == [[0], [1, 2], []]
    assert fewer_rows.row_counts({"nodes": tf.range(4), "edges": tf.range(7)}, [True, True]) == []


def test_memory_is_short_in_several_words():
    short = tf.errors.InternalError(None, None, "CUDNN_STATUS_ALLOC_FAILED")
    assert all(
        map(fewer_rows.is_too_large, (MemoryError(), tf.errors.ResourceExhaustedError(None, None, "OOM"), short))
    )
    assert not fewer_rows.is_too_large(ValueError("a shape"))
