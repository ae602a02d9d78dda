"""A `train_step` of the user's own, as TensorFlow's and Keras's guides have it, gives one device's numbers."""

import traceback

import batteries
import beside
import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies

X = np.random.default_rng(0).normal(size=(46, 4)).astype("float32")  # Of 16 at a time, 14 are left for the last.
Y = X.sum(axis=1, keepdims=True)
BATCH = 16


class Own(keras.Model):
    """A network whose loss is computed by `loss_of(errors, model)`, errors being one number an example."""

    def __init__(self, loss_of, *, regularizer=None, adds=False):
        super().__init__()
        self.loss_of, self.adds = loss_of, adds
        self.first = keras.layers.Dense(8, "relu", activity_regularizer=regularizer)
        self.norm = keras.layers.BatchNormalization(synchronized=True)
        self.last = keras.layers.Dense(1)

    def call(self, x, training=False):
        x = self.first(x)
        if self.adds:
            self.add_loss(0.1 * tf.reduce_mean(x**2))
        return self.last(self.norm(x, training=training))

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean((self(x, training=True) - y) ** 2, axis=-1)
            loss = self.loss_of(errors, self)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"mae": tf.reduce_mean(errors)}


def average(errors, _):
    return tf.nn.compute_average_loss(errors, global_batch_size=BATCH)


def average_and_weights(errors, model):
    return average(errors, model) + tf.nn.scale_regularization_loss(0.1 * tf.nn.l2_loss(model.last.kernel))


def large_ones(errors, _):
    return strategies.batch_mean(errors, tf.stop_gradient(errors) > 1.0)


def added(errors, model):
    return tf.reduce_mean(errors) + tf.add_n(model.losses)


CASES = {
    "a mean": (lambda errors, _: tf.reduce_mean(errors), {}),
    "TensorFlow's average": (average, {}),
    "TensorFlow's average, of a batch of any size": (lambda e, _: tf.nn.compute_average_loss(e), {}),
    "TensorFlow's average, and what it scales": (average_and_weights, {}),
    "a masked mean": (large_ones, {}),
    "what layers add": (added, {"adds": True}),
    "an activity regularizer": (added, {"regularizer": "l2"}),
}


def trained(strategy, loss_of, optimizer=lambda: keras.optimizers.SGD(0.002), **how):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Own(loss_of, **how)
        model.compile(optimizer())
    model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    batteries.rows(
        CASES,
        ["TensorFlow's average, and what it scales", "a masked mean", "what layers add", "an activity regularizer"],
    ),
)
def test_a_loss_is_that_of_the_whole_batch(four_devices, case, request):
    loss_of, how = CASES[case]
    if "regularizer" in how:
        request.getfixturevalue("regularizers_are_means")
    one = trained(strategies.create("one_device", devices=four_devices[:1]), loss_of, **how)
    many = trained(strategies.create("mirrored", devices=four_devices[:2]), loss_of, **how)
    for mine, theirs in zip(many, one, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-6)


class Two(keras.Model):
    """A scaled optimizer for one layer, a plain one for the other."""

    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(8, "relu"), keras.layers.Dense(1)
        self.plain = keras.optimizers.SGD(0.05)

    def call(self, x):
        return self.last(self.first(x))

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
            scaled = self.optimizer.scale_loss(loss)
        for optimizer, target, layer in ((self.optimizer, scaled, self.first), (self.plain, loss, self.last)):
            weights = layer.trainable_variables
            gradients = [tf.clip_by_norm(each, 1e6) for each in tape.gradient(target, weights)]
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


@pytest.mark.slow
def test_a_scaled_loss_beside_a_plain_one(four_devices):
    def compiled():
        return (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=8.0),)

    beside.assert_one_devices(four_devices[:2], Two, X, Y, batch_size=BATCH, compiled=compiled)


@pytest.mark.slow
def test_a_gradient_penalty_is_no_loss_of_its_own(four_devices):
    """Gradients of tensors are of this replica's examples, whatever they are differentiated from."""

    def penalised(errors, model):
        x = tf.ones((3, 4))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x)
        slopes = tape.gradient(y, x)
        return tf.reduce_mean(errors) + tf.reduce_mean((tf.norm(slopes, axis=1) - 1.0) ** 2)

    one = trained(strategies.create("one_device", devices=four_devices[:1]), penalised)
    for mine, theirs in zip(
        trained(strategies.create("mirrored", devices=four_devices[:2]), penalised), one, strict=True
    ):
        np.testing.assert_allclose(mine, theirs, atol=2e-6)


@pytest.mark.slow
def test_no_device_goes_without_an_example(four_devices):
    """33 examples, 32 at a time: batch normalisation of nothing is no number."""
    keras.utils.set_random_seed(1)
    with strategies.create("mirrored", devices=four_devices).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    history = model.fit(X[:33], Y[:33], batch_size=32, validation_data=(X[:33], Y[:33]), epochs=2, verbose=0).history
    assert np.isfinite([value for values in history.values() for value in values]).all()
    assert np.shape(model.predict(X[:33], batch_size=32, verbose=0)) == (33, 1)


@pytest.mark.slow
def test_reduce_of_a_nest_is_of_each_leaf(four_devices):
    strategy = strategies.create("mirrored", devices=four_devices[:2])
    given = strategy.run(lambda: {"a": tf.constant(1.0), "b": (tf.constant(10.0), tf.constant(2.0))})
    found = strategy.reduce("SUM", given, axis=None)
    assert tf.nest.map_structure(float, found) == {"a": 2.0, "b": (20.0, 4.0)}


