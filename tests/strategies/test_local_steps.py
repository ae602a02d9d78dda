"""Local steps: replicas that train by themselves and average every so many steps."""

import os
import signal

import batteries
import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import parallel, strategies
from toolkit.errors import StoppedBySignal, StrategyError
from toolkit.strategies import LocalSteps
from toolkit.strategies.options import options_of
from toolkit.training import Run, state

RATE, MOMENTUM = 0.05, 0.5
random = np.random.default_rng(4)
X = random.normal(size=(32, 6)).astype("float32")
Y = (X @ random.normal(size=(6, 3))).astype("float32")


def trained(strategy, *, epochs=2, optimizer=None, loss="mse", metrics=("mae",), x=X, y=Y, **options):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3, kernel_initializer="zeros")])
        model.compile(optimizer or keras.optimizers.SGD(RATE, momentum=MOMENTUM), loss, metrics=list(metrics))
    history = model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options).history
    return history, model


def by_numpy(local, *, replicas=2, epochs=2):
    """The weights after 4 steps an epoch, from the definition."""
    weights = velocity = np.zeros((7, 3))
    outer = np.zeros((7, 3))
    inputs = np.hstack([X, np.ones((32, 1))])
    for _ in range(epochs):
        own, slots, since = [weights] * replicas, [velocity] * replicas, 0
        for begin in range(0, 32, 8):
            share = 8 // replicas
            for r in range(replicas):
                rows = slice(begin + r * share, begin + (r + 1) * share)
                gradient = 2 * inputs[rows].T @ (inputs[rows] @ own[r] - Y[rows]) / Y[rows].size
                slots[r] = MOMENTUM * slots[r] - RATE * gradient
                own[r] = own[r] + slots[r]
            since += 1
            if since == local.every or begin == 24:
                down = weights - sum(own) / replicas
                outer = local.outer_momentum * outer + down
                weights = weights - local.outer_rate * (down + local.outer_momentum * outer)
                own, since = [weights] * replicas, 0
        velocity = sum(slots) / replicas
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    "local", [LocalSteps(every=2), LocalSteps(every=3), LocalSteps(every=2, outer_rate=0.7, outer_momentum=0.9)]
)
def test_weights_are_those_of_the_definition(four_devices, local, count):
    _, model = trained(strategies.create("mirrored", devices=four_devices[:count], local=local))
    kernel, bias = model.get_weights()
    np.testing.assert_allclose(np.vstack([kernel, bias]), by_numpy(local, replicas=count), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"x": X[:29], "y": Y[:29]}, {"loss": keras.losses.MeanSquaredError(reduction="sum")}],
    ids=["uneven shares", "a loss that is a sum"],
)
def test_so_is_it_with(four_devices, options):
    optimizers = [keras.optimizers.SGD(0.005) for _ in range(2)]
    expected, synchronous = trained(
        strategies.create("mirrored", devices=four_devices[:2]), optimizer=optimizers[0], **options
    )
    by_one = strategies.create("mirrored", devices=four_devices[:2], local=LocalSteps(every=1))
    history, model = trained(by_one, optimizer=optimizers[1], **options)
    for mine, theirs in zip(model.get_weights(), synchronous.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.most = self.add_weight(shape=(), initializer="zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))

    def result(self):
        return self.most


@pytest.mark.slow
def test_a_metric_that_is_no_sum_is_refused_and_not_added_up(four_devices):
    strategy = strategies.create("mirrored", devices=four_devices[:2], local=LocalSteps(every=2))
    with pytest.raises(StrategyError, match="metric largest while replicas train by themselves"):
        trained(strategy, epochs=1, metrics=[Largest()])


@pytest.mark.slow
def test_a_replica_leaves_out_the_steps_in_which_its_own_gradients_overflow(four_devices):
    strategy = strategies.create("mirrored", devices=four_devices[:2], local=LocalSteps(every=100))
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            inner, kernel = self.model.optimizer.inner_optimizer, self.model.trainable_variables[0]
            seen.append(
                [
                    (np.isfinite(copy).all(), int(count))
                    for copy, count in zip(
                        strategy.experimental_local_results(kernel.value),
                        strategy.experimental_local_results(inner.iterations.value),
                        strict=True,
                    )
                ]
            )

    x = X.copy()
    x[4:8] *= 1e38  # Of the second replica, in the first step.
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**10)
    _, model = trained(strategy, x=x, epochs=1, optimizer=scaled, callbacks=[Look()])
    assert seen[0] == [(True, 1), (True, 0)], "the second replica, in the first step"
    assert seen[-1] == [(True, 4), (True, 3)]
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


@pytest.mark.slow
def test_weights_that_are_set_from_outside_stay_where_they_are(four_devices):
    local = LocalSteps(every=3, outer_rate=0.7, outer_momentum=0.5)
    _, model = trained(strategies.create("mirrored", devices=four_devices[:2], local=local))
    own = [np.full_like(weight, 0.25) for weight in model.get_weights()]
    model.set_weights(own)
    model.optimizer.learning_rate = 0.0
    for variable in model.optimizer.variables[2:]:
        variable.assign(keras.ops.zeros_like(variable))
    model.fit(X, Y, batch_size=8, verbose=0)
    for mine, set_to in zip(model.get_weights(), own, strict=True):
        np.testing.assert_array_equal(mine, set_to)


class Pair(keras.Model):
    """Two parts, each with an optimizer of its own; that of `compile` isn't used."""

    def __init__(self):
        super().__init__()
        self.one, self.other = keras.layers.Dense(3), keras.layers.Dense(3)

    def compile(self):
        super().compile()
        self.first, self.second = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02)
        self.loss_fn = keras.losses.MeanSquaredError()

    def call(self, x):
        return self.one(x) + self.other(x)

    def train_step(self, data):
        x, y = data
        for layer, optimizer in ((self.one, self.first), (self.other, self.second)):
            with tf.GradientTape() as tape:
                loss = self.loss_fn(y, self(x))
            optimizer.apply_gradients(
                zip(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables, strict=True)
            )
        return {"error": loss}


