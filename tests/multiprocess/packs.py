"""Trains one model in several ways to pack gradients, in one of two workers.

python packs.py OUT.npz
"""

import sys

import toolkit

strategy = toolkit.strategies.create("auto")

import keras
import numpy as np

from toolkit.strategies.options import GradientExchange, Options, set_options
from toolkit.strategies.step import collectives, overlap

WAYS = {
    "without overlap": {"bytes_per_pack": 0, "order": False},
    "chosen": {},
    "small packs": {"bytes_per_pack": 256},
    "by TensorFlow's all-reduce": {"bytes_per_pack": 256, "long": 0},
    "several steps": {"bytes_per_pack": 256, "steps_per_execution": 3},
    "eager": {"bytes_per_pack": 256, "run_eagerly": True},
    "float16": {"bytes_per_pack": 256, "dtype": "float16"},
}


def network():
    keras.utils.set_random_seed(1)
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(20, 8)(tokens)
    x = keras.layers.Reshape((6, 8, 1))(keras.layers.MultiHeadAttention(2, 4)(x, x))
    x = keras.layers.Conv2D(4, 3, activation="relu", padding="same")(keras.layers.Conv2D(3, 3)(x))
    x = keras.layers.BatchNormalization(synchronized=True)(x)
    return keras.Model(tokens, keras.layers.Dense(1)(keras.layers.Flatten()(x)))


def main():
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 20, (24, 6)), generator.normal(size=(24, 1)).astype("float32")
    seen, kept, long = {}, overlap.weights_first, collectives._LONG
    for way, given in WAYS.items():
        arguments = dict(given)
        overlap.weights_first = kept if arguments.pop("order", True) else (lambda _: None)
        collectives._LONG = arguments.pop("long", long)
        how = {key: arguments.pop(key) for key in ("steps_per_execution", "run_eagerly") if key in arguments}
        set_options(strategy, Options(gradients=GradientExchange(**arguments)))
        with strategy.scope():
            model = network()
            model.compile(keras.optimizers.Adam(0.01), "mse", **how)
        losses = []
        batch_end = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))  # noqa: B023
        model.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=[batch_end])
        seen[f"losses {way}"] = losses
        seen[way] = np.concatenate([weight.ravel() for weight in model.get_weights()])
    np.savez(sys.argv[1], **seen)


if __name__ == "__main__":
    main()
