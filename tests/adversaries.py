"""Two networks that train each other and can't be called: what GANs, VQ-VAEs and siamese networks are.

    python adversaries.py OUT.json

trains them on one device, or beside parameter servers.
"""

import json
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import toolkit

X = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")


class Adversaries(keras.Model):
    """Its metrics have other names than what its step returns."""

    def __init__(self):
        super().__init__()
        self.judge = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        self.forger = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(4)])
        self.of_judge, self.of_forger = keras.metrics.Mean("discriminator_loss"), keras.metrics.Mean("generator_loss")

    def compile(self, judging, forging, loss):
        super().compile()
        self.judging, self.forging, self.loss_of = judging, forging, loss

    @property
    def metrics(self):
        return [self.of_judge, self.of_forger]

    def train_step(self, real):
        ones = tf.ones((tf.shape(real)[0], 1))
        with tf.GradientTape() as tape:
            forged = self.forger(real[:, :2])
            judged = self.loss_of(ones, self.judge(real)) + self.loss_of(0 * ones, self.judge(forged))
        weights = self.judge.trainable_weights
        self.judging.apply_gradients(zip(tape.gradient(judged, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            fooled = self.loss_of(ones, self.judge(self.forger(real[:, :2])))
        weights = self.forger.trainable_weights
        self.forging.apply_gradients(zip(tape.gradient(fooled, weights), weights, strict=True))
        self.of_judge.update_state(judged)
        self.of_forger.update_state(fooled)
        return {"d_loss": self.of_judge.result(), "g_loss": self.of_forger.result()}


def data():
    return tf.data.Dataset.from_tensor_slices(X).shuffle(50, seed=1).batch(16)


def trained(strategy, *, epochs):
    """History and weights."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Adversaries()
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01, momentum=0.9), loss)
    return model.fit(data(), epochs=epochs, verbose=0, shuffle=False).history, model.get_weights()


if __name__ == "__main__":
    # Under parameter servers one step after another, so that the numbers are those of one device.
    options = toolkit.strategies.ParameterServerOptions(max_staleness=0)
    history, _ = trained(toolkit.strategies.create(parameter_server=options), epochs=3)
    pathlib.Path(sys.argv[1]).write_text(json.dumps(history))
