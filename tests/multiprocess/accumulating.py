"""Trains a model that accumulates gradients, in one process or in one of two workers.

python accumulating.py OUT.npz
"""

import sys

import toolkit

strategy = toolkit.strategies.create("auto")

import keras
import numpy as np
import tensorflow as tf

from toolkit.strategies.step import collectives
from toolkit.training import state

STEPS = 3
OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=STEPS),
    "clipped": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5, gradient_accumulation_steps=STEPS),
    "averaged": lambda: keras.optimizers.AdamW(
        0.01, clipnorm=0.1, use_ema=True, ema_overwrite_frequency=2, gradient_accumulation_steps=STEPS
    ),
}


def network():
    keras.utils.set_random_seed(1)
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(20, 8)(tokens)
    x = keras.layers.Dense(8, activation="tanh")(x)
    return keras.Model(tokens, keras.layers.Dense(1)(keras.layers.Flatten()(x)))


def compiled(name, scaled=False):
    with strategy.scope():
        model = network()
        optimizer = OPTIMIZERS[name]()
        model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, "mse")
    return model


def weights(model):
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def sent(model, data):
    """Returns how many dense elements are sent in a step that only adds gradients up, and in one that updates."""
    sizes = []
    kept, collectives._collective = collectives._collective, None

    def counting(operation, x, among):
        sizes.append(("_true" in x.graph.name, x.shape.num_elements() or 0))
        return kept(operation, x, among)

    collectives._collective = counting
    try:
        model.train_function = None
        model.fit(*data, batch_size=8, epochs=1, shuffle=False, verbose=0)
    finally:
        collectives._collective = kept
    return [sum(size for inside, size in sizes if inside == updates) for updates in (False, True)]


def saved_by_one(model, x, y, how):
    """The chief alone writes what has been added up by all; plain Keras reads the whole sums."""
    model.fit(x, y, epochs=1, **how)
    sums = state.capture(model)
    model.save("whole.keras")
    if toolkit.strategies.is_chief(strategy):
        read = keras.models.load_model("whole.keras").optimizer.variables
        for number, variable in enumerate(read):
            np.testing.assert_array_equal(variable.numpy(), sums[f"optimizer/{number:04d}"])
    return {"saved by one": np.concatenate([each.ravel() for name, each in sums.items() if name.startswith("opt")])}


def main():
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 20, (56, 6)), generator.normal(size=(56, 1)).astype("float32")
    how = {"batch_size": 8, "shuffle": False, "verbose": 0}
    seen = {}
    for name in OPTIMIZERS:
        model = compiled(name, scaled=name == "clipped")
        model.fit(x, y, epochs=2, **how)
        seen[name] = weights(model)

    # A checkpoint between two updates has the whole sum, and both who goes on and who reads it go on alike.
    model = compiled("Adam")
    model.fit(x[:40], y[:40], epochs=1, **how)
    saved = state.capture(model)
    seen["sums"] = np.concatenate([array.ravel() for name, array in saved.items() if name.startswith("optimizer/")])
    model.fit(x, y, epochs=1, **how)
    seen["went on"] = weights(model)
    other = compiled("Adam")
    state.restore(other, saved)
    other.fit(x, y, epochs=1, **how)
    seen["resumed"] = weights(other)
    model.save_weights("whole.weights.h5")
    seen |= saved_by_one(compiled("Adam"), x[:40], y[:40], how)
    if tf.distribute.get_replica_context() is None or strategy.num_replicas_in_sync > 1:
        seen["sent"] = np.array(sent(compiled("Adam"), (x, y)))
    np.savez(sys.argv[1], **seen)


if __name__ == "__main__":
    main()
