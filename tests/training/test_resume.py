"""A run stopped anywhere ends with the weights of one that was never stopped, bit for bit."""

import itertools
import json
import os
import shutil
import signal

import keras
import numpy as np
import pytest

from toolkit import models, strategies
from toolkit.data import Batches
from toolkit.data.data_sets import load_shapes
from toolkit.errors import CheckpointError, CheckpointsFailing, RunDirectoryError, StoppedBySignal, ToolkitError
from toolkit.training import Run, restore, state
from toolkit.training.directory import RunDirectory

EPOCHS, STEPS = 3, 5
EXAMPLES = load_shapes(train=320, test=45)


class StopAt(keras.callbacks.Callback):
    """Sends this process a signal at the n-th call of a method."""

    def __init__(self, method, call):
        super().__init__()
        left = itertools.count(call - 1, -1)  # No attribute: a resumed run would set it as it was.

        def count(*_, **__):
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGTERM)

        setattr(self, method, count)


def train(directory, four_devices, *, resume=False, extra=(), replicas=1, checkpoint_steps=0, model="small_cnn"):
    strategy = strategies.create("mirrored", devices=four_devices[:replicas])
    batches = Batches(examples=EXAMPLES, strategy=strategy, global_batch_size=64, seed=4, steps_per_epoch=STEPS)
    with Run(directory, recipe="test", resume=resume, checkpoint_steps=checkpoint_steps) as run:
        run.record_config(model=model)
        keras.utils.set_random_seed(6)
        with strategy.scope():
            built = models.build("small_cnn", dropout=0.3, classes=10 if model == "small_cnn" else 11)
            built.compile(
                keras.optimizers.Adam(1e-3),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
        run.fit(built, batches, epochs=EPOCHS, validation_data=batches.test(), callbacks=extra)
        return state.capture(built), run.summary, (directory / "history.csv").read_text()


def same(one, other):
    return list(one) == list(other) and all(np.array_equal(one[name], other[name]) for name in one)


def figures(history):
    """The rows without what depends on the clock."""
    return [line.split(",")[:7] for line in history.splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, four_devices):
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    return *train(directory, four_devices), directory


LONG = (pytest.mark.slow, pytest.mark.long)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("method", "call", "step"),
    [
        pytest.param("on_train_batch_end", 1, 1, marks=LONG),
        pytest.param("on_train_batch_begin", 3, 3, marks=LONG),
        pytest.param("on_train_batch_end", 7, 7, marks=pytest.mark.slow),
        pytest.param("on_train_batch_end", 5, 5, marks=LONG),
        pytest.param("on_test_batch_end", 1, 5, marks=LONG),
        pytest.param("on_epoch_end", 2, 10, marks=LONG),
        pytest.param("on_epoch_begin", 2, 6, marks=LONG),
        pytest.param("on_train_batch_end", 15, 15, marks=LONG),
    ],
)
def test_a_signal_then_resume_ends_as_if_nothing_had_been(tmp_path, four_devices, undisturbed, method, call, step):
    with pytest.raises(StoppedBySignal) as stopped:
        train(tmp_path / "run", four_devices, extra=[StopAt(method, call)])
    assert stopped.value.exit_code == 143
    assert stopped.value.step == step
    before = json.loads((tmp_path / "run/summary.json").read_text())["goodput"]["seconds"]
    weights, summary, history = train(tmp_path / "run", four_devices, resume=True)
    assert same(weights, undisturbed[0])
    assert figures(history) == figures(undisturbed[2])
    assert summary["resumed_from_step"] == step
    assert summary["val_accuracy"] == undisturbed[1]["val_accuracy"]
    spent = summary["goodput"]["seconds"]
    assert {"starting", "first_step", "progress", "saving", "validating"} <= set(spent)
    assert spent["first_step"] > before["first_step"], "both processes count"
    assert sum(spent.values()) > sum(before.values())


