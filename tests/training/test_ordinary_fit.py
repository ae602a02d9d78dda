"""`Run.fit` takes what `fit` takes, keeps what a script has, and says what it does."""

import json
import os
import pathlib
import time
import types

import beside
import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import errors
from toolkit.errors import RunDirectoryError, StoppedBySignal
from toolkit.training import RayReport, Run, evaluator, follow

pytestmark = pytest.mark.slow
X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
LABELS = np.eye(3, dtype="float32")[np.arange(64) % 3]
QUIET = {"batch_size": 16}


def model(**more):
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    made.compile("adam", "mse", **more)
    return made


class StopsAt(keras.callbacks.Callback):
    """At the end of an epoch, or with an exception in a step."""

    def __init__(self, *, epoch=None, step=None):
        super().__init__()
        self.epoch, self.step = epoch, step

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            self.model.stop_training = True

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.step:
            raise KeyError("in the user's own code")


@pytest.mark.parametrize("callbacks", [None, [], keras.callbacks.LambdaCallback(), (keras.callbacks.LambdaCallback(),)])
def test_callbacks_are_given_in_any_way(tmp_path, callbacks):
    with Run(tmp_path / "run") as run:
        run.fit(model(), X, Y, callbacks=callbacks, **QUIET)
    assert run.summary["status"] == "completed"


def test_a_metric_may_be_a_vector(tmp_path):
    """The evaluator of the run and a report to Ray have the same names."""
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
    made.compile("adam", "categorical_crossentropy", metrics=[keras.metrics.F1Score()])
    with Run(tmp_path / "run", recipe="vectors") as run:
        run.fit(made, X, LABELS, validation_data=(X, LABELS), **QUIET)
    assert (tmp_path / "run/history.csv").read_text().startswith("epoch,step,f1_score_0,f1_score_1,f1_score_2,loss")
    assert {"f1_score_2", "val_f1_score_0"} <= set(run.summary)
    os.utime(tmp_path / "run/summary.json", (time.time() + 60,) * 2)  # As if the run ended while the evaluator works.
    follow(tmp_path / "run", made, tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(4), recipe="vectors")
    headings, *rows = (tmp_path / "run/evaluation.csv").read_text().splitlines()
    assert headings == "step,f1_score_0,f1_score_1,f1_score_2,loss"
    assert len(rows) == 1
    report = RayReport()
    report.on_epoch_end(0, {"f1_score": np.array([0.25, 0.5]), "loss": 1.0})
    assert report._waiting == (1, {"f1_score_0": 0.25, "f1_score_1": 0.5, "loss": 1.0})


def test_what_a_callback_stops_goes_on_when_resumed(tmp_path, capsys):
    """As after a limit of time; what EarlyStopping ends is complete."""
    with Run(tmp_path / "run") as run:
        run.fit(model(), X, Y, epochs=4, callbacks=StopsAt(epoch=1), **QUIET)
    assert run.summary["epochs"] == 2
    with Run(tmp_path / "run", resume=True) as run:
        run.fit(model(), X, Y, epochs=4, **QUIET)
    assert run.summary["epochs"] == 4
    assert "Resumed after step 8: epoch 3 of 4 begins." in capsys.readouterr().out
    with Run(tmp_path / "whole") as whole:
        whole.fit(model(), X, Y, epochs=4, **QUIET)
    assert run.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_what_early_stopping_ends_is_complete(tmp_path, capsys):
    for resume in (False, True):
        stopping = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=9.0)
        with Run(tmp_path / "run", resume=resume) as run:
            run.fit(model(), X, Y, epochs=5, callbacks=[stopping], **QUIET)
        assert run.summary["epochs"] == 2
    assert "Already complete: EarlyStopping ended the training after 2 of 5 epochs." in capsys.readouterr().out
    with Run(tmp_path / "run", resume=True) as run:  # Who leaves it out wants the other epochs.
        run.fit(model(), X, Y, epochs=5, **QUIET)
    assert run.summary["epochs"] == 5


