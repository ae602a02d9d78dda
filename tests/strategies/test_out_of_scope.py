"""What users do outside of steps and of a strategy's scope gives one device's answers."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies

X = np.random.default_rng(0).normal(size=(54, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, use_ema=True),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9))
        ),
        lambda: "adam",
    ],
    ids=["accumulating", "scaled", "by its name"],
)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.slow
def test_any_optimizer_may_be_made_before_the_scope(four_devices, make, count):
    optimizer = make()
    with strategies.create("mirrored", devices=four_devices[:count]).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    assert np.isfinite(model.fit(X, Y, batch_size=18, verbose=0).history["loss"]).all()


@pytest.mark.parametrize("rows", [8, 11, 1])
def test_a_single_batch_is_predicted_once(four_devices, rows):
    with strategies.create("mirrored", devices=four_devices[:2]).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    np.testing.assert_allclose(model.predict_on_batch(X[:rows]), model(X[:rows]), atol=1e-6)


class Kept(keras.optimizers.SGD):
    def __init__(self, rate):
        super().__init__(rate)

    def get_config(self):
        return {"name": self.name}


def test_an_optimizer_that_no_config_makes_again_stays_the_object_it_is(four_devices):
    optimizer = Kept(0.1)
    strategy = strategies.create("mirrored", devices=four_devices[:2])
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(optimizer, "mse")
    assert model.optimizer is optimizer
    assert all(strategy.extended.variable_created_in_scope(each.value) for each in optimizer.variables)
    assert float(optimizer.learning_rate) == pytest.approx(0.1)


def test_replicas_draw_for_themselves(four_devices):
    strategy = strategies.create("mirrored", devices=four_devices[:2])
    with strategy.scope():
        seed = keras.random.SeedGenerator(1)

    @tf.function
    def drawn():
        return strategy.run(lambda: keras.random.normal((3,), seed=seed))

    one, other = (draw.numpy() for draw in strategy.experimental_local_results(drawn()))
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal(one, keras.random.normal((3,), seed=keras.random.SeedGenerator(1)))


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("where", ["outside", "built in the scope", "in the scope"])
@pytest.mark.parametrize("made", ["in", "before"])
def test_a_loop_without_replicas_trains_as_on_one_device(four_devices, where, traced, made):
    """Reinforcement learning updates a network by single episodes, without `strategy.run`."""

    def trained(strategy, where):
        keras.utils.set_random_seed(1)
        optimizer = keras.optimizers.Nadam(0.01)  # It has a variable that is no slot.
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)])
            if made == "in":
                optimizer = keras.optimizers.Nadam(0.01)
            if where == "built in the scope":
                optimizer.build(model.trainable_variables)

        def update(states):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.nn.log_softmax(model(states))[:, 0] ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        step = tf.function(update) if traced else update
        with strategy.scope() if where == "in the scope" else contextlib.nullcontext():
            losses = [float(step(X[first : first + 7])) for first in range(0, 28, 7)]
        kept = [strategy.experimental_local_results(each.value) for each in [*model.variables, *optimizer.variables]]
        return losses, [[copy.numpy() for copy in copies] for copies in kept]

    one, own = trained(tf.distribute.get_strategy(), "outside")
    losses, copies = trained(strategies.create("mirrored", devices=four_devices[:2]), where)
    np.testing.assert_allclose(losses, one, rtol=1e-6)
    for (mine,), theirs in zip(own, copies, strict=True):
        assert len(theirs) == 2
        np.testing.assert_allclose(theirs, [mine, mine], atol=1e-6)


@pytest.mark.parametrize("kind", ["adds up", "scales"])
@pytest.mark.parametrize("made", ["in", "before"])
def test_an_optimizer_that_is_built_by_hand_has_one_devices_variables(four_devices, kind, made):
    def make():
        if kind == "scales":
            return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1, use_ema=True))
        return keras.optimizers.Adam(0.1, gradient_accumulation_steps=2)

    def names(strategy):
        optimizer = make()
        with strategy.scope():
            dense = keras.layers.Dense(2, name="dense")
            dense.build((None, 3))
            if made == "in":
                optimizer = make()
            optimizer.build(dense.trainable_variables)
        here = [strategy.experimental_local_results(each.value) for each in optimizer.variables]
        assert {len(copies) for copies in here} == {strategy.num_replicas_in_sync}
        return [each.path.partition("/")[2] for each in optimizer.variables]

    alone = names(tf.distribute.get_strategy())
    assert names(strategies.create("mirrored", devices=four_devices[:2])) == alone


def test_what_is_trained_and_made_outside_is_built_with_its_optimizer(four_devices):
    dense, optimizer = keras.layers.Dense(2), keras.optimizers.Adam(0.1)
    dense.build((None, 3))
    before = dense.kernel.numpy()
    strategy = strategies.create("mirrored", devices=four_devices[:2])
    with strategy.scope():
        optimizer.build(dense.trainable_variables)
    for copy in strategy.experimental_local_results(dense.kernel.value):
        np.testing.assert_array_equal(copy.numpy(), before)
    assert len(strategy.experimental_local_results(dense.kernel.value)) == 2
