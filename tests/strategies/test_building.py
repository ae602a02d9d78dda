"""Variables made before the first step: by a `train_step` of the user's own, and without a look at the data."""

import json

import beside
import keras
import numpy as np
import processes
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from toolkit import strategies

X = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


@pytest.mark.slow
def test_the_first_epoch_has_the_order_of_one_device(four_devices):
    """A look at a batch would take the first shuffle."""

    def first_losses(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        seen = []
        note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: seen.append(logs["loss"]))
        shuffled = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(50, seed=1).batch(16).prefetch(2)
        model.fit(shuffled, epochs=2, verbose=0, shuffle=False, callbacks=[note])
        model.fit(X, Y, batch_size=16, verbose=0, callbacks=[note])
        return seen

    one = first_losses(strategies.create("one_device", devices=four_devices[:1]))
    assert first_losses(strategies.create("mirrored", devices=four_devices[:2])) == pytest.approx(one, rel=1e-5)


class Neither(keras.Model):
    def call(self, x):
        raise ValueError("no such column")

    def train_step(self, batch):
        raise KeyError("no such key")

    test_step = train_step


class WithoutCall(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def train_step(self, batch):
        x, y = batch
        return {"loss": tf.reduce_mean(self.dense(tf.concat([x, tf.cast(y, "float64")], axis=1)))}

    test_step = train_step


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Neither, WithoutCall])
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_mistake_in_a_step_is_shown_as_on_one_device(four_devices, kind, method, caplog):
    seen = []
    for name, count in (("one_device", 1), ("mirrored", 2)):
        with strategies.create(name, devices=four_devices[:count]).scope():
            model = kind()
            model.compile("sgd", "mse")
        with pytest.raises((KeyError, TypeError, ValueError)) as caught:
            getattr(model, method)(X, Y, verbose=0)
        seen.append((caught.type, str(caught.value), caught.traceback[-1].lineno))
        assert "train_step" in [each.name for each in caught.traceback]
    assert seen[0] == seen[1]
    assert ("no such column" in caplog.text) == (kind is Neither)


class NeedsValues(keras.Model):
    """As in a debugger: Python looks at values, and the first of them decides nothing."""

    def __init__(self, shows=lambda _: None):
        super().__init__()
        self.body, self.head = keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)
        self.normalise, self.shows = keras.layers.BatchNormalization(), shows

    def call(self, x, training=False):
        x = self.normalise(self.body(x), training=training)
        self.shows(float(tf.reduce_max(x)))
        return self.head(x)


class NeedsThemInItsStep(NeedsValues):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NeedsValues, NeedsThemInItsStep])
def test_a_model_that_is_run_eagerly_may_look_at_values(four_devices, kind):
    seen = []
    for strategy in (tf.distribute.get_strategy(), strategies.create("mirrored", devices=four_devices[:2])):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = kind()
            metrics = ["mae"] if kind is NeedsValues else None
            model.compile(keras.optimizers.Adam(0.01), "mse", metrics=metrics, run_eagerly=True)
        history = model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
        seen.append(np.concatenate([*history.values(), *map(np.ravel, model.get_weights())]))
    np.testing.assert_allclose(*seen, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_can_be_called_neither_way_is_said(four_devices, caplog):
    def fails(_):
        raise ValueError("no such file")

    with strategies.create("mirrored", devices=four_devices[:2]).scope():
        model = NeedsValues(fails)
        model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(RuntimeError, match="float"):
        model.fit(X, Y, verbose=0)
    assert "Call the layers on a batch in strategy.scope()" in caplog.text
    assert "no such file" in caplog.text


class TwoStreams(keras.Model):
    """Trains on pairs of batches with an optimizer of its own, and is tested on single batches."""

    def __init__(self):
        super().__init__()
        self.body, self.head = keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)
        self.only_to_test = keras.layers.Dense(1, kernel_initializer="ones")
        self.mean = keras.metrics.Mean("loss")
        self.without_values = 0

    @property
    def metrics(self):
        return [self.mean]

    def compile(self, own_optimizer):
        super().compile()  # With an RMSprop that nothing uses.
        self.own_optimizer = own_optimizer

    def train_step(self, data):
        (a, _), (b, y) = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.head(self.body(b)) - y) ** 2) + 0.1 * tf.reduce_mean(self.body(a) ** 2)
        variables = self.body.trainable_weights + self.head.trainable_weights
        self.own_optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}

    def test_step(self, data):
        self.without_values += tf.distribute.in_cross_replica_context()
        x, y = data
        errors = (self.head(self.body(x)) + self.only_to_test(x) - y) ** 2
        self.mean.update_state(errors)
        return {"loss": self.mean.result()}