@pytest.mark.smoke
@pytest.mark.slow
def test_a_checkpoint_every_few_steps_changes_nothing(tmp_path, four_devices, undisturbed):
    class Die(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations.numpy() == 9:
                raise MemoryError("as if killed")

    with pytest.raises(MemoryError):
        train(tmp_path / "run", four_devices, checkpoint_steps=2, extra=[Die()])
    weights, summary, history = train(tmp_path / "run", four_devices, resume=True)
    assert summary["resumed_from_step"] == 8
    assert same(weights, undisturbed[0])
    assert figures(history) == figures(undisturbed[2])


class Noise(keras.layers.Layer):
    """Adds noise, by the generator that all calls without a seed share."""

    def call(self, x, training=None):
        return x + 0.1 * keras.random.normal(keras.ops.shape(x)) if training else x


def drawing(directory, four_devices, *, replicas, extra=()):
    strategy = strategies.create("mirrored", devices=four_devices[:replicas])
    keras.utils.set_random_seed(6)
    keras.random.normal(())  # Makes the generator, which Keras can't while it traces.
    x = np.random.default_rng(1).normal(size=(80, 7)).astype("float32")
    with strategy.scope():
        layers = [keras.layers.Dense(9, "relu"), keras.layers.Dropout(0.5), Noise(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((7,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    with Run(directory, resume="auto", checkpoint_steps=2) as run:
        run.fit(model, x, x[:, :1], batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=extra)
    rows = [float(line.split(",")[2]) for line in (directory / "history.csv").read_text().splitlines()[1:]]
    return np.concatenate([rows, *(each.ravel() for each in model.get_weights() if each.dtype.kind == "f")])


@pytest.mark.slow
def test_on_other_devices_a_run_goes_on_with_one_devices_draws(tmp_path, four_devices):
    """Begun on two devices, killed within an epoch, resumed on three and on one."""

    class Die(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations.numpy() == 9:
                raise MemoryError("as if killed")

    expected = drawing(tmp_path / "one", four_devices, replicas=1)
    with pytest.raises(MemoryError):
        drawing(tmp_path / "run", four_devices, replicas=2, extra=[Die()])
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    for folder, replicas in (("run", 3), ("again", 1)):
        found = drawing(tmp_path / folder, four_devices, replicas=replicas)
        np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=f"{replicas} devices")


def test_the_history_has_what_only_some_epochs_have_logged():
    """With validation_freq=2 the first and the last epoch of three have no validation."""
    history = keras.callbacks.History()
    history.set_model(keras.Sequential())
    history.on_train_begin()
    history.on_epoch_end(2, {"loss": 0.0, "two": np.array([5.0, 6.0])})
    rows = [
        {"epoch": 1, "step": 3, "loss": 0.5, "two_0": 1.0, "two_1": 2.0},
        {"epoch": 2, "step": 6, "loss": 0.0, "two_0": 3.0, "two_1": 4.0, "val_loss": 0.25},
        {"epoch": 3, "step": 9, "loss": 0.0, "two_0": 5.0, "two_1": 6.0},
    ]
    restore.complete_history(history, rows)
    assert history.epoch == [0, 1, 2]
    assert {name: np.asarray(values).tolist() for name, values in history.history.items()} == {
        "loss": [0.5, 0.0, 0.0],
        "two": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
        "val_loss": [0.25],
    }


class LogsTheLoss(keras.Model):
    def train_step(self, data):
        return {"now": super().train_step(data)["loss"] * 2}


@pytest.mark.slow
def test_an_epoch_whose_steps_were_all_done_before_logs_the_last_of_them(tmp_path):
    def train(directory, *, resume=False, extra=()):
        with Run(directory, recipe="test", resume=resume) as run:
            keras.utils.set_random_seed(6)
            given = keras.Input((3,))
            model = LogsTheLoss(given, keras.layers.Dense(2)(given))
            model.compile("sgd", "mse")
            x = np.arange(24, dtype="float32").reshape(8, 3) / 24
            return run.fit(model, x, x[:, :2], epochs=2, batch_size=4, shuffle=False, callbacks=list(extra)).history

    whole = train(tmp_path / "whole")
    with pytest.raises(StoppedBySignal):
        train(tmp_path / "stopped", extra=[StopAt("on_train_batch_end", 2)])
    assert list(whole) == ["now"]
    assert train(tmp_path / "stopped", resume=True) == whole


@pytest.mark.slow
def test_the_history_of_a_resumed_fit_has_every_epoch(tmp_path):
    """Of a run that was stopped after an epoch, of one that is complete, and of a second part."""

    def history(epochs, directory, parts=1):
        with Run(directory, recipe="test", resume="auto") as run:
            keras.utils.set_random_seed(6)
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "softmax")])
            model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score(), "mae"])
            x, y = np.ones((8, 3), "float32"), np.eye(2, dtype="float32")[[0, 1] * 4]
            for _ in range(parts):
                found = run.fit(model, x, y, epochs=epochs, batch_size=4, validation_split=0.5, shuffle=False)
        return found

    def figures(found):
        rounded = {name: np.round(np.asarray(values, "float64"), 6) for name, values in found.history.items()}
        return {name: values.tolist() for name, values in rounded.items()}

    whole = history(3, tmp_path / "whole")
    history(2, tmp_path / "resumed")
    resumed, again = history(3, tmp_path / "resumed"), history(3, tmp_path / "resumed")
    assert resumed.epoch == again.epoch == whole.epoch == [0, 1, 2]
    assert figures(resumed) == figures(whole)
    assert [len(values) for values in again.history.values()] == [3] * len(again.history)
    assert again.history["loss"] == resumed.history["loss"]
    assert history(3, tmp_path / "resumed", parts=2).epoch == [0, 1, 2], "the second part's own"


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_a_short_last_piece_keeps_the_speed_and_the_profile_of_the_piece_before(tmp_path, monkeypatch, killed):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_hlo_as_text")
    monkeypatch.setenv("TF_VAR_password", "of Terraform")

    def summary(extra=()):
        with Run(tmp_path / "run", recipe="test", resume="auto") as run:
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            model.compile("adam", "mse")
            x = np.ones((160, 3), "float32")
            run.fit(model, x, x[:, :2], epochs=2, batch_size=4, callbacks=list(extra))
        return run.summary

    with pytest.raises(StoppedBySignal):
        summary([StopAt("on_train_batch_end", 79)])
    before = json.loads((tmp_path / "run/summary.json").read_text())
    if killed:  # It would have left none.
        (tmp_path / "run/summary.json").unlink()
    after = summary()
    assert (after["status"], after["resumed_from_step"]) == ("completed", 79)
    assert after["examples_per_second"] > 0
    assert after["step"] == before["step"] is not None
    assert (after["optimizer"], after["dtype_policy"]) == ("Adam", "float32")
    assert after["environment"]["XLA_FLAGS"] == "--xla_dump_hlo_as_text"
    assert "TF_VAR_password" not in after["environment"]