@pytest.mark.slow
@pytest.mark.parametrize("outer", [{}, {"outer_rate": 0.7, "outer_momentum": 0.5}], ids=["plain", "outer"])
def test_all_optimizers_of_a_model_agree_at_an_epochs_end(four_devices, outer):
    strategy = strategies.create("mirrored", devices=four_devices[:2], local=LocalSteps(every=3, **outer))
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = Pair()
        model(X[:1])
        model.compile()
    history = model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0).history
    assert history["error"][-1] < history["error"][0]
    kept = [*model.variables, *model.first.variables, *model.second.variables]
    for variable in kept:
        one, other = (copy.numpy() for copy in strategy.experimental_local_results(variable.value))
        np.testing.assert_array_equal(one, other, err_msg=variable.path)
    assert int(model.first.iterations) == 12


@pytest.mark.slow
def test_a_loop_of_ones_own_is_told_that_it_exchanges(four_devices, caplog):
    strategy = strategies.create("mirrored", devices=four_devices[:2], local=LocalSteps())
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3)])
        optimizer = keras.optimizers.SGD(0.1)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    strategy.run(step, args=(X,))
    assert "LocalSteps has no effect here" in caplog.text


@pytest.mark.slow
def test_synchronized_normalisation_is_said_to_be_each_replicas_own(four_devices, caplog):
    strategy = strategies.create("mirrored", devices=four_devices[:2], local=LocalSteps())
    with strategy.scope():
        parts = [keras.layers.Input((6,)), keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(3)]
        model = keras.Sequential(parts)
        model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    assert "In local steps each replica normalises its own share of a batch" in caplog.text


