"""BatchNormalization in a step of several replicas: the whole batch's means and variances, as on one device."""

import logging

import batteries
import keras
import numpy as np
import processes
import pytest
import tensorflow as tf
from keras import layers as L  # noqa: N812
from tensorflow.python.ops import op_selector

from toolkit import strategies
from toolkit.errors import StrategyError
from toolkit.strategies import LocalSteps
from toolkit.strategies.step import collectives

RANDOM = np.random.default_rng(12)
PICTURES, SERIES = RANDOM.normal(3, 2, size=(25, 6, 6, 3)), RANDOM.normal(size=(25, 5, 3))
SERIES[:, 3:][RANDOM.random(25) < 0.4] = 0
ROWS, Y = SERIES[:, 0], RANDOM.normal(size=(25, 1))

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def floats():
    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    yield
    keras.config.set_floatx(before)
    keras.config.set_dtype_policy(policy)


def small_cnn(**settings):
    parts = [keras.Input((6, 6, 3))]
    for number in range(3):
        parts += [L.Conv2D(4 + number, 3, padding="same"), L.BatchNormalization(momentum=0.8, **settings), L.ReLU()]
    return keras.Sequential([*parts, L.GlobalAveragePooling2D(), L.Dense(1)])


def resnet():
    def normalised(x, **settings):
        return L.BatchNormalization(momentum=0.8)(L.Conv2D(4, 3, padding="same", use_bias=False, **settings)(x))

    given = keras.Input((6, 6, 3))
    x = L.ReLU()(normalised(given))
    for _ in range(8):
        x = L.ReLU()(x + normalised(L.ReLU()(normalised(x))))
    x = L.BatchNormalization(momentum=0.8, axis=1)(x)
    return keras.Model(given, L.Dense(1)(L.GlobalAveragePooling2D()(x)))


def dense(*parts, shape=(3,)):
    return keras.Sequential([keras.Input(shape), *parts, L.Dense(1)])


def trained(build, x, strategy=None, *, batch=9, rate=0.02, **compiling):
    """Returns weights and losses; the last batch has fewer examples, and no batch is a multiple of 2 or 3 replicas."""
    keras.utils.set_random_seed(1)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = build()
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse", **compiling)
    kind = keras.config.floatx()
    x, y = x.astype(kind), Y[: len(x)].astype(kind)
    history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, validation_data=(x, y)).history
    return model, {**history, "weights": np.concatenate([np.ravel(each) for each in model.get_weights()])}


def mirrored(devices, count=2, **options):
    return strategies.create("mirrored", devices=devices[:count], **options)


def same(found, wanted, atol):
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, atol=atol * max(1, np.abs(values).max()), err_msg=name)


@pytest.mark.parametrize(
    ("build", "replicas", "dtype", "atol"),
    [
        (small_cnn, 3, "float64", 1e-10),
        pytest.param(small_cnn, 2, "float32", 1e-5, marks=pytest.mark.long),
        pytest.param(small_cnn, 2, "float64", 1e-10, marks=pytest.mark.long),
        pytest.param(small_cnn, 3, "float32", 1e-5, marks=pytest.mark.long),
        pytest.param(resnet, 2, "float64", 1e-10, marks=pytest.mark.long),
        pytest.param(resnet, 3, "float64", 1e-10, marks=pytest.mark.long),
        pytest.param(resnet, 2, "float32", 1e-5, marks=pytest.mark.long),
    ],
)
def test_it_is_one_devices(four_devices, build, replicas, dtype, atol):
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    model, found = trained(build, PICTURES, mirrored(four_devices, replicas))
    same(found, trained(build, PICTURES)[1], atol)
    for variable in model.non_trainable_variables:
        one, *others = (each.numpy() for each in variable.value.values)
        assert all((one == each).all() for each in others), "they are never averaged"


