"""Trains a network on all available devices. Replace `data` and `build` by your own.

    python train.py                         # all GPUs of this machine, or one CPU
    toolkit compare train.py                # the first steps on two devices, compared with one
    toolkit launch --workers=2 train.py     # two processes
    toolkit launch --on=ssh:a,b train.py    # two hosts
    sbatch job.sh                           # under Slurm

Started again after it was stopped or killed, it goes on where it was and ends with the same weights. With other data or
another model remove runs/train first, or name another directory.
"""

import keras
import numpy as np
import toolkit

EPOCHS = 5
BATCH = 64  # Examples in each step, over all devices.
RUN = "runs/train"  # Checkpoints, history and report. With several hosts, on a disk that all of them share.


def data():
    """Returns examples and labels for training and for validation."""
    x = np.random.default_rng(0).normal(size=(5120, 32)).astype("float32")
    y = (x[:, :4].sum(axis=1) > 0).astype("int32")
    return (x[:4096], y[:4096]), (x[4096:], y[4096:])


def build():
    """Returns the compiled model."""
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dropout(0.2), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((32,)), *layers])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def main():
    """Strategy, data, model, fit."""
    strategy = toolkit.strategies.create()  # Before any other use of TensorFlow.
    keras.utils.set_random_seed(1)
    (x, y), validation = data()
    with strategy.scope():
        model = build()
    with toolkit.training.Run(RUN, resume="auto", checkpoint_steps=100) as run:
        run.fit(model, x, y, batch_size=BATCH, epochs=EPOCHS, validation_data=validation)
        toolkit.observe.report.write_after(run)


if __name__ == "__main__":
    main()