@pytest.mark.slow
def test_sharded_layers_are_refused(four_devices):
    strategy = strategies.create("mirrored", devices=four_devices[:2], local=LocalSteps())
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), parallel.ShardedDense(4), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    with pytest.raises(StrategyError, match="a sharded layer exchanges activations in each step"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local": 16}, r"local=16, but it must be a LocalSteps. Give local=toolkit.strategies.LocalSteps\(every=16\)"),
        ({"gradients": "powersgd"}, "gradients='powersgd', but it must be a GradientExchange"),
        (
            {"local": LocalSteps(), "gradients": strategies.GradientExchange(dtype="bfloat16")},
            r"gradients in bfloat16, but gradients aren't exchanged. Give LocalSteps\(dtype='bfloat16'\)",
        ),
        ({"local": LocalSteps(), "optimizer_state": "sharded"}, "train by themselves exchange nothing in a step"),
        (
            {"local": LocalSteps(), "gradients": strategies.GradientExchange(compression="powersgd")},
            "train by themselves exchange nothing in a step",
        ),
    ],
)
def test_what_create_is_given_is_checked(four_devices, options, words):
    with pytest.raises(StrategyError, match=words):
        strategies.create("mirrored", devices=four_devices[:2], **options)


def test_one_replica_is_told_that_there_is_nothing_to_average(four_devices, caplog):
    strategy = strategies.create("one_device", devices=four_devices[:1], local=LocalSteps())
    assert options_of(strategy).local is None  # It is TensorFlow's default strategy, which the whole process has.
    assert "exchanges nothing: LocalSteps has no effect" in caplog.text


@pytest.mark.slow
def test_it_begins_at_a_step(four_devices):
    local = LocalSteps(every=4, start_step=4)
    _, later = trained(strategies.create("mirrored", devices=four_devices[:2], local=local), epochs=1)
    _, synchronous = trained(strategies.create("mirrored", devices=four_devices[:2]), epochs=1)
    for mine, theirs in zip(later.get_weights(), synchronous.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
def test_evaluation_sees_the_average(four_devices):
    strategy = strategies.create("mirrored", devices=four_devices[:2], local=LocalSteps(every=3))
    history, model = trained(strategy, validation_data=(X, Y))
    assert model.evaluate(X, Y, verbose=0)[0] == pytest.approx(history["val_loss"][-1], rel=1e-6)


def run(directory, strategy, make, *, stop=False, resume=False):
    """Two epochs of seven steps, or a signal in the second step; all that a checkpoint has at the end."""
    random = np.random.default_rng(1)
    x, y = random.normal(size=(56, 6)).astype("float32"), random.normal(size=(56, 3)).astype("float32")

    class Stop(keras.callbacks.Callback):
        reads_weights = False

        def on_train_batch_end(self, batch, logs=None):
            if stop and batch == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    with Run(directory, recipe="test", resume=resume) as training:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            parts = [keras.layers.Dense(8, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
            model = keras.Sequential([keras.layers.Input((6,)), *parts])
            model.compile(make(), "mse", metrics=["mae"])
        training.fit(model, x, y, batch_size=8, epochs=2, verbose=0, callbacks=[Stop()])
        return state.capture(model)


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Adam, averages": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "accumulating": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "a loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=2.0**10),
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", batteries.rows(OPTIMIZERS, "accumulating"))
@pytest.mark.parametrize(
    "outer",
    [pytest.param({}, marks=pytest.mark.long), {"outer_rate": 0.7, "outer_momentum": 0.9}],
    ids=["plain", "outer"],
)
def test_a_resumed_run_is_that_of_no_pause_to_the_bit(four_devices, tmp_path, optimizer, outer):
    local = LocalSteps(every=3, **outer)
    strategy = strategies.create("mirrored", devices=four_devices[:2], local=local)
    make = OPTIMIZERS[optimizer]
    expected = run(tmp_path / "whole", strategy, make)
    with pytest.raises(StoppedBySignal, match="step 3"):  # The next average.
        run(tmp_path / "stopped", strategy, make, stop=True)
    resumed = run(tmp_path / "stopped", strategy, make, resume=True)
    assert list(resumed) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(resumed[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": None}, "every=None, but it must be a whole number of at least 1"),
        ({"every": 0}, "every=0, but it must be a whole number of at least 1"),
        ({"outer_momentum": 1.0}, r"outer_momentum=1.0, but it must be in \[0, 1\)"),
        ({"dtype": "int8"}, "local steps with communication dtype int8"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(StrategyError, match=words):
        LocalSteps(**options)