class Selecting(L.Layer):
    """Another part of each example's positions is normalised: a replica's positions aren't its share of the batch."""

    def __init__(self):
        super().__init__()
        self.norm = L.BatchNormalization()

    def call(self, x, training=None):
        flat = tf.reshape(x, [-1, 3])
        kept = self.norm(tf.boolean_mask(flat, flat[:, 0] > 0), training=training)
        return x + tf.reduce_mean(x, [1, 2], keepdims=True) + 0 * tf.reduce_sum(kept)


class Marking(L.Layer):
    """A mask that leaves the values that it leaves out, which `Masking` sets to zero."""

    def call(self, x):
        return x

    def compute_mask(self, x, previous_mask=None):
        return keras.ops.any(keras.ops.not_equal(x, 1e4), -1)


class Halves(keras.Model):
    """Each half of the batch has a normalisation of its own, and gradients go on through both of them."""

    def __init__(self):
        super().__init__()
        self.first, self.norms, self.last = L.Dense(4), [L.BatchNormalization(), L.BatchNormalization()], L.Dense(1)

    def call(self, x, training=None):
        x = self.first(x)
        half = tf.shape(x)[0] // 2
        parts = [norm(part, training=training) for norm, part in zip(self.norms, (x[:half], x[half:]), strict=True)]
        return self.last(tf.concat(parts, 0))


class InGradient(keras.Model):
    """Its loss has a gradient that goes through a normalisation, so it is differentiated twice."""

    def __init__(self):
        super().__init__()
        self.parts = [L.Dense(4, "tanh"), L.BatchNormalization(), L.Dense(1)]

    def call(self, x):
        for each in self.parts:
            x = each(x)
        return x

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            predicted = self(x, training=True)
        steep = tape.gradient(predicted, x)
        return tf.reduce_mean((predicted - y) ** 2) + tf.reduce_mean(tf.reduce_sum(steep**2, -1))


MODELS = {
    "behind a mask": (
        lambda: dense(L.Masking(), L.BatchNormalization(), L.GlobalAveragePooling1D(), shape=(5, 3)),
        SERIES,
    ),
    "behind a mask of far values": (
        lambda: dense(Marking(), L.BatchNormalization(), L.GlobalAveragePooling1D(), shape=(5, 3)),
        np.where(SERIES == 0, 1e4, SERIES).astype("float32"),
    ),
    "in TimeDistributed": (lambda: dense(L.TimeDistributed(L.BatchNormalization()), L.Flatten(), shape=(5, 3)), SERIES),
    "of one feature": (lambda: dense(L.Dense(1), L.BatchNormalization()), ROWS),
    "without a scale": (lambda: dense(L.BatchNormalization(scale=False, center=False)), ROWS),
    "renormalised": (lambda: dense(L.BatchNormalization(renorm=True)), ROWS),
    "synchronized": (lambda: dense(L.BatchNormalization(synchronized=True)), ROWS),
    "far from zero": (lambda: dense(L.BatchNormalization()), ROWS + 300),
    "of half of the batch": (Halves, ROWS + 1),
    "frozen": (lambda: dense(L.BatchNormalization(trainable=False)), ROWS),
}


@pytest.mark.parametrize("name", batteries.rows(MODELS, "behind a mask of far values"))
def test_such_a_layer_is_one_devices(four_devices, name):
    build, x = MODELS[name]
    found, wanted = trained(build, x, mirrored(four_devices, 3))[1], trained(build, x)[1]
    same(found, wanted, 2e-5)


@pytest.mark.long
def test_batches_smaller_than_the_replicas_have_one_devices_statistics(four_devices):
    build = lambda: dense(L.BatchNormalization(momentum=0.8))  # noqa: E731
    found, wanted = (trained(build, ROWS, each, batch=3)[1] for each in (mirrored(four_devices, 4), None))
    same(found, wanted, 2e-5)


