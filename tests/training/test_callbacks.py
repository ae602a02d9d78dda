import io
import random
import signal

import keras
import numpy as np
import pytest
import rich
import rich.console
import tensorflow as tf

from toolkit.errors import RequestError, StoppedBySignal
from toolkit.support import signals as stop_signals
from toolkit.training import Run, learning_rate, summary
from toolkit.training.checkpoints import Position
from toolkit.training.progress import EpochLog, Progress


def test_throughput_leaves_out_the_warm_up_and_steps_passed_over(monkeypatch):
    clock = iter(np.arange(0.0, 1000.0, 0.5))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    measured = tracker = Progress(epochs=2, resumed=Position(step=4, epoch=0, batch=4), global_batch_size=100)

    def step(first, last=None):
        tracker.on_train_batch_begin(first)
        tracker.on_train_batch_end(first if last is None else last)

    tracker.on_epoch_begin(0)
    for batch in range(14):
        step(batch)
    assert measured.examples_per_second is None
    step(14)
    step(15)
    assert measured.examples_per_second == 200
    assert tracker.position == Position(step=16, epoch=0, batch=16)
    tracker.on_epoch_end(0)
    tracker.on_epoch_begin(1)
    step(0)
    assert measured.epoch_examples_per_second is None
    step(1, 2)  # Two steps in one call.
    assert measured.epoch_examples_per_second == 400
    assert tracker.position == Position(step=19, epoch=1, batch=3)


@pytest.mark.parametrize(("terminal", "width"), [(True, 80), (False, 80)])
def test_progress_suits_a_terminal_and_a_log_file(monkeypatch, terminal, width):
    file = io.StringIO()
    console = rich.console.Console(file=file, force_terminal=terminal, width=width)
    monkeypatch.setattr(rich, "get_console", lambda: console)
    monkeypatch.setattr("toolkit.training.progress._BAR_SECONDS", 0)
    monkeypatch.setattr("toolkit.training.progress._LINE_SECONDS", 0)
    tracker = Progress(epochs=2, resumed=Position(), global_batch_size=8)
    tracker.set_params({"steps": 3})
    tracker.on_train_begin()
    display = EpochLog(None, tracker, earlier=[], shows=True, bar=True)
    display.set_model(keras.Sequential())
    display.on_epoch_begin(0)
    tracker.on_train_batch_end(0)
    display.on_train_batch_end(0, {"loss": 1.25, "accuracy": 0.5})
    display.on_test_begin()
    display.on_epoch_end(0, {"loss": 1.0, "accuracy": 0.75, "val_loss": 2.0})
    text = file.getvalue()
    assert "epoch 1/2: loss 1.0000, accuracy 0.7500, val_loss 2.0000" in text
    assert ("\x1b" in text) is terminal
    if not terminal:
        assert "epoch 1/2, step 1/3: loss 1.2500" in text
        assert "\r" not in text


def test_the_last_line_says_what_its_digits_are():
    figures = {"epochs": 1, "steps": 2, "loss": 0.5, "examples_per_second": None, "wall_seconds": 3.0}
    line = summary._last_line({**figures, "weights_sha256": "d7765bebd799692a" + 48 * "0"}, "runs/x")
    assert (
        line
        == "Done: 1 epoch, 2 steps, loss 0.5000, SHA-256 of the weights d7765bebd799692a, 3 s. Everything is in runs/x"
    )


def test_the_rate_warms_up_peaks_with_the_batch_and_ends_at_zero():
    schedule = learning_rate(0.1, global_batch_size=512, total_steps=100)
    values = [float(schedule(step)) for step in range(101)]
    assert max(values) == pytest.approx(0.4)
    assert values.index(max(values)) == 20
    assert values[0] == pytest.approx(0.02)
    assert values[100] == pytest.approx(0, abs=1e-6)
    assert float(learning_rate(0.1, global_batch_size=512, total_steps=100, scaling="sqrt")(20)) == pytest.approx(0.2)
    assert float(learning_rate(0.1, global_batch_size=512, total_steps=100, scaling="none")(20)) == pytest.approx(0.1)
    assert float(learning_rate(0.1, global_batch_size=128, total_steps=1)(0)) > 0


@pytest.mark.parametrize("arguments", [{"rate": 0}, {"rate": float("nan")}, {"total_steps": 0}, {"scaling": "cubic"}])
def test_a_rate_that_is_none(arguments):
    given = {"rate": 0.1, "global_batch_size": 128, "total_steps": 10, **arguments}
    with pytest.raises(RequestError):
        learning_rate(given.pop("rate"), **given)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({"epochs": 0}, "epochs=1 or more"), ({"epochs": 1, "initial_epoch": 2}, "leave initial_epoch out")],
)
def test_arguments_of_fit_that_make_no_training(tmp_path, arguments, word):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with Run(tmp_path / "run", recipe="test") as run, pytest.raises(RequestError, match=word):
        run.fit(model, np.ones((8, 2)), np.ones((8, 1)), **arguments)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_noted_while_held_and_ends_the_program_otherwise(number, request, monkeypatch):
    # Under nohup SIGHUP is ignored, and stays so.
    own = signal.signal(number, signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(number, own))
    before = signal.getsignal(number)
    with stop_signals.StopSignals() as stop:
        with pytest.raises(StoppedBySignal) as stopped:
            signal.raise_signal(number)
        assert stopped.value.exit_code == 128 + number
        stop.held = True
        signal.raise_signal(number)
        assert stop.received == number
        if number == signal.SIGTERM:  # Slurm's scancel tells a task and its launcher, which tells the task again.
            signal.raise_signal(number)
            monkeypatch.setattr(stop_signals, "SAME", 0.0)
        with pytest.raises(StoppedBySignal):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals.StopSignals() as stop:
            stop.held = True
            signal.raise_signal(signal.SIGHUP)
            assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


