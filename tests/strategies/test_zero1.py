"""Optimizer state of which each replica keeps its part: the numbers of one device, in a fraction of the memory."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import parallel, strategies
from toolkit.errors import StrategyError
from toolkit.strategies.step.sharded_variable import ReplicaShardedVariable

RANDOM = np.random.default_rng(0)
WORDS = RANDOM.integers(0, 11, size=(60, 5))
SERIES = RANDOM.normal(size=(60, 5, 3)).astype("float32")
LABELS = RANDOM.integers(0, 3, size=60)
OPTIMIZERS = {
    name: lambda name=name: getattr(keras.optimizers, name)(0.01)
    for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop")
} | {
    "SGD without slots": lambda: keras.optimizers.SGD(0.05),
    "SGD, Nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "AdamW, clipped, averaged": lambda: keras.optimizers.AdamW(
        0.01, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=2
    ),
    "Adam, each clipped": lambda: keras.optimizers.Adam(0.01, clipnorm=0.02),
    "Adam, cut": lambda: keras.optimizers.Adam(0.01, clipvalue=0.001),
    "Adam, accumulating, decaying": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2, weight_decay=0.01, global_clipnorm=0.5
    ),
}


def network(sharded=False):
    """Sizes that no number of replicas divides, a table that is looked up, and one that is for positions."""
    words, series = keras.Input((5,), dtype="int32"), keras.Input((5, 3))
    dense = parallel.ShardedDense if sharded else keras.layers.Dense
    x = keras.layers.Embedding(11, 3)(words) + keras.layers.Conv1D(3, 3, padding="same")(series)
    x = keras.layers.Dense(7, activation="relu", kernel_constraint="max_norm")(keras.layers.Flatten()(x))
    return keras.Model([words, series], keras.layers.Dense(3)(dense(6, activation="tanh", kernel_regularizer="l2")(x)))


def trained(strategy, optimizer, *, sharded=False, dtype="float32"):
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(dtype)
    with strategy.scope():
        model = network(sharded)
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    keras.config.set_dtype_policy("float32")
    model.fit([WORDS, SERIES], LABELS, batch_size=22, epochs=3, shuffle=False, verbose=0)
    return model


def wholes(model):
    return [np.asarray(keras.ops.convert_to_numpy(v)) for v in (*model.weights, *model.optimizer.variables)]


def same(model, other, tolerance=3e-6):
    for variable, mine, theirs in zip(
        model.weights + model.optimizer.variables, wholes(model), wholes(other), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, atol=tolerance, rtol=1e-5, err_msg=variable.path)


_ALONE = {}


def alone(name):
    if name not in _ALONE:
        _ALONE[name] = trained(tf.distribute.get_strategy(), OPTIMIZERS[name])
    return _ALONE[name]


def create(devices, **more):
    return strategies.create("mirrored", devices=devices, optimizer_state="sharded", **more)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_that_looks_at_elements_does_what_it_does_on_one_device(four_devices, name):
    # Lion's step is a sign and Ftrl's and Adadelta's a quotient: there rounding weighs more.
    same(trained(create(four_devices), OPTIMIZERS[name]), alone(name), 3e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("Adam, each clipped", marks=pytest.mark.long), "AdamW, clipped, averaged"]
)
def test_it_goes_with_sharded_layers_in_groups(four_devices, name):
    same(trained(create(four_devices, shards=2), OPTIMIZERS[name], sharded=True), alone(name), 3e-5)


@pytest.mark.slow
@pytest.mark.long
def test_a_loss_scale_is_agreed_on(four_devices):
    def scaled():
        return keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=2.0**124, dynamic_growth_steps=2
        )

    one = trained(tf.distribute.get_strategy(), scaled)
    many = trained(create(four_devices), scaled)
    same(many, one, 3e-5)
    assert 0 < int(many.optimizer.iterations.numpy()) < 9  # Some have overflowed, and were left out by all.


@pytest.mark.smoke
@pytest.mark.slow
def test_each_replica_keeps_its_part_only(four_devices):
    model = trained(create(four_devices), OPTIMIZERS["Adam"])
    slots = [v for v in model.optimizer.variables if isinstance(v, ReplicaShardedVariable)]
    cut = [v for v in model.trainable_variables if v.name != "embeddings"]  # Of a table, a step has rows only.
    elements = sum(int(np.prod(v.shape)) for v in cut)
    assert sum(int(np.prod(slot.shard_shape)) for slot in slots) <= 2 * (elements / 4 + len(cut))
    assert len(slots) == 2 * len(cut) == 2 * (len(model.trainable_variables) - 1)
    for variable in model.trainable_variables:  # And all have the same weights.
        copies = [copy.numpy() for copy in variable.value.values]
        assert all(np.array_equal(copy, copies[0]) for copy in copies)


@pytest.mark.slow
@pytest.mark.long
def test_a_saved_model_goes_on_with_its_state_elsewhere(four_devices, tmp_path):
    model = trained(create(four_devices), OPTIMIZERS["Adam"])
    model.save(tmp_path / "it.keras")
    for strategy in (create(four_devices[:3]), strategies.create("one_device", devices=four_devices[:1])):
        with strategy.scope():
            again = keras.models.load_model(tmp_path / "it.keras")
        for mine, theirs in zip(wholes(model), wholes(again), strict=True):
            assert np.array_equal(mine, theirs)


@pytest.mark.long
def test_a_gradient_may_have_a_shape_that_is_not_known(four_devices):
    """As of a layer that is applied to each word of a sentence, in sentences of any length."""

    def trained_on_words(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [keras.Input((None,), dtype="int32"), keras.layers.Embedding(11, 3), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            model.compile(keras.optimizers.Adam(0.01, epsilon=0.1), "mse")
        model.fit(WORDS, WORDS[..., None] / 11.0, batch_size=22, epochs=1, shuffle=False, verbose=0)
        return model

    same(trained_on_words(create(four_devices[:2])), trained_on_words(tf.distribute.get_strategy()))


@pytest.mark.slow
def test_an_optimizer_of_whole_layers_is_refused(four_devices):
    with pytest.raises(StrategyError, match="optimizer_state='sharded' with Lamb.*such as AdamW"):
        trained(create(four_devices[:2]), lambda: keras.optimizers.Lamb(0.01))


class Lars(keras.optimizers.SGD):
    """Its steps are as long as a whole layer's weights say."""

    def update_step(self, gradient, variable, learning_rate):
        norm, slope = (tf.norm(tf.convert_to_tensor(each)) for each in (variable, gradient))
        super().update_step(gradient * norm / (slope + 1e-6), variable, learning_rate)


