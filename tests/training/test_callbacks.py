import io
import signal

import keras
import numpy as np
import pytest
import rich
import rich.console

from toolkit.errors import RequestError, StoppedBySignal
from toolkit.training import Length, learning_rate, signals
from toolkit.training.position import Position
from toolkit.training.progress import ProgressDisplay
from toolkit.training.throughput import Throughput


def test_throughput_leaves_out_the_warm_up_and_steps_passed_over(monkeypatch):
    clock = iter(np.arange(0.0, 1000.0, 0.5))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    measured = Throughput(100, resumed=Position(epoch=0, batch=4))
    measured.on_epoch_begin(0)
    for batch in range(4):
        measured.on_train_batch_end(batch)
    for batch in range(4, 14):
        measured.on_train_batch_end(batch)
    assert measured.images_per_second is None
    measured.on_train_batch_end(14)
    measured.on_train_batch_end(15)
    assert measured.images_per_second == 200
    measured.on_epoch_begin(1)
    measured.on_train_batch_end(0)
    assert measured.epoch_images_per_second is None
    measured.on_train_batch_end(2)  # Two steps in one call.
    assert measured.epoch_images_per_second == 400


@pytest.mark.parametrize(("terminal", "width"), [(True, 80), (False, 80)])
def test_progress_suits_a_terminal_and_a_log_file(monkeypatch, terminal, width):
    file = io.StringIO()
    console = rich.console.Console(file=file, force_terminal=terminal, width=width)
    monkeypatch.setattr(rich, "get_console", lambda: console)
    monkeypatch.setattr("toolkit.training.progress._BAR_SECONDS", 0)
    monkeypatch.setattr("toolkit.training.progress._LINE_SECONDS", 0)
    length = Length(epochs=2, steps_per_epoch=3)
    display = ProgressDisplay(length=length, throughput=Throughput(8, resumed=Position()))
    display.on_epoch_begin(0)
    display.on_train_batch_end(0, {"loss": 1.25, "accuracy": 0.5})
    display.on_test_begin()
    display.on_epoch_end(0, {"loss": 1.0, "accuracy": 0.75, "val_loss": 2.0})
    text = file.getvalue()
    assert "epoch 1/2: loss 1.0000, accuracy 0.7500, val_loss 2.0000" in text
    assert ("\x1b" in text) is terminal
    if not terminal:
        assert "epoch 1/2, step 1/3: loss 1.2500" in text
        assert "\r" not in text


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


@pytest.mark.parametrize("arguments", [{"epochs": 0, "steps_per_epoch": 5}, {"epochs": 1, "steps_per_epoch": 0}])
def test_a_training_has_a_length(arguments):
    with pytest.raises(RequestError, match="least is 1"):
        Length(**arguments)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_noted_while_held_and_ends_the_program_otherwise(number, request):
    # Under nohup SIGHUP is ignored, and stays so.
    own = signal.signal(number, signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(number, own))
    before = signal.getsignal(number)
    with signals.StopSignals() as stop:
        with pytest.raises(StoppedBySignal) as stopped:
            signal.raise_signal(number)
        assert stopped.value.exit_code == 128 + number
        stop.held = True
        signal.raise_signal(number)
        assert stop.received == number
        with pytest.raises(StoppedBySignal):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.StopSignals() as stop:
            stop.held = True
            signal.raise_signal(signal.SIGHUP)
            assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_keras_still_has_the_hooks_that_a_resumed_epoch_needs():
    assert isinstance(keras.Sequential([keras.layers.Dense(1)]).metrics_variables, list)
