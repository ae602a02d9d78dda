"""A run whose callback compiles the model again resumes to the weights of one that was never stopped."""

import os
import signal

import batteries
import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import CheckpointError, StoppedBySignal
from toolkit.training import Run

pytestmark = pytest.mark.slow
X = np.random.default_rng(1).normal(size=(20, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True) + 0.1


def own_loss(y, predicted):
    return tf.reduce_mean(tf.abs(y - predicted) ** 1.5, -1)


def with_adam(model):
    model.compile(keras.optimizers.Adam(0.01), "mse")


def with_another_loss(model):
    model.compile(model.optimizer, "mae", metrics=["mse"])


def frozen(model):
    model.layers[0].trainable = False
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")


def with_an_own_loss(model):
    model.compile(keras.optimizers.Adam(0.01), own_loss)


class Compiles(keras.callbacks.Callback):
    """Compiles the model again at the begin of training, at that of the second epoch, or at the first one's end."""

    def __init__(self, how, when):
        super().__init__()
        self.how, self.when = how, when

    def again(self, when):
        if when == self.when:
            with self.model.distribute_strategy.scope():
                self.how(self.model)
            self.model.make_train_function()

    def on_train_begin(self, logs=None):
        self.again("training")

    def on_epoch_begin(self, epoch, logs=None):
        self.again({1: "epoch"}.get(epoch))

    def on_epoch_end(self, epoch, logs=None):
        self.again({0: "end"}.get(epoch))


class StopAfter(keras.callbacks.Callback):
    """Sends this process a signal after so many steps of its own."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch, logs=None):
        self.steps -= 1
        if not self.steps:
            os.kill(os.getpid(), signal.SIGTERM)


def train(directory, devices, how, when, *, script=None, resume=False, stop=None):
    keras.utils.set_random_seed(5)
    strategy = strategies.create("mirrored" if len(devices) > 1 else "one_device", devices=devices)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5), keras.layers.Dense(1)])
        (script or (lambda made: made.compile(keras.optimizers.SGD(0.02), "mse")))(model)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(20).batch(4)
    with Run(directory, recipe="test", resume=resume, profile=False) as run:
        callbacks = [*([] if how is None else [Compiles(how, when)]), *([] if stop is None else [StopAfter(stop)])]
        run.fit(model, data, epochs=3, callbacks=callbacks)
    return [each.numpy() for each in model.weights]


@pytest.mark.parametrize(
    ("how", "when", "replicas"),
    batteries.rows(
        [
            (with_adam, "epoch", 1),
            (with_adam, "end", 2),
            (with_adam, "training", 1),
            (with_another_loss, "epoch", 2),
            (frozen, "end", 1),
            (frozen, "epoch", 1),
        ],
        [(with_adam, "training", 1), (with_another_loss, "epoch", 2), (frozen, "end", 1)],
    ),
)
def test_it_goes_on_as_the_callback_had_compiled_it(tmp_path, four_devices, how, when, replicas):
    devices = four_devices[:replicas]
    undisturbed = train(tmp_path / "a", devices, how, when)
    for stop in (5, 7, 10):
        with pytest.raises(StoppedBySignal):
            train(tmp_path / f"{stop}", devices, how, when, stop=stop)
        resumed = train(tmp_path / f"{stop}", devices, how, when, resume=True)
        for mine, theirs in zip(resumed, undisturbed, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_what_keras_can_not_compile_again_is_said_with_a_remedy_that_works(tmp_path, four_devices, caplog):
    how = with_an_own_loss, "end"
    undisturbed = train(tmp_path / "a", four_devices[:1], *how)
    with pytest.raises(StoppedBySignal):
        train(tmp_path / "b", four_devices[:1], *how, stop=7)
    with pytest.raises(CheckpointError, match="that the run had at this checkpoint"):
        train(tmp_path / "b", four_devices[:1], *how, resume=True)
    assert "before run.fit, set what is trainable and call compile as that callback does" in caplog.text
    caplog.clear()
    resumed = train(tmp_path / "b", four_devices[:1], *how, script=with_an_own_loss, resume=True)
    assert "compile" not in caplog.text
    for mine, theirs in zip(resumed, undisturbed, strict=True):
        np.testing.assert_array_equal(mine, theirs)