def test_an_attempt_that_was_killed_before_its_first_checkpoint_is_listed(tmp_path, monkeypatch):
    for attempt in ("one", "two"):
        monkeypatch.setattr("toolkit.support.status.logs", lambda attempt=attempt: attempt)
        directory = RunDirectory(tmp_path / "run", recipe="test")
        directory.record_config({})
        directory.close()
    assert json.loads((tmp_path / "run/run.json").read_text())["launches"] == ["one", "two"]


@pytest.mark.slow
def test_another_models_checkpoint_is_refused(tmp_path, four_devices, undisturbed):
    shutil.copytree(undisturbed[3], tmp_path / "run")
    with pytest.raises(CheckpointError, match="model=other.*started with model=small_cnn"):
        train(tmp_path / "run", four_devices, resume=True, model="other")
    identity = json.loads((tmp_path / "run/run.json").read_text())
    identity["config"]["model"] = "other"
    (tmp_path / "run/run.json").write_text(json.dumps(identity))
    with pytest.raises(CheckpointError, match=r"shape \(128, 10\) in the checkpoint and shape \(128, 11\)"):
        train(tmp_path / "run", four_devices, resume=True, model="other")


@pytest.mark.slow
def test_checkpoints_that_can_not_be_written_cost_the_checkpoint_then_the_run(
    tmp_path, four_devices, monkeypatch, caplog
):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("toolkit.training.checkpoints.CheckpointStore.save", full)
    with pytest.raises(CheckpointsFailing, match="3 checkpoints in a row") as failing:
        train(tmp_path / "run", four_devices)
    assert failing.value.exit_code == 1
    assert "step 5 can't be written" in caplog.text


def test_a_disk_without_room_is_refused_before_training(tmp_path, four_devices, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 10, 10, 10, 9, 9, 9, 0, 255)))
    with pytest.raises(RunDirectoryError, match="two checkpoints take"):
        train(tmp_path / "run", four_devices)


