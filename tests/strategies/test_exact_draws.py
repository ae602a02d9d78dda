"""Several replicas draw one device's random numbers: dropout, noise, augmentation."""

import contextlib
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import parallel, strategies
from toolkit.strategies import LocalSteps

L = keras.layers
random = np.random.default_rng(0)
COUNT = 53  # In batches of 16: the last one has 5, of which three replicas have 2, 2 and 1.
CLASSES = random.integers(0, 3, COUNT)


def vectors(kind):
    return (7,), [L.Dense(33, "relu"), L.Dropout(0.5), L.GaussianNoise(0.3), L.Dense(5), L.Dropout(0.2)]


def pictures(kind):
    if kind == "float32":
        turned = [L.RandomRotation(0.2), L.RandomShear(0.1, 0.1), L.RandomHue(0.1, value_range=(0, 1))]
    else:
        turned = []  # Keras turns no picture in float64.
    moved = [L.RandomFlip(), L.RandomTranslation(0.1, 0.1), L.RandomZoom(0.2), *turned]
    coloured = [L.RandomContrast(0.3), L.RandomBrightness(0.2, value_range=(0, 1))]
    noises = [L.SpatialDropout2D(0.3), L.GaussianDropout(0.2), L.AlphaDropout(0.1)]
    return (9, 9, 3), [*moved, *coloured, L.Conv2D(5, 3), *noises, L.Flatten()]


def sequences(kind):
    recurrent = L.LSTM(5, dropout=0.3, recurrent_dropout=0.2, return_sequences=True)
    return (6, 4), [recurrent, L.TimeDistributed(L.Dropout(0.3)), L.Flatten()]


