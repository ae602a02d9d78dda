"""A plain script, as Keras's guides have it: nothing of this toolkit's in it."""

import time

import keras
import numpy as np
import tensorflow as tf


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)


strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((800, 4)), np.ones((800, 1)), batch_size=20, epochs=1, verbose=0, callbacks=[Slow()])
model.evaluate(np.ones((80, 4)), np.ones((80, 1)), verbose=0)
print("evaluated")