def test_a_callbacks_arguments_are_those_of_now_and_its_counts_those_of_before(tmp_path):
    first = keras.callbacks.EarlyStopping("loss", patience=3, min_delta=9.0)
    with Run(tmp_path / "run") as run:
        run.fit(model(), X, Y, epochs=2, callbacks=[first], **QUIET)
    second = keras.callbacks.EarlyStopping("loss", patience=50, min_delta=9.0)
    with Run(tmp_path / "run", resume=True) as run:
        run.fit(model(), X, Y, epochs=4, callbacks=[second], **QUIET)
    assert second.patience == 50
    assert second.best == first.best
    assert second.wait == 3


def test_a_finished_run_keeps_its_figures(tmp_path, capsys):
    with Run(tmp_path / "run") as run:
        run.fit(model(), X, Y, epochs=8, **QUIET)
    with Run(tmp_path / "run", resume=True) as again:
        again.fit(model(), X, Y, epochs=8, **QUIET)
    assert again.summary == json.loads((tmp_path / "run/summary.json").read_text()) == run.summary
    assert "Already complete: 8 of 8 epochs. To train again, remove " in capsys.readouterr().out


def test_variables_of_tensorflow_are_kept(tmp_path):
    class Counting(beside.OneDense):
        def __init__(self):
            super().__init__()
            self.steps = tf.Variable(0.0)

        def train_step(self, data):
            self.steps.assign_add(1.0)
            return super().train_step(data)

    def made():
        keras.utils.set_random_seed(1)
        counting = Counting()
        counting.compile("adam", "mse")
        return counting

    with Run(tmp_path / "run", checkpoint_steps=2) as run, pytest.raises(KeyError):
        run.fit(made(), X, Y, epochs=2, callbacks=StopsAt(step=2), **QUIET)
    resumed = made()
    with Run(tmp_path / "run", resume=True) as run:
        run.fit(resumed, X, Y, epochs=2, **QUIET)
    assert float(resumed.steps.numpy()) == 8


def test_a_subclassed_model_fed_with_arrays_resumes(tmp_path):
    for epochs in (1, 2):
        made = beside.OneDense()
        made.compile("adam", "mse")
        with Run(tmp_path / "run", resume="auto") as run:
            run.fit(made, X, Y, epochs=epochs, **QUIET)
    assert run.summary["epochs"] == 2


@pytest.mark.parametrize("make", [lambda: keras.Sequential([keras.layers.Dense(1)]), beside.OneDense])
@pytest.mark.filterwarnings("ignore:`build\\(\\)` was called")  # What comes of it has no variables yet.
def test_a_model_compiled_before_it_is_built_trains(tmp_path, make):
    for resumes in (False, True):
        made = make()
        made.compile("adam", "mse")
        made.build((None, 4))
        with Run(tmp_path / "run", resume=resumes) as run:
            run.fit(made, X, Y, **{**QUIET, "epochs": 2 + resumes})
    assert run.summary["epochs"] == 3


def test_steps_are_those_that_were_done(tmp_path):
    made = model(steps_per_execution=3)
    with Run(tmp_path / "run") as run:
        run.fit(made, np.repeat(X, 2, 0), np.repeat(Y, 2, 0), epochs=2, **QUIET)
    assert run.summary["steps"] == int(made.optimizer.iterations) == 16


def test_after_an_exception_the_model_is_as_before(tmp_path):
    made = model()
    with Run(tmp_path / "run") as run, pytest.raises(KeyError):
        run.fit(made, X, Y, callbacks=StopsAt(step=1), **QUIET)
    assert "toolkit" not in str(getattr(made.train_function, "__module__", ""))
    made.fit(X, Y, verbose=0)


def test_a_signal_is_no_exception_that_a_sweep_would_swallow():
    assert not issubclass(StoppedBySignal, Exception)
    assert errors.StoppedBySignal(15, step=3).code == 143


@pytest.mark.parametrize("place", ["gs://bucket/run", "s3://bucket/run"])
def test_an_address_is_no_directory(place):
    with pytest.raises(RunDirectoryError, match="it is a URL"):
        Run(place)
    assert not pathlib.Path(place.partition("//")[0]).exists()