class Counting(keras.callbacks.Callback):
    """As users write them: plain counters, an array, and something that no file can hold."""

    def __init__(self, odd=None):
        super().__init__()
        self.seen, self.best, self.history, self.weights = 0, float("inf"), [], np.zeros(2)
        self.options = {"names": ("a", "b"), "rate": None}
        self.odd = odd

    def on_epoch_end(self, epoch, logs=None):
        self.seen += 1
        self.best = min(self.best, logs["loss"])
        self.history.append(logs["loss"])
        self.weights = self.weights + 1
        if self.odd is not None:
            self.odd.add(epoch)


class StopAfterEpoch(keras.callbacks.Callback):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def on_epoch_end(self, epoch, logs=None):
        if epoch + 1 == self.number:
            signal.raise_signal(signal.SIGTERM)


def trained(folder, *callbacks, resume=False, epochs=6):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(16, 2))
    with Run(folder, recipe="test", resume=resume) as run:
        run.fit(model, x, x[:, :1] + 1, epochs=epochs, validation_data=(x, -x[:, :1] - 1), callbacks=list(callbacks))
        return model.get_weights(), run.summary


def made(folder, odd=None):
    return [
        keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1),
        keras.callbacks.ModelCheckpoint(str(folder / "best.weights.h5"), save_best_only=True, save_weights_only=True),
        Counting(odd),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [1, 2, 3])
def test_callbacks_count_on_where_they_were(tmp_path, stopped):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    whole = made(tmp_path / "a")
    weights, summary = trained(tmp_path / "a/run", *whole)
    assert 1 < summary["epochs"] < 6, "it is to stop early, or nothing is shown"
    if stopped < summary["epochs"]:
        with pytest.raises(StoppedBySignal):
            trained(tmp_path / "b/run", *made(tmp_path / "b"), StopAfterEpoch(stopped))
    else:
        trained(tmp_path / "b/run", *made(tmp_path / "b"), StopAfterEpoch(99))
    resumed = made(tmp_path / "b")
    again, more = trained(tmp_path / "b/run", *resumed, StopAfterEpoch(99), resume=True)
    assert more["epochs"] == summary["epochs"]
    assert all(np.array_equal(one, other) for one, other in zip(weights, again, strict=True))
    early, plateau, best, counting = zip(whole, resumed, strict=True)
    assert [each.best for each in early] == [early[0].best] * 2
    assert [each.wait for each in early] == [early[0].wait] * 2
    assert [each.cooldown_counter for each in plateau] == [plateau[0].cooldown_counter] * 2
    assert best[0].best == best[1].best
    assert vars(counting[0]).keys() == vars(counting[1]).keys()
    assert counting[0].history == counting[1].history
    assert counting[1].options == {"names": ("a", "b"), "rate": None}
    assert isinstance(counting[1].options["names"], tuple)
    assert np.array_equal(counting[0].weights, counting[1].weights)


@pytest.mark.slow
def test_a_callback_whose_state_can_not_be_saved_is_named_once(tmp_path, caplog):
    trained(tmp_path / "run", Counting(odd=set()), epochs=3)
    assert caplog.text.count("Counting keeps set in odd, which can't be saved") == 1


@pytest.mark.slow
def test_other_callbacks_than_before_are_said(tmp_path, caplog):
    with pytest.raises(StoppedBySignal):
        trained(tmp_path / "run", Counting(), StopAfterEpoch(1), epochs=2)
    counting = Counting()
    trained(tmp_path / "run", StopAfterEpoch(99), counting, epochs=2, resume=True)
    assert "resumes with" not in caplog.text
    assert counting.seen == 2, "they are told by their class, and the order is free"
    trained(tmp_path / "run", Counting(), epochs=3, resume=True)
    assert "callbacks StopAfterEpoch, Counting and resumes with Counting" in caplog.text


@pytest.mark.slow
def test_random_numbers_go_on_where_they_were(tmp_path):
    class Draw(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.drawn = []

        def on_epoch_end(self, epoch, logs=None):
            generator = tf.random.get_global_generator()
            self.drawn.append((random.random(), float(np.random.normal()), float(generator.normal(()))))

    def once(name, *more, resume=False):
        tf.random.set_global_generator(tf.random.Generator.from_seed(7))
        draw = Draw()
        trained(tmp_path / name, draw, *more, resume=resume, epochs=4)
        return draw.drawn

    whole = once("a", StopAfterEpoch(99))
    with pytest.raises(StoppedBySignal):
        once("b", StopAfterEpoch(2))
    assert once("b", StopAfterEpoch(99), resume=True) == whole
    assert len(set(whole)) == 4
