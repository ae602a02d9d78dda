"""What tells weights apart that differ by a bit, or by their order."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import parallel, strategies
from toolkit.errors import StrategyError
from toolkit.strategies.fit import equality
from toolkit.strategies.fit.equality import _digest as digest
from toolkit.strategies.fit.equality import _sum_of_bits


def sums(*arrays):
    return {int(_sum_of_bits(tf.constant(array))) for array in arrays}


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"])
def test_weights_that_differ_anywhere_or_by_their_order_have_other_sums(kind):
    array = np.random.default_rng(0).integers(0, 2, 3001).astype(kind)
    array[:2] = 0, 1
    others = [np.where(np.arange(array.size) == place, 1 - array, array) for place in (0, 1023, 1024, 3000)]
    swapped = array.copy()
    swapped[:2] = array[1::-1]
    far = array.copy()
    far[[0, 2048 + int(np.argmax(array[2048:] != array[0]))]] = far[
        [2048 + int(np.argmax(array[2048:] != array[0])), 0]
    ]
    all_of_them = [array, *(each.astype(kind) for each in others), swapped, far]
    assert len(sums(*all_of_them)) == len(all_of_them)
    assert len(sums(array, array.copy())) == 1


def test_bits_count_and_not_values():
    assert len(sums(np.float32([0.0]), np.float32([-0.0]), np.float32([np.nan]))) == 3
    assert len(sums(np.float32([np.nan]), np.float32([np.nan]))) == 1
    assert sums(np.zeros((0, 4), "float32")) == {0}


class Change(keras.callbacks.Callback):
    """Changes a weight of the second replica's own copy after some step."""

    def __init__(self, value, after):
        super().__init__()
        self.value, self.after, self.step = value, after, 0

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        if self.step == self.after:
            copy = self.model.layers[0].kernel.value.values[1]
            copy.assign(tf.tensor_scatter_nd_update(copy, [[0, 0]], [self.value(copy[0, 0])]))


@pytest.fixture
def two_replicas(four_devices):
    strategy = strategies.create("mirrored", devices=["CPU:0", "CPU:1"])
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="first"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    return model


def fit(model, *callbacks, epochs=3):
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    return model.fit(x, x.sum(axis=1), batch_size=8, epochs=epochs, verbose=0, callbacks=list(callbacks))


@pytest.mark.slow
def test_a_replica_whose_weights_change_is_named_at_the_end_of_the_epoch(two_replicas):
    with pytest.raises(StrategyError) as ended:
        fit(two_replicas, Change(lambda value: -value, after=7))
    found = r"after epoch 2, replica 1 had other values of \S*first/kernel than replica 0. After epoch 1 they"
    assert re.search(found, str(ended.value))


@pytest.mark.slow
def test_within_an_epoch_weights_are_compared_as_often_as_costs_little(two_replicas, monkeypatch):
    monkeypatch.setattr(equality, "_FIRST", 2)
    monkeypatch.setattr(equality, "_SHARE", 1e9)  # After each step.
    with pytest.raises(StrategyError) as ended:
        fit(two_replicas, Change(lambda value: value + np.nan, after=8))
    said = str(ended.value)
    assert "after step 4 of epoch 2, replica 1 had other values" in said
    assert "After step 3 of epoch 2 they were still equal" in said


@pytest.mark.slow
def test_a_difference_of_rounding_is_said_once_and_training_goes_on(two_replicas, caplog):
    fit(two_replicas, Change(lambda value: np.nextafter(np.float32(value), np.float32(9)), after=7), epochs=4)
    said = [record.getMessage() for record in caplog.records if "had other values of" in record.getMessage()]
    assert len(said) == 1
    assert "by rounding" in said[0]


def test_every_bit_of_weights_counts_however_they_are_put_together(monkeypatch):
    def digests(values):
        sums = tf.stack([equality._sum_of_words(piece) for piece in equality._pieces(values)])
        return int(equality._sum_of_words(sums)), equality._digest(values)

    monkeypatch.setattr(equality, "_PIECE", 4096)
    weights = [np.random.default_rng(0).normal(size=size).astype("float32") for size in (3, 5000, 200, 250, 4096)]
    seen = [digests([tf.constant(weight) for weight in weights])]
    for number, weight in enumerate(weights):
        for place in (0, weight.size - 1):
            flipped = weight.copy()
            flipped.view(np.int32)[place] ^= 1
            changed = [*weights[:number], flipped, *weights[number + 1 :]]
            seen.append(digests([tf.constant(each) for each in changed]))
    assert all(len({pair[way] for pair in seen}) == len(seen) for way in (0, 1))


MEANT = {
    "local steps": {"local": strategies.LocalSteps(every=3)},
    "shards": {"shards": 2},
    "ZeRO-1": {"optimizer_state": "sharded"},
    "statistics of one's own, and averages": {"batch_statistics": "replica"},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", MEANT.values(), ids=MEANT)
def test_what_differs_by_its_meaning_is_left_out(four_devices, monkeypatch, options):
    monkeypatch.setattr(equality, "_FIRST", 1)
    monkeypatch.setattr(equality, "_SHARE", 1e9)
    monkeypatch.setattr(equality, "_ROUNDING", -1.0)  # No difference is too small.
    compared = []
    monkeypatch.setattr(equality, "_digest", lambda values: compared.append(len(values)) or digest(values))
    strategy = strategies.create("mirrored", devices=["CPU:0", "CPU:1"], **options)
    keras.utils.set_random_seed(1)
    dense = parallel.ShardedDense if "shards" in options else keras.layers.Dense
    with strategy.scope():
        parts = [dense(6), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *parts])
        averages = "batch_statistics" in options
        model.compile(keras.optimizers.Adam(use_ema=averages, ema_overwrite_frequency=3 if averages else None), "mse")
    fit(model)
    # In local steps, after each third of five steps and at each epoch's end, of two replicas.
    assert len(compared) == (2 * 2 * 3 if "local" in options else 2 * (5 + 1) * 3)
    assert set(compared) == {4 if "shards" in options else 6}
