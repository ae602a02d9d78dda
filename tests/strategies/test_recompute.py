"""Activations computed again: the same numbers as kept ones, whatever a layer has and wherever it trains."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import toolkit
from toolkit.errors import ModelError
from toolkit.parallel import Link, Machine, Setting, choose, choose_within, costs, parallelize
from toolkit.strategies.fit import adapt

L = keras.layers
MACHINE = Machine(speed=1e11, inside=Link(bandwidth=1e10, latency=1e-5))


@keras.saving.register_keras_serializable("tests")
class Block(L.Layer):
    """A transformer's block with all that could differ: seeds, statistics, a mask, no `training` in its call."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.supports_masking = True
        self.attention = L.MultiHeadAttention(2, 8, dropout=0.2)
        self.first, self.second, self.drop = L.LayerNormalization(), L.BatchNormalization(), L.Dropout(0.3)
        self.wide, self.narrow = L.Dense(32, activation="gelu"), L.Dense(16)

    def build(self, shape):
        for layer in (self.first, self.second, self.wide):
            layer.build(shape)
        self.attention.build(shape, shape)
        self.narrow.build((*shape[:-1], 32))
        self.built = True

    def call(self, x):
        x = self.first(x + self.attention(x, x, use_causal_mask=True))
        return self.second(x + self.narrow(self.drop(self.wide(x))))


def network(scope=None):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    with scope or contextlib.nullcontext():
        inputs = keras.Input((8,), dtype="int32")
        x = L.Embedding(20, 16, mask_zero=True)(inputs)
        for number in range(2):
            x = Block(name=f"block{number}")(x)
        return keras.Model(inputs, L.Dense(3, dtype="float32")(L.GlobalAveragePooling1D()(x)))


def trained(model, **compiling):
    random = np.random.default_rng(0)
    x, y = random.integers(0, 20, (64, 8)), random.integers(0, 3, 64)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, **compiling)
    losses = model.fit(x, y, batch_size=16, shuffle=False, epochs=1, verbose=0).history["loss"]
    return losses, model.get_weights()


def same(one, other, tolerance=1e-6):
    assert one[0] == pytest.approx(other[0], rel=tolerance)
    for mine, theirs in zip(one[1], other[1], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=10 * tolerance)


@pytest.fixture(autouse=True)
def installed():
    adapt.adapt_remat()


def test_what_keras_has_for_it_still_fails():
    function = tf.recompute_grad(lambda x, training: x if training else -x)
    with pytest.raises(ValueError, match="keywords"):
        tf.function(lambda x: function(x, training=True))(tf.ones(2))


@pytest.mark.long
@pytest.mark.parametrize(
    "mode",
    [
        {"mode": "list_of_layers", "layer_names": ["block1"]},
        {"mode": "activations"},
        {"mode": "larger_than", "output_size_threshold": 100},
    ],
    ids=lambda mode: mode["mode"],
)
def test_each_mode_of_keras_trains_the_same(mode):
    # With a size, Keras asks layers for their shapes once more, for which seeds go on.
    like = keras.RematScope("larger_than", output_size_threshold=10**9) if "larger" in mode["mode"] else None
    same(trained(network(like)), trained(network(keras.RematScope(**mode))), 1e-5)


def test_it_is_computed_again():
    seen = []

    class Counted(L.Layer):
        def call(self, x):
            seen.append(tf.get_static_value(x) is None and not tf.executing_eagerly())
            return tf.sin(x)

    with keras.RematScope("full"):
        layer = Counted()
    x = tf.Variable([1.0, 2.0])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            y = layer(1.0 * x)
        return tape.gradient(y, x)

    np.testing.assert_allclose(step(), np.cos([1.0, 2.0]), rtol=1e-6)
    assert seen == [True, True]
    kinds = [each.type for each in step.get_concrete_function().graph.get_operations()]
    assert kinds.count("Sin") == 2


@pytest.mark.long
@pytest.mark.parametrize("how", ["mixed_bfloat16", "compiled by XLA", "eagerly"])
def test_it_trains_the_same(how):
    compiling = {"compiled by XLA": {"jit_compile": True}, "eagerly": {"run_eagerly": True}}.get(how, {})
    keras.mixed_precision.set_global_policy("mixed_bfloat16" if how == "mixed_bfloat16" else "float32")
    try:
        one, other = trained(network(), **compiling), trained(network(keras.RematScope("full")), **compiling)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    same(one, other, 1e-2 if how == "mixed_bfloat16" else 1e-5)


@pytest.mark.slow
def test_blocks_train_the_same():
    same(trained(network()), trained(network(keras.RematScope("full"))))


@pytest.mark.slow
def test_losses_that_layers_add_count_once():
    def model(scope):
        keras.utils.set_random_seed(1)
        with scope:
            layers = [
                L.Dense(8, "tanh", activity_regularizer="l2", kernel_regularizer="l2"),
                L.ActivityRegularization(0.1),
            ]
            return keras.Sequential([keras.Input((8,)), *layers, L.Dense(3)])

    # Sums of a regularizer in another order: TensorFlow 2.20 differs by 1.1e-5.
    same(trained(model(contextlib.nullcontext())), trained(model(keras.RematScope("full"))), tolerance=5e-6)


def test_a_function_with_somebody_elses_seed_is_refused():
    drop = L.Dropout(0.5)
    function = keras.remat(lambda x: drop(x, training=True))

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    with pytest.raises(ModelError, match="which isn't its layer's own"):
        step(tf.ones((4, 4)))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("fc", ["replicated", "sharded"])
def test_a_plan_with_it_trains_the_same_on_two_devices(fc):
    setting = Setting(replicas=2, global_batch=16, recompute=True)
    found = []
    for again in (False, True):
        plan = choose(costs(network()), MACHINE, setting, fc=fc)
        assert plan.recomputed >= {"block0", "block1"}
        strategy = toolkit.strategies.create("mirrored", devices=["CPU:0", "CPU:1"])
        if not again:
            plan = choose(costs(network()), MACHINE, Setting(replicas=2, global_batch=16), fc=fc)
            assert not plan.recomputed
        plain = network()
        with strategy.scope():
            found.append(trained(parallelize(plain, plan)))
    same(*found, 1e-5)


def test_memory_is_predicted_and_saved():
    layers = costs(network())
    setting = Setting(replicas=1, global_batch=1, slots=2)
    plain, again = (
        choose(layers, MACHINE, Setting(replicas=1, global_batch=64, recompute=recompute)).step
        for recompute in (False, True)
    )
    assert again.memory < 0.75 * plain.memory
    assert plain.computing < again.computing < 1.5 * plain.computing
    assert not choose_within(layers, MACHINE, setting).setting.recompute
    least = choose(layers, MACHINE, setting).step.memory
    assert choose_within(layers, MACHINE, setting, memory=least - 1).setting.recompute, "one example can't be divided"
