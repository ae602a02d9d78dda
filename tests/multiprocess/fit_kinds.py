"""Keras's own fit, evaluate and predict in every way that users call them, in one process or in several.

    python fit_kinds.py OUT.json DIRECTORY

tests/conformance/features.py has many more ways, one by one.
Written as for one device: nothing but the strategy's making knows of other processes.
"""

import json
import pathlib
import sys

import toolkit

out, directory = sys.argv[1], pathlib.Path(sys.argv[2])
# Under parameter servers one step after another, so that the numbers are those of one device.
strategy = toolkit.strategies.create(parameter_server=toolkit.strategies.ParameterServerOptions(max_staleness=0))

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(5)
RANDOM = np.random.default_rng(3)
# 103 is no multiple of a batch of 20, nor is the last batch's 3 of the replicas.
X = RANDOM.normal(size=(103, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")


def model(*, normalised=False, **settings):
    keras.utils.set_random_seed(9)
    with strategy.scope():
        given = keras.Input((6,))
        hidden = keras.layers.Dense(8, activation="tanh")(given)
        if normalised:
            hidden = keras.layers.BatchNormalization()(hidden)
        made = keras.Model(given, keras.layers.Dense(2)(hidden))
        made.compile(
            keras.optimizers.SGD(0.05),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **settings,
        )
    return made


SEEN = {}


def note(name, made, history):
    weights = [keras.ops.convert_to_numpy(v).tolist() for v in made.weights]
    SEEN[name] = {"history": history.history, "weights": weights}


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(20)


plain = {"epochs": 2, "verbose": 0, "shuffle": False}
made = model()
note("numpy", made, made.fit(X, Y, batch_size=20, validation_data=(X[:41], Y[:41]), **plain))
SEEN["evaluate"] = made.evaluate(X, Y, batch_size=20, verbose=0)
made = model()  # The scale is doubled until a gradient overflows in 32 bits, halved then, and the step left out.
with strategy.scope():
    doubling = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.05), initial_scale=2.0**124, dynamic_growth_steps=2
    )
    made.compile(doubling, made.loss)
note("loss scale", made, made.fit(X, Y, batch_size=20, **plain))
SEEN["scaled steps"] = [float(v.numpy()) for v in (doubling.iterations, doubling.dynamic_scale, doubling.step_counter)]
keras.utils.set_random_seed(9)
with strategy.scope():  # Beside parameter servers a step pulls the rows of its words, 200 KB is large enough for it.
    word = keras.Input((3,), dtype="int32")
    words = keras.layers.Embedding(3000, 17)
    both = keras.layers.Concatenate()([keras.layers.Flatten()(words(word)), keras.layers.Flatten()(words(word % 7))])
    tables = keras.Model(word, keras.layers.Dense(2)(both))
    tables.compile(keras.optimizers.Adagrad(0.1), made.loss, metrics=["accuracy"])
WORDS = RANDOM.integers(-3, 2997, size=(103, 3))
note("tables", tables, tables.fit(WORDS, Y, batch_size=20, validation_data=(WORDS[:41], Y[:41]), **plain))
SEEN["predict tables"] = tables.predict(WORDS, verbose=0).tolist()
SEEN["predict"] = model().predict(X, batch_size=20, verbose=0).tolist()
made = model()
note("tf.data", made, made.fit(dataset(), validation_data=dataset(), epochs=2, verbose=0))
made = model(steps_per_execution=3)
note("steps_per_execution", made, made.fit(dataset(), epochs=2, verbose=0))
made = model()
note("class_weight", made, made.fit(X, Y, batch_size=20, class_weight={0: 1.0, 1: 2.0}, **plain))
made = model(normalised=True)
note("normalised", made, made.fit(X, Y, batch_size=20, validation_data=(X[:41], Y[:41]), **plain))
made = model(normalised=True)
callbacks = [
    keras.callbacks.ModelCheckpoint(str(directory / "best" / "{epoch}.keras")),
    keras.callbacks.ModelCheckpoint(str(directory / "newest.weights.h5"), save_weights_only=True, save_freq=2),
    keras.callbacks.BackupAndRestore(str(directory / "backup")),
    keras.callbacks.TensorBoard(str(directory / "board")),
    keras.callbacks.CSVLogger(str(directory / "log.csv")),
    keras.callbacks.EarlyStopping("loss", patience=5),
    keras.callbacks.ReduceLROnPlateau("loss", patience=1),
]
note("callbacks", made, made.fit(X, Y, batch_size=20, callbacks=callbacks, **plain))
made.save(directory / "model.keras")
again = keras.models.load_model(directory / "model.keras")
SEEN["loaded"] = float(np.abs(again.predict(X, verbose=0) - made.predict(X, verbose=0)).max())
made.save_weights(directory / "sharded.weights.json", max_shard_size=3e-7)
again.set_weights([0 * w for w in again.get_weights()])
again.load_weights(directory / "sharded.weights.json")
SEEN["sharded"] = float(np.abs(again.predict(X, verbose=0) - made.predict(X, verbose=0)).max())
made.export(directory / "exported", verbose=False)
exported = tf.saved_model.load(directory / "exported")
SEEN["exported"] = float(np.abs(exported.serve(X) - made.predict(X, verbose=0)).max())
tables.export(directory / "exported tables", verbose=False)
SEEN["chief"] = toolkit.strategies.is_chief(strategy)
pathlib.Path(out).write_text(json.dumps(SEEN))