class Negated(keras.optimizers.SGD):
    elementwise = True

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(-gradient, variable, -learning_rate)


class Renamed(keras.optimizers.Adam):
    def __init__(self, rate):
        super().__init__(rate)


@pytest.mark.slow
def test_an_optimizer_of_the_users_own_is_refused_unless_it_says_that_it_is_elementwise(four_devices):
    with pytest.raises(StrategyError, match="with Lars.*elementwise = True"):
        trained(create(four_devices[:2]), lambda: Lars(0.01, momentum=0.9))
    own = trained(create(four_devices[:2]), lambda: Negated(0.05, momentum=0.9))
    same(own, trained(tf.distribute.get_strategy(), lambda: keras.optimizers.SGD(0.05, momentum=0.9)))
    trained(create(four_devices[:2]), lambda: Renamed(0.01))


def test_there_are_two_ways(four_devices):
    with pytest.raises(StrategyError, match="Choose one of replicated, sharded"):
        strategies.create("mirrored", devices=four_devices, optimizer_state="zero")


@pytest.mark.parametrize("layer", [keras.layers.Dense, parallel.ShardedDense])
def test_a_loop_of_the_users_own_may_be_the_first_to_use_an_optimizer(four_devices, layer):
    def weights_after(strategy, kind):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), kind(5, activation="relu"), keras.layers.Dense(2)])
            optimizer = keras.optimizers.Adam(0.01)

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(x, training=True) - 1.0) ** 2) / 16
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        run = tf.function(lambda x: strategy.run(step, (x,)))
        data = tf.data.Dataset.from_tensor_slices(SERIES[:32, :2].reshape(32, 6)).batch(16)
        for x in strategy.experimental_distribute_dataset(data):
            run(x)
        return model.get_weights()

    one = weights_after(tf.distribute.get_strategy(), keras.layers.Dense)
    for mine, theirs in zip(weights_after(create(four_devices[:2]), layer), one, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("way", [{"optimizer_state": "sharded"}, {"weights": "sharded"}], ids=["slots", "weights"])
def test_an_overflow_in_one_replicas_part_is_all_replicas(four_devices, way):
    """The gradients of one feature overflow, and one replica has their part: no part of the step is made."""
    x, y = np.ones((8, 64), "float32"), np.ones((8, 64), "float32")
    x[:, 63] = 1e30  # The last replica has the part; Keras asks the first one.
    keras.utils.set_random_seed(1)
    with strategies.create("mirrored", devices=four_devices[:2], **way).scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, use_bias=False)])
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=2.0**40)
        model.compile(scaled, lambda y_true, y_pred: y_true * y_pred)
    before = model.get_weights()
    model.fit(x, y, batch_size=8, verbose=0)
    assert all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))
    assert float(scaled.dynamic_scale) == 2.0**39
    model.fit(np.ones_like(x), y, batch_size=8, verbose=0)
    assert not any(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))