@pytest.mark.slow
@pytest.mark.parametrize("draw", [pytest.param("tf", marks=pytest.mark.long), "keras"])
def test_noise_of_a_seed_that_is_written_out_is_the_whole_batchs(four_devices, draw):
    class Noisy(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = keras.layers.Dense(4), keras.layers.Dense(1)

        def call(self, x):
            return self.last(self.first(x))

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                h = self.first(x)
                shape = tf.shape(h)
                h += tf.random.stateless_normal(shape, [1, 2]) if draw == "tf" else keras.random.normal(shape, seed=3)
                loss = tf.reduce_mean((self.last(h) - y) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss, "rate": self.optimizer.learning_rate}

    histories = []
    for count in (1, 2):
        keras.utils.set_random_seed(1)
        with strategies.create("mirrored" if count > 1 else "one_device", devices=four_devices[:count]).scope():
            model = Noisy()
            model.compile("adam")
        histories.append(model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history)
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, atol=1e-6)


@pytest.mark.slow
def test_autograph_converts_a_loop_of_ones_own_and_nothing_of_the_librarys(four_devices):
    strategy, converted = strategies.create("mirrored", devices=four_devices[:2]), set()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)

    @tf.autograph.experimental.do_not_convert
    def note():
        converted.update(frame.name for frame in traceback.extract_stack() if frame.name.startswith("tf__"))

    def step(x):
        note()
        if tf.reduce_sum(x) > 0:  # AutoGraph's work.
            x = x * 2
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        note()
        return loss

    @tf.function
    def step_of_all(x):
        return strategy.run(step, args=(x,))

    step_of_all(tf.ones((2, 3)))
    assert converted == {"tf__step"}, "its replicas run in threads"


class CountsItsSteps(keras.layers.Layer):
    def build(self, shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32")

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1)
        return x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("together", [1, 2])
def test_a_step_that_finds_no_more_data_counts_on_no_replica(four_devices, together):
    """Which replica had counted before the end was found was a matter of time, and rates by that count differed."""

    def batches():
        for size in (4, 3, 5):
            yield np.ones((size, 3), "float32"), np.ones((size, 2), "float32")

    shapes = (tf.TensorSpec((None, 3)), tf.TensorSpec((None, 2)))
    strategy = strategies.create("mirrored", devices=four_devices[:2])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), CountsItsSteps(), keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.1), "mse", steps_per_execution=together)
    data = tf.data.Dataset.from_generator(batches, output_signature=shapes)
    model.fit(data, epochs=2, shuffle=False, verbose=0)
    for counter in (model.optimizer.iterations, model.layers[0].steps):
        assert [int(copy.numpy()) for copy in strategy.experimental_local_results(counter.value)] == [6, 6]


@pytest.mark.slow
def test_a_metrics_own_attribute_result_stays(four_devices):
    """As some scripts patch one instance."""
    strategy = strategies.create("mirrored", devices=four_devices[:2])
    with strategy.scope():
        model = Own(lambda errors, _: tf.reduce_mean(errors))
        model.half = half = keras.metrics.Mean("half")
        half.result = own = lambda: keras.metrics.Mean.result(half) / 2
        model.compile("sgd")
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert half.result is own


ASKED = {
    "or a size that the script knows": lambda errors, size: tf.reduce_sum(errors) / (size or BATCH),
    "itself": lambda errors, size: tf.reduce_sum(errors) / size,
    "at least so many": lambda errors, size: tf.reduce_sum(errors) / max(size, 2 * BATCH),
}


class Asks(Own):
    """Asks in Python for the number of rows, which is known if each batch has as many."""

    def train_step(self, batch):
        self.rows = batch[0].shape[0]
        return super().train_step(batch)


@pytest.mark.slow
@pytest.mark.parametrize("case", batteries.rows(ASKED, "itself"))
def test_a_step_that_asks_for_the_size_of_its_batch_runs_as_it_was_looked_at(four_devices, case):
    def build():
        return Asks(lambda errors, model: ASKED[case](errors, model.rows))

    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH, drop_remainder=True)
    beside.assert_one_devices(four_devices[:2], build, batches, compiled=beside.descent(0.002))


class Layerwise(keras.Model):
    """Calls its layers by themselves, one of which adds to the loss, and never the model."""

    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(5), keras.layers.Dense(1, activity_regularizer="l2")

    def call(self, x):
        return self.last(self.first(x))

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self.last(self.first(x)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"total": loss}


@pytest.mark.slow
@pytest.mark.usefixtures("regularizers_are_means")
def test_what_layers_add_is_each_replicas_own_if_the_model_is_never_called(four_devices):
    compiled = beside.descent(0.1, "mse")
    beside.assert_one_devices(four_devices[:2], Layerwise, X, Y, batch_size=BATCH, compiled=compiled)


class Deciding(beside.OneDense):
    """Its rows decide whether it decays its weights."""

    def train_step(self, batch):
        x, y = batch
        loss = tf.reduce_mean((self(x, training=True) - y) ** 2)

        def decay():
            weights = self.trainable_variables
            self.optimizer.apply([tf.ones_like(weight) for weight in weights], weights)
            return 0

        tf.cond(tf.reduce_mean(y) > 0.2, decay, lambda: 0)
        return {"loss": loss}


@pytest.mark.slow
def test_what_rows_decide_is_decided_by_the_whole_batch(four_devices):
    whole = {"batch_size": 5, "epochs": 1, "compiled": beside.descent(0.05)}
    beside.assert_one_devices(four_devices[:2], Deciding, X, Y, **whole)
    assert 0 < sum(Y[n : n + 5].mean() > 0.2 for n in range(0, len(Y), 5)) < 10
