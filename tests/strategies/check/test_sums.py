"""Sums of hundreds of thousands of numbers lose parts of each, on one device more than on several: no difference."""

import logging

import keras
import numpy as np
import pytest

from toolkit import strategies

L = keras.layers
LAYERS = {
    "the gradient of a bias": lambda: [L.Conv2D(4, 1, activation="relu")],
    "moments of a batch": lambda: [L.Conv2D(4, 1, use_bias=False), L.BatchNormalization(), L.ReLU()],
}


@pytest.mark.slow
@pytest.mark.parametrize(("what", "size"), [("the gradient of a bias", 64), ("moments of a batch", 128)])
def test_lost_parts_of_sums_are_no_differences(what, size, caplog):
    caplog.set_level(logging.INFO, "toolkit")
    strategy = strategies.create("mirrored", devices=("CPU:0", "CPU:1"), check="first_step")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        body = [keras.Input((size, size, 1)), *LAYERS[what](), L.GlobalAveragePooling2D(), L.Dense(3)]
        model = keras.Sequential(body)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).normal(size=(65, size, size, 1)).astype("float32")
    model.fit(x, np.arange(65) % 3, batch_size=65, verbose=0)
    assert "The first step of fit is one device's" in caplog.text
