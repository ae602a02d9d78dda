"""Checkpoints that are written while training goes on."""

import threading

import batteries
import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import CheckpointsFailing
from toolkit.training import CheckpointStore, Run, state
from toolkit.training.checkpoints import _read

pytestmark = pytest.mark.slow
X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
SAVE = CheckpointStore.save
PATIENCE = 20  # Seconds after which a test gives up waiting.


def model():
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    made.compile("adam", "mse", metrics=["mae"])
    return made


class Seen(keras.callbacks.Callback):
    """Keeps each step's state; calls `at[step]` at its end, before the checkpoint is written."""

    def __init__(self, at):
        super().__init__()
        self.at = at
        self.states = {}
        self.counts = np.zeros(1)  # A checkpoint has it, and it changes in place.

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations.numpy())
        self.counts += 1
        self.states[step] = {name: array.tobytes() for name, array in state.capture(self.model).items()}
        self.at.get(step, lambda: None)()


def train(path, at, *, steps=2, epochs=1, **more):
    seen = Seen(at)
    with Run(path, checkpoint_steps=steps, keep=100) as run:
        run.fit(model(), X, Y, batch_size=8, epochs=epochs, callbacks=[seen], **more)
    return seen


@pytest.fixture
def held(monkeypatch):
    """Holds the writing of checkpoints until it is set, and keeps the steps of those written so far."""
    go, steps = threading.Event(), []

    def save(store, checkpoint, **more):
        assert go.wait(PATIENCE)
        SAVE(store, checkpoint, **more)
        steps.append(checkpoint.step)

    monkeypatch.setattr(CheckpointStore, "save", save)
    go.steps = steps
    return go


def test_training_goes_on_while_a_checkpoint_is_written_and_it_is_that_of_its_step(tmp_path, held):
    before = []
    seen = train(tmp_path, {3: lambda: before.append(list(held.steps)) or held.set()})
    assert before == [[]], "step 3 waited for the checkpoint of step 2"
    assert held.steps == [2, 4, 6, 8, 8], "one at a time, in order, and training's end waits for the last"
    for step in (2, 4, 6):
        checkpoint = _read(tmp_path / f"checkpoints/step-{step:08d}")
        assert {name: checkpoint.arrays[name].tobytes() for name in seen.states[step]} == seen.states[step]
        assert checkpoint.arrays["callbacks/0000/counts"].tolist() == [step]
        assert checkpoint.metadata["history"] == []


def test_what_ends_training_waits_for_the_checkpoint(tmp_path, held):
    def fails():
        threading.Timer(0.2, held.set).start()
        raise KeyError("in the user's own code")

    with pytest.raises(KeyError, match="own code"):
        train(tmp_path, {3: fails})
    assert held.steps == [2]
    assert CheckpointStore(tmp_path / "checkpoints").load().step == 2


def test_a_checkpoint_that_can_not_be_written_is_told_at_the_next_step(tmp_path, monkeypatch, caplog):
    tried = []

    def full(store, checkpoint, **_):
        tried.append(checkpoint.step)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CheckpointStore, "save", full)
    with pytest.raises(CheckpointsFailing, match="3 checkpoints in a row"):
        train(tmp_path, {}, steps=1, epochs=9)
    assert tried == [1, 2, 3]
    assert [f"step {step} can't be written" in caplog.text for step in (1, 2, 3)] == [True] * 3


def test_another_error_in_writing_is_raised_too(tmp_path, monkeypatch):
    def wrong(*_, **__):
        raise TypeError("no JSON")

    monkeypatch.setattr(CheckpointStore, "save", wrong)
    with pytest.raises(TypeError, match="no JSON"):
        train(tmp_path, {})


CHANGES = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam with averages": lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=2),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(
    "how",
    batteries.rows(["a graph", "compiled by XLA", "eagerly", "two replicas"], ["compiled by XLA", "two replicas"]),
)
def test_what_is_captured_stays_as_it_is_while_training_goes_on(four_devices, optimizer, how):
    several = strategies.create("mirrored", devices=["CPU:0", "CPU:1"])
    strategy = several if how == "two replicas" else tf.distribute.get_strategy()
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with strategy.scope():
        parts = [layers.Embedding(1000, 300), layers.Flatten(), layers.Dense(400), layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((5,), dtype="int32"), *parts, layers.Dropout(0.5), layers.Dense(1)])
        model.compile(optimizer(), "mse", jit_compile=how == "compiled by XLA", run_eagerly=how == "eagerly")
    x = np.random.default_rng(0).integers(0, 1000, (32, 5))
    model.fit(x, x[:, 0] / 1000, batch_size=8, verbose=0)
    captured = state.capture(model)
    before = {name: array.tobytes() for name, array in captured.items()}
    model.fit(x, x[:, 0] / 1000, batch_size=8, epochs=2, verbose=0)
    for variable in model.variables:  # And as users do.
        variable.assign(variable + 1 if "int" in variable.dtype else variable * 2)
        if how != "two replicas" and len(variable.shape) == 2:
            variable.value.scatter_nd_update([[0, 0]], [7])
            variable.value.assign_add(tf.ones(variable.shape, variable.dtype))
    assert {name: array.tobytes() for name, array in captured.items()} == before
    after = state.capture(model)
    assert sum(after[name].tobytes() != before[name] for name in before) > len(before) / 2, "or nothing is shown"
