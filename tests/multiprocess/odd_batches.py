"""Fits, evaluates and predicts a model with sharded layers, with batches of several shapes, in one of two workers.

python odd_batches.py OUT.npz
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import toolkit


def main():
    strategy = toolkit.strategies.create("auto")
    x = np.random.default_rng(0).normal(size=(63, 6)).astype("float32")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [toolkit.parallel.ShardedDense(9, activation="tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    predicted = [model.predict(x, batch_size=32, verbose=0)]

    def batches():
        for start in range(0, 63, 8):
            yield x[start : start + 8], x[start : start + 8, :1]

    specs = (tf.TensorSpec((None, 6)), tf.TensorSpec((None, 1)))
    model.fit(tf.data.Dataset.from_generator(batches, output_signature=specs), epochs=2, verbose=0)
    model.evaluate(x, x[:, :1], batch_size=31, verbose=0)
    predicted.append(model.predict(x[:5], batch_size=4, verbose=0))
    with strategy.scope():  # What it exchanges first is as large as the other's, in another shape.
        folded = keras.Sequential([keras.Input((2, 3)), toolkit.parallel.ShardedDense(9)])
    predicted.append(folded.predict(x.reshape(-1, 2, 3), batch_size=32, verbose=0))
    np.savez(sys.argv[1], *predicted, *model.get_weights())


if __name__ == "__main__":
    main()
