"""The first step, compared with one device's: right ones pass, planted faults are named, scripts stay as they are."""

import logging

import batteries
import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import StrategyError
from toolkit.strategies.context import this_step
from toolkit.strategies.step import exchanges, share
from toolkit.strategies.upstream.wrapping import away

L = keras.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(33, 6)).astype("float32")
Y = RANDOM.integers(0, 3, 33)


class Noise(L.Layer):
    """Draws without a seed of its own."""

    def call(self, x, training=False):
        return x + 0.1 * keras.random.normal(keras.ops.shape(x)) if training else x


class Own(keras.Model):
    """A step of the user's, with a teacher that no layer has, a log of its own and a count."""

    def __init__(self):
        super().__init__()
        self.body, self.head = L.Dense(5, activation="tanh"), L.Dense(3)
        self.steps = tf.Variable(0, trainable=False)
        held = tf.Variable(0.0, trainable=False)
        self.held = [lambda: held]  # No attribute shows it.

    def call(self, x, training=False):
        return self.head(self.body(x))

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.steps.assign_add(1)
        self.held[0]().assign_add(2.0)
        return {"loss": loss, "size": tf.reduce_mean(logits**2)}


def built(strategy, *, own=False, rate=0.01, **settings):
    with strategy.scope():
        if own:
            model = Own()
        else:
            layers = [L.Dense(5, activation="tanh"), L.Dropout(0.3), Noise(), L.BatchNormalization(), L.Dense(3)]
            model = keras.Sequential([keras.Input((6,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(rate), loss, metrics=None if own else ["accuracy"], **settings)
    return model


def mirrored(count=2, **options):
    keras.utils.set_random_seed(1)
    return strategies.create("mirrored", devices=[f"CPU:{n}" for n in range(count)], check="first_step", **options)


def fitted(model, **settings):
    return model.fit(X, Y, batch_size=9, epochs=1, shuffle=False, verbose=0, **settings)


def everything(check, **settings):
    """What a script sees and leaves, with and without the check."""
    keras.utils.set_random_seed(1)
    model = built(strategies.create("mirrored", devices=("CPU:0", "CPU:1"), check=check), **settings)
    history = fitted(model, validation_data=(X[:7], Y[:7]))
    seen = [*history.history.values(), model.predict(X[:11], verbose=0), model.train_on_batch(X[:5], Y[:5])]
    left = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    return [np.asarray(each) for each in (*seen, *left, np.random.random(3), keras.random.normal([3]))]


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_execution", batteries.rows([1, 2], 1))
def test_nothing_of_a_script_changes(steps_per_execution, caplog):
    caplog.set_level(logging.INFO, "toolkit")
    at_once = {"steps_per_execution": steps_per_execution}
    checked, unchecked = everything("first_step", **at_once), everything("none", **at_once)
    assert all(np.array_equal(*pair) for pair in zip(checked, unchecked, strict=True))
    said = [each.getMessage() for each in caplog.records if "is one device's" in each.getMessage()]
    assert [each.split(" is ")[0].rpartition(" ")[2] for each in said] == ["fit", "evaluate", "predict"]


@pytest.mark.slow
def test_a_step_of_ones_own_is_compared_too(caplog):
    caplog.set_level(logging.INFO, "toolkit")
    model = built(mirrored(3), own=True)
    fitted(model)
    assert "The first step of fit is one device's" in caplog.text
    assert int(model.steps) == 4
    assert float(model.held[0]()) == 8.0


@pytest.mark.slow
def test_a_step_that_python_makes_is_compared_too(caplog):
    caplog.set_level(logging.INFO, "toolkit")
    fitted(built(mirrored(), run_eagerly=True), steps_per_epoch=1)
    assert "The first step of fit is one device's" in caplog.text


def unexchanged(monkeypatch):
    """The gradient of the last kernel stays the replica's own."""
    original = exchanges.exchange

    def exchange(sent):
        own, result = sent.values[4], original(sent)
        sent.values[4] = own
        return result

    monkeypatch.setattr(exchanges, "exchange", exchange)


def half(monkeypatch):
    """Shares of 5 and 4 examples weigh alike."""
    monkeypatch.setattr(share.Share, "weight", property(lambda _: tf.constant(0.5, tf.float64)))


def slot(monkeypatch):
    """An update of replicas leaves another momentum, which the weights of this step don't show."""
    original = keras.optimizers.Adam.update_step

    def update(optimizer, gradient, variable, rate):
        original(optimizer, gradient, variable, rate)
        if this_step.strategy is not None and variable.shape == [5, 3]:
            optimizer._momentums[optimizer._get_variable_index(variable)].assign_add(0.01 * gradient)

    monkeypatch.setattr(keras.optimizers.Adam, "update_step", update)


def metric(monkeypatch):
    """The second replica's examples don't count."""
    original = keras.metrics.SparseCategoricalAccuracy.update_state

    def update(metric, *args, **kwargs):
        return None if this_step.replica else original(metric, *args, **kwargs)

    monkeypatch.setattr(keras.metrics.SparseCategoricalAccuracy, "update_state", update)


def log(monkeypatch):
    """A log is the first replica's."""
    monkeypatch.setattr(share.Share, "of_all", lambda _, leaf, *__: leaf)


def draw(monkeypatch):
    """Each replica draws for the first rows."""
    monkeypatch.setattr(share.Share, "first", property(lambda _: tf.zeros([], tf.float64)))


FAULTS = {
    unexchanged: ({}, "the gradient of sequential/dense_1/kernel"),
    half: ({}, "the gradient of sequential/dense_1/bias"),
    slot: ({}, r"adam: .*dense_1.*kernel_momentum"),
    metric: ({}, "metric accuracy/"),
    log: ({"own": True}, "the log loss"),
    draw: ({}, "the output of dropout"),
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_named(plant, monkeypatch):
    settings, named = FAULTS[plant]
    keras.backend.clear_session()
    model = built(mirrored(), **settings)
    plant(monkeypatch)
    with pytest.raises(StrategyError, match=f"{named}.* differs by") as raised:
        fitted(model)
    assert "compares the first step of fit with the same on one device" in raised.value.asked


class Scattered(L.Layer):
    """Draws by a state of TensorFlow's."""

    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "layers", "said"),
    [
        ({}, [Scattered], "RandomStandardNormal"),
        ({"batch_statistics": "replica"}, [L.BatchNormalization], 'batch_statistics="replica"'),
        ({"gradients": strategies.GradientExchange(compression="powersgd", rank=1)}, [], "powersgd"),
        ({"local": strategies.LocalSteps(every=4)}, [], "LocalSteps"),
    ],
    ids=["tf.random", "statistics", "powersgd", "local"],
)
def test_a_known_difference_is_a_warning(options, layers, said, caplog):
    with mirrored(**options).scope():
        model = keras.Sequential([keras.Input((6,)), *(kind() for kind in layers), L.Dense(4), L.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fitted(model)
    (warned,) = [each.getMessage() for each in caplog.records if each.name.endswith("first_step")]
    assert said in warned


class OnlyOnReplicas(L.Layer):
    """Finds out where it is."""

    def call(self, x):
        if not hasattr(keras.optimizers.Optimizer.apply, "_toolkit"):
            raise RuntimeError("one device can't")
        return x


@pytest.mark.slow
def test_a_step_that_one_device_cannot_make_is_said_and_made(caplog):
    with mirrored().scope():
        model = keras.Sequential([L.Dense(3), OnlyOnReplicas()])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fitted(model)
    assert "isn't compared with one device's: one device can't make it: RuntimeError: " in caplog.text


def test_one_replica_has_nothing_to_compare(caplog):
    caplog.set_level(logging.INFO, "toolkit")
    strategies.create("mirrored", devices=["CPU:0"], check="first_step")
    assert "check='first_step' has nothing to compare" in caplog.text


def test_there_are_two_answers():
    with pytest.raises(StrategyError, match="none, first_step"):
        strategies.create("mirrored", devices=["CPU:0"], check="always")


def test_methods_are_away_for_a_time_and_come_back():
    with strategies.create("mirrored", devices=("CPU:0", "CPU:1")).scope():
        model = keras.Sequential([L.Dense(3)])
    given = dict(vars(model))
    assert "make_train_function" in given
    with away():
        assert "make_train_function" not in vars(model)
        assert model.make_train_function.__func__ is keras.Model.make_train_function
        assert not hasattr(keras.optimizers.Optimizer.apply, "_toolkit")
    assert vars(model) == given
    assert hasattr(keras.optimizers.Optimizer.apply, "_toolkit")


@pytest.mark.slow
def test_losses_of_several_outputs_are_compared_by_their_means(caplog):
    """Keras weighs them by a batch's size where it is known when a step is traced."""
    caplog.set_level(logging.INFO, "toolkit")
    with mirrored().scope():
        inputs = keras.Input((6,))
        model = keras.Model(inputs, {"u": L.Dense(3, name="u")(inputs), "v": L.Dense(1, name="v")(inputs)})
        loss = {"u": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "v": "mse"}
        model.compile("rmsprop", loss, metrics={"v": ["mae"]})
    labels = {"u": Y, "v": X[:, :1]}
    for known in (False, True):
        data = tf.data.Dataset.from_tensor_slices((X, labels)).batch(9, drop_remainder=known)
        model.fit(data, shuffle=False, verbose=0)
        model.make_train_function(force=True)
    assert caplog.text.count("The first step of fit is one device's") == 2
