"""Two networks that train each other and can't be called, as GANs: on one device, or beside parameter servers.

python adversaries.py OUT.json
"""

import json
import pathlib
import sys

import toolkit

# Under parameter servers one step after another, so that the numbers are those of one device.
strategy = toolkit.strategies.create(parameter_server=toolkit.strategies.ParameterServerOptions(max_staleness=0))

import keras
import numpy as np
import tensorflow as tf


class Adversaries(keras.Model):
    def __init__(self):
        super().__init__()
        self.judge = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        self.forger = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(4)])
        self.loss_of_judge = keras.metrics.Mean(name="discriminator_loss")

    def compile(self, judging, forging, loss):
        super().compile()
        self.judging, self.forging, self.loss_of = judging, forging, loss

    @property
    def metrics(self):
        return [self.loss_of_judge]

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
        self.loss_of_judge.update_state(judged)
        return {"d_loss": self.loss_of_judge.result()}


keras.utils.set_random_seed(1)
with strategy.scope():
    model = Adversaries()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01, momentum=0.9), loss)
x = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
shuffled = tf.data.Dataset.from_tensor_slices(x).shuffle(50, seed=1).batch(16)
history = model.fit(shuffled, epochs=3, verbose=0, shuffle=False).history
pathlib.Path(sys.argv[1]).write_text(json.dumps(history))