@pytest.mark.slow
def test_results_that_can_not_be_written_are_no_traceback_and_resume_writes_them(tmp_path, four_devices, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("keras.Sequential.save", full)
        with pytest.raises(ToolkitError, match="Training is done.*No space left.*then resume"):
            train(tmp_path / "run", four_devices)
    train(tmp_path / "run", four_devices, resume=True)
    assert (tmp_path / "run/model.keras").exists()


class Unsaved(keras.layers.Layer):
    """It can't be made again: Keras saves no model with it. Its weight has no name of its own."""

    def __init__(self, made_of):
        super().__init__()
        self.scale = self.add_weight(shape=made_of.shape, initializer="ones")

    def call(self, x):
        return x * self.scale


@pytest.mark.slow
def test_a_model_that_keras_can_not_save_resumes_and_leaves_its_weights(tmp_path, caplog):
    def fit(epochs, **more):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), Unsaved(np.ones(3)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        with Run(tmp_path / "run", **more) as run:
            run.fit(model, np.ones((8, 3)), np.ones((8, 1)), epochs=epochs)
        return model

    fit(1)
    model = fit(2, resume=True)  # In the same process, where Keras counts on: "variable_1".
    assert "model.keras can't be written" in caplog.text
    model.load_weights(tmp_path / "run/model.weights.h5")


@pytest.mark.slow
def test_stopped_on_a_full_disk_ends_on_the_signal_and_lets_the_directory_go(
    tmp_path, four_devices, monkeypatch, caplog
):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("toolkit.training.summary.Summary.write", full)
        with pytest.raises(StoppedBySignal):
            train(tmp_path / "run", four_devices, extra=[StopAt("on_train_batch_end", 1)])
    assert "summary.json can't be written" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    RunDirectory(tmp_path / "run", recipe="test", resume=True).close()


def test_the_size_of_a_state_is_known_without_reading_it(four_devices):
    model = models.build("small_cnn")
    model.compile("adam")
    assert state.size_in_bytes(model) == sum(array.nbytes for array in state.capture(model).values())


@pytest.mark.slow
def test_keras_still_calls_the_train_function_that_it_finds_on_the_model(four_devices):
    """Passing over steps already done stands on this; a Keras that changes it must be noticed."""
    model = models.build("small_cnn")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    calls = []

    class Wrap(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            inner = self.model.train_function
            self.model.train_function = lambda iterator: (calls.append(1), inner(iterator))[1]

    strategy = strategies.create("one_device", devices=("CPU:0",))
    batches = Batches(examples=EXAMPLES, strategy=strategy, global_batch_size=64)
    model.fit(batches.train(), steps_per_epoch=3, callbacks=[Wrap()], verbose=0, shuffle=False)
    assert len(calls) == 3


def test_without_a_global_generator_there_is_none_to_keep(monkeypatch):
    """Under enable_op_determinism TensorFlow makes none by itself."""
    import tensorflow as tf

    from toolkit.training.state import random_state, restore_random

    def refuse():
        raise RuntimeError('"get_global_generator" cannot be called if determinism is enabled')

    monkeypatch.setattr(tf.random, "get_global_generator", refuse)
    state = random_state()
    assert "tensorflow" not in state
    restore_random(state)


@pytest.mark.long
def test_statistics_of_which_each_replica_has_its_own_go_on_where_they_were(tmp_path, four_devices):
    """BatchNormalization's, in the middle of an epoch: they are averaged at its end."""

    def run(directory, *callbacks, resume=False):
        keras.utils.set_random_seed(1)
        x = np.random.default_rng(0).normal(size=(80, 6)).astype("float32")
        with strategies.create("mirrored", devices=four_devices[:2], batch_statistics="replica").scope():
            layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((6,)), *layers])
            model.compile("adam", "mse")
        with Run(directory, recipe="a", resume=resume) as run:
            run.fit(model, x, x[:, :1], batch_size=16, epochs=2, callbacks=list(callbacks))
        return dict(enumerate(model.get_weights()))

    undisturbed = run(tmp_path / "a")
    with pytest.raises(StoppedBySignal):
        run(tmp_path / "b", StopAt("on_train_batch_end", 7))
    assert same(run(tmp_path / "b", resume=True), undisturbed)