def test_a_data_set_may_have_an_attribute_of_any_name(tmp_path):
    class Sequence(keras.utils.PyDataset):
        def __init__(self):
            super().__init__()
            self.config = {"mine": 1}

        def __len__(self):
            return 2

        def __getitem__(self, number):
            return X[:16], Y[:16]

    with Run(tmp_path / "run") as run:
        run.fit(model(), Sequence())
    assert run.summary["steps"] == 2


def tuned(directory, *, stop=None, **more):
    """Two calls of fit: the second with another optimizer and a layer frozen."""
    with Run(directory, checkpoint_steps=2, **more) as run:
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        made.set_weights([np.full(w.shape, 0.1) for w in made.get_weights()])
        made.compile("adam", "mse")
        run.fit(made, X, Y, epochs=2, **QUIET)
        made.layers[0].trainable = False
        made.compile("sgd", "mse")
        run.fit(made, X, Y, epochs=3, callbacks=stop, **QUIET)
    return made, run


def test_fit_is_called_twice_as_to_tune_and_resumes_in_either(tmp_path):
    whole, run = tuned(tmp_path / "whole")
    assert run.summary["epochs"] == 5
    with pytest.raises(KeyError):
        tuned(tmp_path / "run", stop=StopsAt(step=2))
    resumed, run = tuned(tmp_path / "run", resume=True)
    assert run.summary["epochs"] == 5
    for mine, theirs in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_profiling_is_left_to_the_users_own_tensorboard_and_can_be_switched_off(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path / "board", profile_batch=(7, 8))
    for name, more, callbacks in (("off", {"profile": False}, None), ("theirs", {}, board)):
        with Run(tmp_path / name, **more) as run:
            run.fit(model(), X, Y, epochs=5, callbacks=callbacks, **QUIET)
        assert run.summary["step"] is None
    assert list((tmp_path / "board").rglob("*.xplane.pb"))


def test_a_large_shuffle_buffer_is_read_again_instead_of_kept(tmp_path, caplog):
    pictures = np.random.default_rng(1).integers(0, 256, (64, 600_000), np.uint8)  # Zeros are compressed.

    def data():
        both = tf.data.Dataset.from_tensor_slices((X, Y, pictures))
        # Repeated: a buffer that tf.data has read ahead to the end of the data is small again.
        return both.repeat(4).shuffle(64).map(lambda x, y, _: (x, y)).batch(16)

    with Run(tmp_path / "run", checkpoint_steps=1) as run, pytest.raises(KeyError):
        run.fit(model(), data(), epochs=2, callbacks=StopsAt(step=1))
    assert "The data's iterator takes" in caplog.text
    assert all(path.stat().st_size < 1_000_000 for path in (tmp_path / "run/checkpoints").rglob("*.safetensors"))
    with Run(tmp_path / "run", resume=True) as run:
        run.fit(model(), data(), epochs=2)
    with Run(tmp_path / "whole") as whole:
        whole.fit(model(), data(), epochs=2)
    assert run.summary["weights_sha256"] == whole.summary["weights_sha256"]


class WaitsError(Exception):
    """An evaluator waits for another checkpoint, or for the run's end."""


def test_an_evaluator_that_comes_after_the_runs_end_ends(tmp_path, monkeypatch):
    def waits(_):
        raise WaitsError

    monkeypatch.setattr(evaluator, "time", types.SimpleNamespace(time=time.time, sleep=waits))
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    with Run(tmp_path / "run") as run:
        run.fit(model(), X, Y, **QUIET)
    summary = tmp_path / "run/summary.json"
    follow(tmp_path / "run", model(), data, recipe="train")  # The run ended while it built its model.
    assert len((tmp_path / "run/evaluation.csv").read_text().splitlines()) == 2
    os.utime(summary, (0, 0))
    with pytest.raises(WaitsError):  # It belongs to an earlier job, whose run is to be resumed.
        follow(tmp_path / "run", model(), data, recipe="train")
    with Run(tmp_path / "run", resume=True) as run:  # There is nothing left to train.
        run.fit(model(), X, Y, **QUIET)
    follow(tmp_path / "run", model(), data, recipe="train")