@pytest.mark.slow
@pytest.mark.parametrize("first", ["fit", "evaluate"])
def test_data_to_evaluate_may_have_another_structure(four_devices, first):
    seen = []
    single = tf.data.Dataset.from_tensor_slices((X, Y)).batch(9)
    for name, count in (("one_device", 1), ("mirrored", 2)):
        keras.utils.set_random_seed(1)
        with strategies.create(name, devices=four_devices[:count]).scope():
            model = TwoStreams()
            model.compile(keras.optimizers.Adam(0.01))
        losses = [model.evaluate(single, verbose=0)] if first == "evaluate" else []
        pairs = tf.data.Dataset.zip(single, single)
        history = model.fit(pairs, validation_data=single, epochs=3, verbose=0, shuffle=False).history
        assert not model.optimizer.built
        seen.append(np.concatenate([losses, *history.values(), *map(np.ravel, model.get_weights())]))
    np.testing.assert_allclose(*seen, atol=1e-6)
    # Passes without values: two create what the first epoch needs, and one finds out whether rows are enough.
    assert model.without_values == 3


THEIRS = """
import json
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras, numpy as np, toolkit
ours = toolkit.strategies.create("mirrored", devices=["CPU:0", "CPU:1"])
class Halved(keras.Model):
    # Trains by a mean over its own share, of which TensorFlow adds up the gradients.
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)
    def call(self, x):
        return self.dense(x)
    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(batch[0]) - batch[1]) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}
x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
def moved(strategy):
    with strategy.scope():
        model = Halved()
        model.compile(keras.optimizers.SGD(0.1))
    model.fit(x, x[:, :1], batch_size=16, verbose=0)
    return model.get_weights()[0].ravel().tolist()
theirs = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
found = [moved(ours), moved(theirs), moved(toolkit.strategies.enable_fit(theirs))]
print("SEEN", json.dumps(found))
"""


@pytest.mark.slow
def test_under_somebody_elses_strategy_everything_is_keras_own(tmp_path):
    done = processes.python(tmp_path, "-c", THEIRS)
    assert done.returncode == 0, done.stderr
    ours, theirs, enabled = json.loads(done.stdout.partition("SEEN ")[2])
    np.testing.assert_allclose(theirs, 2 * np.array(ours), rtol=1e-5)
    np.testing.assert_allclose(enabled, ours, rtol=1e-5)


def test_what_is_taken_over_is_there():
    assert callable(keras.Model._maybe_symbolic_build), "Keras builds models elsewhere"
    assert callable(keras.Model._symbolic_build), "Keras builds models elsewhere"
    assert "_distributed_dataset" in keras_trainer.TFEpochIterator.__init__.__wrapped__.__code__.co_names


class AsksFirst(beside.OneDense):
    """Asks for its variables before its layer has made them."""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class Penalty(keras.Model):
    """Has no call, and differentiates by its inputs, as WGAN-GP does."""

    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                judged = self.critic(x)
            slope = inner.gradient(judged, x)
            norm = tf.sqrt(tf.reduce_sum(tf.square(slope), axis=1))
            loss = tf.reduce_mean((norm - 1) ** 2) + tf.reduce_mean(judged)
        variables = self.critic.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AsksFirst, Penalty])
def test_a_step_makes_the_variables_it_needs(four_devices, kind):
    seen = []
    x = np.random.default_rng(0).normal(size=(22, 3)).astype("float32")
    for name, count in (("one_device", 1), ("mirrored", 2)):
        keras.utils.set_random_seed(4)
        with strategies.create(name, devices=four_devices[:count]).scope():
            model = kind()
            model.compile(keras.optimizers.SGD(0.1))
        model.fit(x, x[:, :1], batch_size=5, shuffle=False, verbose=0)
        seen.append(np.concatenate([np.ravel(each) for each in model.trainable_variables]))
    np.testing.assert_allclose(*seen, atol=1e-6)
