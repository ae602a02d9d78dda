"""Fits a small model under parameter servers; run in every task of a cluster.

    served.py OUT.json OPTIONS_JSON

OPTIONS: epochs, steps, "servers" for `toolkit.strategies.ParameterServerOptions`, "width" of the hidden layer,
"numbered" false for data that the chief reads and sends, "backup" for a BackupAndRestore directory.
"""

import json
import pathlib
import sys
import time

import toolkit

toolkit.cli.console.show_log()  # A worker's creation of the strategy doesn't return.
out, given = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
strategy = toolkit.strategies.create(
    "auto", parameter_server=toolkit.strategies.ParameterServerOptions(**given.get("servers", {}))
)

import keras
import numpy as np
import tensorflow as tf

tf.get_logger().setLevel("INFO")  # Says when a lost worker is back.
keras.utils.set_random_seed(3)
EXAMPLES, BATCH = 320, 16
random = np.random.default_rng(0)
images = random.normal(size=(EXAMPLES, 20)).astype("float32")
labels = (images @ random.normal(size=(20, 4)).astype("float32")).argmax(1).astype("int32")


class Notes(keras.callbacks.Callback):
    """Says where training stands, for a test that waits to strike."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_end(self, batch, logs=None):
        if batch % 20 == 0:
            print(f"batch {batch}", flush=True)

    def on_epoch_begin(self, epoch, logs=None):
        # The last epoch waits for a file, if one is named.
        while "wait" in given and epoch == given["epochs"] - 1 and not pathlib.Path(given["wait"]).exists():
            time.sleep(0.05)

    def on_epoch_end(self, epoch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))


def batch(number, share, shares):
    """A share of the batch of a step."""
    rows = tf.random.experimental.index_shuffle(
        (number * BATCH + tf.range(BATCH, dtype=tf.int64)) % EXAMPLES,
        seed=tf.constant([1, 2], tf.int64),
        max_index=tf.constant(EXAMPLES - 1, tf.int64),
    )
    rows = rows[share * BATCH // shares : (share + 1) * BATCH // shares]
    return tf.gather(images, rows), tf.gather(labels, rows)


class Seen(keras.metrics.Metric):
    """Counts examples."""

    def __init__(self, name="seen"):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.cast(tf.shape(y_true)[0], "float32"))

    def result(self):
        return self.total


with strategy.scope():
    layers = [keras.Input((20,))]
    # Wide enough for a step to take a few milliseconds.
    layers += [keras.layers.Dense(given.get("width", 64), activation="relu"), keras.layers.Dropout(0.1)]
    model = keras.Sequential([*layers, keras.layers.Dense(4)])
    schedule = keras.optimizers.schedules.PolynomialDecay(0.01, given["epochs"] * given["steps"], 0.001)
    model.compile(
        keras.optimizers.Adam(schedule),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", Seen()],
    )
plain = tf.data.Dataset.range(10**9).map(lambda n: batch(n, 0, 1))
data = strategy.numbered(plain, batch) if given.get("numbered", True) and hasattr(strategy, "numbered") else plain
notes = Notes()
callbacks = [notes]
if given.get("backup"):
    callbacks.append(keras.callbacks.BackupAndRestore(given["backup"]))
history = model.fit(data, epochs=given["epochs"], steps_per_epoch=given["steps"], verbose=0, callbacks=callbacks)
evaluated = model.evaluate(images[:203], labels[:203], batch_size=16, verbose=0, return_dict=True)
report = toolkit.strategies.report(model)
report.pop("variables", None)
out.write_text(
    json.dumps(
        {
            "iterations": int(model.optimizer.iterations.numpy()),
            "history": history.history,
            "rates": notes.rates,
            "evaluated": evaluated,
            "predicted": model.predict(images[:50], verbose=0).argmax(1).tolist(),
            "here": model(images[:50]).numpy().argmax(1).tolist(),
            **report,
        }
    )
)