class Attends(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        # The bias of keys has no gradient but rounding, which Adam makes as large as any.
        self.attention = L.MultiHeadAttention(2, 4, dropout=0.3, use_bias=False)
        self.dropout = L.Dropout(0.2, noise_shape=(None, 1, 8))

    def call(self, x, training=None):
        return self.dropout(self.attention(x, x, training=training), training=training)


def attention(kind):
    return (6, 8), [Attends(), L.Flatten()]


class Distributions(keras.layers.Layer):
    """Draws of each distribution, along rows and along other axes, and without rows."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(4)

    def call(self, x):
        n, seed, x = keras.ops.shape(x)[0], self.seed, keras.ops.convert_to_tensor(x)
        drawn = [
            x * keras.random.uniform((7,), dtype=x.dtype, seed=seed),
            keras.random.truncated_normal((n, 3), seed=seed),
            keras.random.truncated_normal((n, 3), dtype="float64", seed=seed),
            keras.random.normal((n, 5), dtype="float64", seed=seed),
            keras.random.normal((n, 5), dtype="bfloat16", seed=seed),
            keras.random.randint((n, 3), 0, 9, dtype="int64", seed=seed),
            keras.ops.transpose(keras.random.randint((5, n), 0, 9, seed=seed)),
            keras.ops.reshape(keras.random.uniform((n * 3, 3), seed=seed), (-1, 9)),
            keras.random.binomial((n, 2), 3.0, 0.4, seed=seed),
            keras.random.categorical(x[:, :4], 2, seed=seed),
            keras.random.normal((n, 3), seed=7),
            tf.random.stateless_poisson([n, 2], [1, 2], 3.0),
            tf.random.stateless_parameterized_truncated_normal([n, 2], [3, 4], 0.1, 1.0, -1.0, 0.7),
        ]
        return keras.ops.concatenate([keras.ops.cast(each, x.dtype) for each in drawn], 1)


class Gammas(keras.layers.Layer):
    """Draws that are tried again until they fit, so that a step with them sees the whole batch."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(4)

    def call(self, x):
        n, x = keras.ops.shape(x)[0], keras.ops.convert_to_tensor(x)
        gamma = keras.random.gamma((n,), keras.ops.exp(x[:, 0]), seed=self.seed)[:, None]
        beta, plain = keras.random.beta((n, 1), 0.4, 0.7, seed=self.seed), keras.random.normal((n, 3), seed=self.seed)
        return keras.ops.concatenate([x, gamma, beta, plain], 1)


def distributions(kind):
    return (7,), [Distributions()]


def gammas(kind):
    return (7,), [Gammas()]


def data_of(shape, kind="float32"):
    return np.random.default_rng(1).uniform(size=(COUNT, *shape)).astype(kind)


def trained(strategy, layers, kind="float32", *, epochs=2, **compiled):
    keras.utils.set_random_seed(1)
    keras.config.set_floatx(kind)
    keras.config.set_dtype_policy(kind)
    try:
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            shape, made = layers(kind)
            model = keras.Sequential([keras.Input(shape), *made, L.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"], **{"jit_compile": False, **compiled})
        history = model.fit(data_of(shape, kind), CLASSES, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
        weights = [each for each in model.get_weights() if each.dtype.kind == "f"]
        return model, np.concatenate([history.history["loss"], *(each.ravel() for each in weights)])
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


LONG = pytest.mark.long


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "kind", "count"),
    [
        (distributions, "float32", 3),
        (gammas, "float32", 3),
        pytest.param(distributions, "float32", 2, marks=LONG),
        *(
            pytest.param(layers, kind, count, marks=[] if (layers, kind, count) == (pictures, "float32", 3) else LONG)
            for layers in (vectors, pictures, sequences, attention)
            for kind in ("float32", "float64")
            for count in (2, 3)
        ),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_model_draws_as_on_one_device(four_devices, layers, kind, count):
    _, one = trained(None, layers, kind)
    _, several = trained(strategies.create("mirrored", devices=four_devices[:count]), layers, kind)
    np.testing.assert_allclose(several, one, rtol=0, atol={"float32": 1e-5, "float64": 1e-10}[kind])


def normalised(kind):
    return (7,), [L.BatchNormalization(), L.Dense(33, "relu"), L.Dropout(0.5), L.GaussianNoise(0.3)]


@pytest.mark.slow
@pytest.mark.parametrize("layers", [normalised, pytest.param(vectors, marks=LONG)])
def test_xla_draws_as_on_one_device(four_devices, layers):
    """Its numbers aren't the kernels', also where replicas exchange something, so that XLA compiles next to nothing.

    It makes normal numbers in pairs along an axis: 33 for each example.
    """
    _, one = trained(None, layers, jit_compile=True)
    _, several = trained(strategies.create("mirrored", devices=four_devices[:3]), layers, jit_compile=True)
    np.testing.assert_allclose(several, one, atol=1e-5)


class Twice(keras.Model):
    """Gives its encoder the batch twice, as SimCLR does."""

    def __init__(self, compares):
        super().__init__()
        self.compares = compares
        noisy = [L.GaussianNoise(0.2), L.Dense(9, "relu"), L.Dropout(0.3), L.Dense(6)]
        self.encoder = keras.Sequential([keras.Input((7,)), *noisy])
        self.seed = keras.random.SeedGenerator(3)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            both = tf.concat([x, x], 0) * keras.random.uniform((2 * tf.shape(x)[0], 1), 0.5, seed=self.seed)
            encoded = self.encoder(both, training=True)
            if self.compares:
                one, other = tf.split(encoded, 2)
                alike = tf.matmul(one, other, transpose_b=True)
                loss = -tf.reduce_mean(tf.linalg.diag_part(tf.nn.log_softmax(alike)))
            else:
                loss = tf.reduce_mean((encoded - tf.concat([x, x], 0)[:, :6]) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.parametrize("compares", [False, pytest.param(True, marks=LONG)], ids=["by row", "of the whole batch"])
def test_a_batch_that_a_step_gives_twice_has_one_devices_draws(four_devices, compares):
    found = []
    for strategy in (tf.distribute.get_strategy(), strategies.create("mirrored", devices=four_devices[:3])):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = Twice(compares)
            model.compile(keras.optimizers.Adam(1e-2), jit_compile=False)
        history = model.fit(data_of((7,)), batch_size=16, epochs=2, shuffle=False, verbose=0)
        found.append([*history.history["loss"], *np.ravel(model.encoder.get_weights()[0])])
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)


class Normalises(keras.layers.Layer):
    """Normalises by the batch's statistics also in predictions."""

    def __init__(self):
        super().__init__()
        self.norm = L.BatchNormalization()

    def call(self, x):
        return self.norm(x, training=True)


class StaysOn(keras.layers.Layer):
    """Dropout that stays on in predictions, also where it is drawn in a branch."""

    def __init__(self):
        super().__init__()
        self.dropout = L.Dropout(0.5)

    def call(self, x):
        return tf.cond(tf.shape(x)[1] > 3, lambda: self.dropout(x, training=True), lambda: x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "compiled"),
    [
        ([StaysOn], {}),
        ([Normalises], {}),
        pytest.param([StaysOn], {"run_eagerly": True}, marks=LONG),
        pytest.param([Normalises], {"run_eagerly": True}, marks=LONG),
        pytest.param([Normalises], {"jit_compile": True}, marks=LONG),
    ],
    ids=["dropout", "normalisation", "dropout, eager", "normalisation, eager", "normalisation, XLA"],
)
def test_what_stays_on_in_evaluation_and_prediction_is_one_devices(four_devices, layers, compiled):
    found = []
    for strategy in (None, strategies.create("mirrored", devices=four_devices[:3])):
        made = lambda _: ((7,), [L.Dense(9), *(each() for each in layers)])  # noqa: E731
        model, _ = trained(strategy, made, epochs=1, **compiled)
        x = data_of((7,))
        losses = model.evaluate(x, CLASSES, batch_size=16, verbose=0)
        found.append(np.concatenate([losses, model.predict(x, batch_size=16, verbose=0).ravel()]))
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)


@pytest.mark.slow
def test_heads_that_are_sharded_draw_one_devices_dropout(four_devices):
    def made(of):
        def layers(_):
            attention = of(2, 4, dropout=0.3, use_bias=False)
            x = keras.Input((6, 8))
            return (6, 8), [keras.Model(x, attention(x, x)), L.Flatten()]

        return layers

    (_, one), (_, two) = (
        trained(None, made(L.MultiHeadAttention)),
        trained(strategies.create("mirrored", devices=four_devices[:2]), made(parallel.ShardedMultiHeadAttention)),
    )
    np.testing.assert_allclose(two[:2], one[:2], atol=1e-5)


class Notes(keras.layers.Layer):
    """Adds numbers to its inputs, which are zeros."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.seed = draw, keras.random.SeedGenerator(4)

    def call(self, x):
        return x + self.draw(tf.shape(x), self.seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw",
    [
        lambda shape, _: tf.random.normal(shape, seed=3),
        pytest.param(lambda shape, _: tf.random.uniform(shape), marks=LONG),
    ],
    ids=["a seed", "no seed"],
)
def test_no_two_replicas_draw_the_same_with_a_state(four_devices, draw, caplog):
    caplog.set_level(logging.DEBUG, "toolkit")
    found = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        with strategies.create("mirrored", devices=four_devices[:2]).scope():
            model = keras.Sequential([keras.Input((4,)), Notes(draw)])
        found.append(model.predict(np.zeros((8, 4), "float32"), batch_size=8, verbose=0))
    assert len(np.unique(found[0])) == found[0].size
    np.testing.assert_array_equal(found[1], found[0], err_msg="it is reproducible")
    assert f"test_exact_draws.py, line {draw.__code__.co_firstlineno} draws by a state" in caplog.text


@pytest.mark.slow
def test_replicas_that_train_by_themselves_draw_for_themselves(four_devices):
    strategy = strategies.create("mirrored", devices=four_devices[:2], local=LocalSteps(every=2))
    drawn = []

    def draw(shape, seed):
        return keras.random.normal(shape, seed=seed)

    class Kept(Notes):
        def call(self, x):
            noise = self.draw(tf.shape(x), self.seed)
            tf.py_function(lambda each: drawn.append(each.numpy()), [noise], [])
            return x + noise

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), Kept(draw), L.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(np.zeros((8, 4), "float32"), np.zeros((8, 1), "float32"), batch_size=8, verbose=0)
    both = np.stack(drawn[-2:])
    assert both.shape == (2, 4, 4)
    assert len(np.unique(both)) == both.size
