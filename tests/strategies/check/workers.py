"""Fits, evaluates and predicts with the first steps compared, in one of two workers.

python workers.py FAULT

FAULT: "none"; "metric": the second worker counts nothing; "draw": both draw for the first rows; or "small": one device
can't hold a batch.
"""

import logging
import sys

import keras
import numpy as np
import small
import tensorflow as tf

import toolkit
from toolkit.strategies.context import this_step
from toolkit.strategies.step import share


def plant():
    original = keras.metrics.SparseCategoricalAccuracy.update_state

    def update(metric, *args, **kwargs):
        return None if this_step.replica else original(metric, *args, **kwargs)

    keras.metrics.SparseCategoricalAccuracy.update_state = update


def main():
    logging.basicConfig(level=logging.INFO, format="SAID %(message)s", stream=sys.stdout)
    strategy = toolkit.strategies.create("auto", check="first_step")
    random = np.random.default_rng(1)
    x, y = random.normal(size=(33, 6)).astype("float32"), random.integers(0, 3, 33)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(5), keras.layers.Dropout(0.3), keras.layers.BatchNormalization()]
        layers += [small.Small()] if sys.argv[1] == "small" else []
        model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    if sys.argv[1] == "metric":
        plant()
    if sys.argv[1] == "draw":
        share.Share.first = property(lambda _: tf.zeros([], tf.float64))
    model.fit(x, y, batch_size=9, verbose=0, validation_data=(x[:7], y[:7]))
    model.predict(x[:5], verbose=0)
    model.train_on_batch(x[:5], y[:5])


if __name__ == "__main__":
    main()
