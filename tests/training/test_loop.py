"""A training loop of the user's own in a run: what `fit` does around one, and the same weights after a stop."""

import csv
import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import RequestError, StoppedBySignal
from toolkit.training import Run


def parts(strategy):
    """A model, its optimizer and a mean, as a tutorial's loop has them, and a variable of the user's own."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(6), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        return {"model": model, "optimizer": optimizer, "mean": keras.metrics.Mean(), "steps": tf.Variable(0)}


def trained(folder, strategy, *, resume=False, stop=0, **options):
    """Trains by a loop of three epochs; returns its parts and the run's summary. `stop` is the step of a SIGTERM."""
    state = parts(strategy)
    x = np.random.default_rng(0).normal(size=(100, 8)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(100).batch(16)

    def on_replica(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(state["model"](x, training=True) - y)) / 16
        variables = state["model"].trainable_variables
        state["optimizer"].apply(tape.gradient(loss, variables), variables)
        return loss

    @tf.function
    def on_all(batch):
        return strategy.reduce("sum", strategy.run(on_replica, args=(batch,)), axis=None)

    def step(batch):
        state["mean"].update_state(on_all(batch))
        state["steps"].assign_add(1)
        if int(keras.ops.convert_to_numpy(state["steps"])) == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"loss": state["mean"].result()}

    with Run(folder, recipe="test", resume=resume, **options) as run:
        run.loop(step, data, state=state, epochs=3)
    return state, run.summary


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("stop", [7, pytest.param(10, marks=pytest.mark.long)])
def test_a_loop_goes_on_to_the_bit(tmp_path, four_devices, replicas, stop):
    def strategy():
        # Not TensorFlow's own: it keeps shapes of collectives for the process's life.
        return strategies.create("one_device" if replicas == 1 else "mirrored", devices=four_devices[:replicas])

    whole, summary = trained(tmp_path / "a", strategy())
    with pytest.raises(StoppedBySignal) as stopped:
        trained(tmp_path / "b", strategy(), stop=stop)
    assert stopped.value.step == stop
    resumed, again = trained(tmp_path / "b", strategy(), resume=True)
    assert again["weights_sha256"] == summary["weights_sha256"]
    assert again["loss"] == summary["loss"]
    assert (again["resumed_from_step"], again["steps"], int(keras.ops.convert_to_numpy(resumed["steps"]))) == (
        stop,
        21,
        21,
    )
    mine, theirs = (keras.saving.load_model(tmp_path / name / "model.keras").get_weights() for name in "ab")
    assert all(np.array_equal(one, other) for one, other in zip(mine, theirs, strict=True))
    assert all(np.array_equal(one, other) for one, other in zip(mine, whole["model"].get_weights(), strict=True))


@pytest.mark.slow
def test_a_loop_keeps_its_best_model(tmp_path):
    state, _ = trained(tmp_path / "run", tf.distribute.get_strategy(), best="loss", keep=1)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000021-end"]
    best = keras.saving.load_model(tmp_path / "run/best.keras")
    assert all(np.array_equal(*pair) for pair in zip(best.get_weights(), state["model"].get_weights(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"optimizer": 1}, "there is no model in it, only optimizer"),
        ({"net": "unbuilt"}, "it has no variables yet"),
        ({"a": "built", "b": "built"}, "the loop has several: a, b"),
    ],
)
def test_a_loop_that_can_not_be_saved_is_a_sentence(tmp_path, state, words):
    made = {
        "unbuilt": lambda: keras.Sequential([keras.layers.Dense(1)]),
        "built": lambda: parts(tf.distribute.get_strategy())["model"],
    }
    state = {name: made[value]() if value in made else value for name, value in state.items()}
    with Run(tmp_path / "run", recipe="test", best="loss") as run, pytest.raises(RequestError, match=words):
        run.loop(print, np.zeros((8, 2)), state=state)


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["a loss", "a dict", "a metric", "no optimizer"])
def test_what_a_step_returns_is_the_epochs_row(tmp_path, kept):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer, mean, losses = keras.optimizers.SGD(0.01), keras.metrics.Mean(name="loss"), []

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - 3.0) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        if kept == "no optimizer":
            for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
                variable.assign_sub(0.01 * gradient)
        else:
            optimizer.apply(gradients, model.trainable_variables)
        losses.append(float(loss))
        mean.reset_state()
        mean.update_state(loss)
        return {"a dict": {"loss": loss}, "a metric": {"loss": mean}}.get(kept, loss)

    state = {"model": model} if kept == "no optimizer" else {"model": model, "optimizer": optimizer, "mean": mean}
    with Run(tmp_path / "run", recipe="test") as run:
        history = run.loop(step, np.ones((16, 2), "float32"), state=state, batch_size=8, epochs=2)
    assert len(losses) == 4
    assert history.history["loss"] == pytest.approx([losses[1], losses[3]])
    assert run.summary["loss"] == pytest.approx(losses[3])


@pytest.mark.slow
def test_a_loop_evaluates_by_its_own_code(tmp_path):
    state = parts(tf.distribute.get_strategy())
    with Run(tmp_path / "run", recipe="test") as run, pytest.raises(RequestError, match="leave validation_data out"):
        run.loop(print, np.zeros((8, 8)), state=state, validation_data=np.zeros((8, 8)))


