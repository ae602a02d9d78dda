"""As Keras's and TensorFlow's guides to multi-worker training write it: nothing here knows of this toolkit."""

import json
import os

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
config = json.loads(os.environ["TF_CONFIG"])
workers = len(config["cluster"]["worker"])
chief = config["task"]["index"] == 0


def dataset(batch_size):
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, 1000)
    images = random.normal(0, 0.3, (1000, 28, 28)).astype("float32")
    images[np.arange(1000), labels * 2] += 1.0
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    return data.shuffle(1000).repeat().batch(batch_size)


with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer(shape=(28, 28)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.1),
        metrics=["accuracy"],
    )
history = model.fit(dataset(64 * workers), epochs=2, steps_per_epoch=20)

directory = "." if chief else f"workertemp_{config['task']['index']}"
os.makedirs(directory, exist_ok=True)
model.save(os.path.join(directory, "trained.keras"))
print("accuracy", history.history["accuracy"][-1], flush=True)
if not chief:
    tf.io.gfile.rmtree(directory)
