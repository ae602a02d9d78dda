"""A loop as TensorFlow's tutorial has it, on sharded variables, and the same steps in the chief alone.

served_loop.py OUT.json
"""

import json
import pathlib
import sys

import toolkit

strategy = toolkit.strategies.create(
    parameter_server=toolkit.strategies.ParameterServerOptions(variables="sharded", shards=3, min_shard_bytes=64)
)

import keras
import numpy as np
import tensorflow as tf

random = np.random.default_rng(0)
WORDS = random.integers(0, 3000, size=(6, 16, 2))
WANTED = random.normal(size=(6, 16, 1)).astype("float32")
loss_of = keras.losses.MeanSquaredError()


def built():
    keras.utils.set_random_seed(1)
    word = keras.Input((2,), dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(3000, 16)(word))
    model = keras.Model(word, keras.layers.Dense(1)(keras.layers.Dense(40, activation="tanh")(x)))
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def step_of(model, optimizer):
    def step(words, wanted):
        with tf.GradientTape() as tape:
            loss = loss_of(wanted, model(words, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


with strategy.scope():
    served = built()
step = step_of(*served)


@tf.function
def one(words, wanted):
    return strategy.run(step, args=(words, wanted))


for words, wanted in zip(WORDS, WANTED, strict=True):
    strategy.coordinator.schedule(one, args=(tf.constant(words), tf.constant(wanted)))
    strategy.coordinator.join()
here = built()
alone = tf.function(step_of(*here))
for words, wanted in zip(WORDS, WANTED, strict=True):
    alone(tf.constant(words), tf.constant(wanted))
seen = {
    "sharded": sum(hasattr(v.value, "shards") for v in served[0].variables),
    "served": [keras.ops.convert_to_numpy(v).tolist() for v in served[0].variables],
    "here": [keras.ops.convert_to_numpy(v).tolist() for v in here[0].variables],
}
pathlib.Path(sys.argv[1]).write_text(json.dumps(seen))