def test_a_layer_has_one_message_forward_and_one_backward(four_devices, monkeypatch):
    sent, all_reduce = [], collectives.all_reduce

    def counted(x, **how):
        if x.shape.as_list() == [2 * 7 + 1]:
            sent.append(x.dtype)
        return all_reduce(x, **how)

    monkeypatch.setattr(collectives, "all_reduce", counted)
    build = lambda: dense(L.Dense(7), L.BatchNormalization(name="norm"))  # noqa: E731
    trained(build, ROWS[:8], mirrored(four_devices), batch=8)
    assert len(sent) == 2 * 2, "two replicas"


def test_the_walk_for_a_gradient_ends_at_the_other_replicas_tensors(four_devices, monkeypatch):
    """TensorFlow looks for variables between an exchange's result and its input, in a graph that all replicas share."""
    seen, walk = [], op_selector.get_backward_walk_ops

    def noted(*args, **how):
        found = walk(*args, **how)
        seen.append({each.type for each in found})
        return found

    monkeypatch.setattr(op_selector, "get_backward_walk_ops", noted)
    trained(lambda: dense(L.Dense(7), L.BatchNormalization()), ROWS[:8], mirrored(four_devices), batch=8)
    assert len(seen) >= 2 * 2, "the moments' and their gradient's, of two replicas"
    assert not [kinds for kinds in seen if "MatMul" in kinds]


def test_each_replica_normalises_its_own_share_by_name(four_devices, caplog):
    strategy = mirrored(four_devices, batch_statistics="replica")
    model, _ = trained(lambda: dense(L.BatchNormalization(momentum=0.0, name="norm")), ROWS[:8], strategy, batch=8)
    norm = model.get_layer("norm")
    np.testing.assert_allclose(norm.moving_variance, (ROWS[:4].var(0) + ROWS[4:8].var(0)) / 2, rtol=1e-5)
    assert 'norm: each replica normalises its own share of a batch. create(batch_statistics="batch")' in caplog.text
    assert strategies.describe(strategy)["batch_statistics"] == "replica"


def test_a_message_says_how_many_exchange_and_how_to_turn_it_off(four_devices, caplog):
    caplog.set_level(logging.INFO, logger="toolkit")
    trained(small_cnn, PICTURES[:8], mirrored(four_devices), batch=8)
    said = [each for each in caplog.records if "BatchNormalization" in each.getMessage()]
    assert len(said) == 1
    assert said[0].levelno == logging.INFO
    assert "3 BatchNormalization layers normalise the whole batch" in said[0].getMessage()
    assert 'create(batch_statistics="replica")' in said[0].getMessage()


class InBranch(L.Layer):
    def __init__(self):
        super().__init__()
        self.norm = L.BatchNormalization(momentum=0.8)

    def build(self, shape):
        self.norm.build(shape)

    def call(self, x, training=None):
        return tf.cond(tf.shape(x)[1] > 0, lambda: self.norm(x, training=training), lambda: x)


def test_in_a_branch_of_a_layer_that_sees_the_whole_batch_it_is_one_devices(four_devices, caplog):
    found, wanted = (trained(lambda: dense(InBranch()), ROWS, each)[1] for each in (mirrored(four_devices, 3), None))
    same(found, wanted, 2e-5)
    assert "where replicas can't exchange" not in caplog.text


class Cell(L.Layer):
    state_size = output_size = 3

    def __init__(self):
        super().__init__()
        self.norm = L.BatchNormalization(momentum=0.0, name="norm")

    def build(self, shape):
        self.norm.build(shape)

    def call(self, x, states, training=None):
        found = self.norm(x, training=training) + states[0]
        return found, [found]


def test_in_a_loop_each_replica_normalises_its_own_share_and_it_is_averaged(four_devices, caplog):
    model, _ = trained(lambda: dense(L.RNN(Cell()), shape=(1, 3)), SERIES[:8, :1], mirrored(four_devices), batch=8)
    assert caplog.text.count("norm is called in a branch, a loop or a function") == 1
    statistics = model.layers[0].cell.norm.moving_variance
    np.testing.assert_allclose(statistics, (ROWS[:4].var(0) + ROWS[4:8].var(0)) / 2, rtol=1e-5)