@pytest.mark.slow
def test_a_rate_that_is_scaled_when_an_epoch_begins_is_scaled_once(tmp_path):
    """LearningRateScheduler with (epoch, rate), as Keras documents it, in an epoch that is begun a second time."""
    x = np.random.default_rng(0).normal(size=(32, 2))

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(keras.ops.convert_to_numpy(self.model.optimizer.iterations)) == 6:
                os.kill(os.getpid(), signal.SIGTERM)

    def train(folder, *callbacks, resume=False):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        halving = keras.callbacks.LearningRateScheduler(lambda _, rate: rate / 2)
        with Run(folder, recipe="test", resume=resume) as run:
            run.fit(model, x, x[:, :1], epochs=3, batch_size=8, callbacks=[halving, *callbacks])
        return run.summary["weights_sha256"], float(model.optimizer.learning_rate)

    whole = train(tmp_path / "a")
    with pytest.raises(StoppedBySignal):
        train(tmp_path / "b", Stop())
    assert train(tmp_path / "b", resume=True) == whole
    assert whole[1] == pytest.approx(0.1 / 8)


@pytest.mark.slow
def test_an_epochs_row_has_the_rate_that_it_was_trained_with_and_the_memory(tmp_path):
    rates = []

    class Halve(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))
            self.model.optimizer.learning_rate = rates[-1] / 2

    model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1000)])  # 4 MB of weights, and their gradients.
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with Run(tmp_path / "run", recipe="test") as run:
        run.fit(model, np.ones((12, 1000)), np.ones((12, 1000)), epochs=3, batch_size=1, callbacks=[Halve()], verbose=0)
    rows = list(csv.DictReader((tmp_path / "run" / "history.csv").read_text().splitlines()))
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx(rates)
    assert rates == pytest.approx([0.1, 0.05, 0.025])
    assert all(8.0 <= float(row["peak_memory_mb"]) < 1e5 for row in rows)
    assert run.summary["peak_memory"][0] >= 1e6 * float(rows[-1]["peak_memory_mb"]) - 1e3
    assert run.summary["measured_steps"] == 24  # The last epochs' 11 each, and two of the first.
    assert "peak_memory_mb" not in run.summary


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["plain", "scaled", "accumulating"])
def test_the_rate_of_a_schedule_is_that_of_the_epochs_last_step(tmp_path, optimizer):
    schedule = keras.optimizers.schedules.PolynomialDecay(1.0, 8, 0.0)  # 1, 7/8, ... 1/8 in eight steps.
    sgd = keras.optimizers.SGD(schedule, gradient_accumulation_steps=2 if optimizer == "accumulating" else None)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(sgd) if optimizer == "scaled" else sgd, "mse")
    with Run(tmp_path / "run", recipe="test") as run:
        run.fit(model, np.zeros((8, 2)), np.zeros((8, 1)), epochs=2, batch_size=2, verbose=0)
    rows = list(csv.DictReader((tmp_path / "run" / "history.csv").read_text().splitlines()))
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx([5 / 8, 1 / 8])


@pytest.mark.slow
def test_what_is_not_known_or_not_there_is_left_out(tmp_path, four_devices, monkeypatch):
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda _: {"current": 0, "peak": 0})
    found = []
    for weights in ("replicated", "sharded"):
        strategy = strategies.create("mirrored", devices=four_devices[:2], weights=weights)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        with Run(tmp_path / weights, recipe="test") as run:
            run.fit(model, np.zeros((8, 2)), np.zeros((8, 1)), epochs=1, batch_size=4, verbose=0)
        assert run.summary["peak_memory"] == []
        assert "peak_memory" not in (tmp_path / weights / "history.csv").read_text()
        found.append({name: run.summary.get(name) for name in ("weights", "optimizer_state", "mesh")})
    assert found == [
        {"weights": "replicated", "optimizer_state": "replicated", "mesh": None},
        {"weights": "sharded", "optimizer_state": "sharded", "mesh": {"shards": 2, "groups": 1}},
    ]


@pytest.mark.slow
def test_the_best_of_two_fits_is_the_best_of_both(tmp_path):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    x = np.random.default_rng(0).normal(size=(32, 2))
    with Run(tmp_path / "run", recipe="test", best="loss") as run:
        model.compile(keras.optimizers.SGD(0.1), "mse")
        run.fit(model, x, x[:, :1], epochs=4, batch_size=8)
        weights = model.get_weights()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        run.fit(model, x, x[:, :1] + 9, epochs=1, batch_size=8)
    best = keras.saving.load_model(tmp_path / "run/best.keras").get_weights()
    assert all(np.array_equal(*pair) for pair in zip(best, weights, strict=True))


@pytest.mark.slow
def test_a_best_model_that_can_not_be_written_costs_the_file_and_not_the_run(tmp_path, monkeypatch, caplog):
    (tmp_path / "run/best.keras").mkdir(parents=True)  # A name that no file can take.
    (tmp_path / "run/best.keras/full").touch()
    _, summary = trained(tmp_path / "run", tf.distribute.get_strategy(), best="loss")
    assert summary["epochs"] == 3
    assert "best.keras can't be written" in caplog.text


@pytest.mark.slow
def test_the_best_of_a_resumed_run_is_that_of_the_whole(tmp_path):
    x = np.random.default_rng(0).normal(size=(32, 2))

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    def train(folder, *callbacks, resume=False):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        other = (x, -x[:, :1] - 1)  # Which training fits less and less.
        with Run(folder, recipe="test", resume=resume, best="val_loss") as run:
            run.fit(model, x, x[:, :1] + 1, epochs=5, batch_size=8, validation_data=other, callbacks=list(callbacks))

    train(tmp_path / "a")
    with pytest.raises(StoppedBySignal):
        train(tmp_path / "b", Stop())
    train(tmp_path / "b", resume=True)
    weights = [keras.saving.load_model(tmp_path / name / "best.keras").get_weights() for name in "ab"]
    last = keras.saving.load_model(tmp_path / "a/model.keras").get_weights()
    assert all(np.array_equal(*pair) for pair in zip(*weights, strict=True))
    assert not np.array_equal(weights[0][0], last[0])