class Recomputed(L.Layer):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = L.Dense(4), L.BatchNormalization()

    def build(self, shape):
        self.dense.build(shape)
        self.norm.build((None, 4))

    def call(self, x):
        return self.norm(keras.ops.tanh(self.dense(x)))


def test_a_recomputed_layer_exchanges_twice(four_devices):
    def build():
        with keras.RematScope(mode="full"):
            return dense(Recomputed())

    found, wanted = trained(build, ROWS, mirrored(four_devices, 3))[1], trained(build, ROWS)[1]
    same(found, wanted, 2e-5)


@pytest.mark.long
def test_a_loss_that_is_differentiated_twice(four_devices):
    def build():
        model = InGradient()
        model(ROWS[:2].astype("float32"))
        return model

    found, wanted = trained(build, ROWS, mirrored(four_devices, 3))[1], trained(build, ROWS)[1]
    same(found, wanted, 2e-5)


class HalfMoments(L.BatchNormalization):
    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean / 2, variance * 2


@pytest.mark.long
def test_moments_of_a_class_of_ones_own_stay(four_devices):
    build = lambda: dense(HalfMoments())  # noqa: E731
    found, wanted = trained(build, ROWS, mirrored(four_devices, 3))[1], trained(build, ROWS)[1]
    same(found, wanted, 2e-5)


def test_a_layer_that_selects_positions_counts_them(four_devices):
    build = lambda: dense(Selecting(), L.Flatten(), shape=(2, 2, 3))  # noqa: E731
    x = PICTURES[:, :2, :2] - 3
    found, wanted = trained(build, x, mirrored(four_devices, 3))[1], trained(build, x)[1]
    same(found, wanted, 2e-5)


def test_in_a_loop_of_ones_own_each_replica_normalises_its_share(four_devices):
    """As TensorFlow's guides have it; evaluation begins with the average of all."""
    strategy = mirrored(four_devices)
    x = ROWS[:8].astype("float32")
    with strategy.scope():
        model = dense(L.BatchNormalization(momentum=0.0))
        model.compile("sgd", "mse")

    def step():
        model(x[: 4 * (1 + tf.distribute.get_replica_context().replica_id_in_sync_group)], training=True)

    strategy.run(step)
    model.evaluate(x, Y[:8], verbose=0)
    means = [x[:4].mean(0), x[:8].mean(0)]
    np.testing.assert_allclose(model.layers[0].moving_mean, np.mean(means, 0), rtol=1e-4, atol=1e-6)


def test_in_local_steps_statistics_are_averaged(four_devices, caplog):
    strategy = mirrored(four_devices, local=LocalSteps(every=2))
    model, _ = trained(lambda: dense(L.BatchNormalization(momentum=0.0)), ROWS[:8], strategy, batch=8)
    np.testing.assert_allclose(model.layers[0].moving_variance, (ROWS[:4].var(0) + ROWS[4:8].var(0)) / 2, rtol=1e-5)
    assert "In local steps each replica normalises its own share" in caplog.text


def test_another_word_is_refused(four_devices):
    with pytest.raises(StrategyError, match=r"batch_statistics='whole'.*batch, replica"):
        mirrored(four_devices, batch_statistics="whole")


ROUNDS = """
import toolkit
from toolkit.strategies import ParameterServerOptions
options = ParameterServerOptions(synchronous=True)
strategy = toolkit.strategies.create("auto", parameter_server=options)
import keras, numpy as np
x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
with strategy.scope():
    norm = keras.layers.BatchNormalization(name="norm")
    model = keras.Sequential([keras.Input((4,)), norm, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=8, epochs=1, verbose=0)
"""


def test_a_round_is_of_one_worker_which_normalises_the_whole_batch(tmp_path):
    (tmp_path / "train.py").write_text(ROUNDS)
    ended = processes.launch(tmp_path, "train.py", tasks=processes.SERVED, limit=150)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    said = ended.stdout + ended.stderr
    assert said.count("can't be divided among workers: norm normalises over the whole batch") == 1
