"""Gradients are the whole batch's where a step first sees them; what is still to be exchanged the graph tells."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import parallel, strategies
from toolkit.errors import StrategyError
from toolkit.strategies.step import exchanges
from toolkit.strategies.step.gradients import Sum
from toolkit.support.graphs import Differs, derives_from, differs

X = np.random.default_rng(0).normal(size=(23, 6)).astype("float32")
Y = np.tanh(X.sum(axis=1, keepdims=True))


def fitted(strategy, kind, *, epochs=3, dense=keras.layers.Dense, **compiling):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        given = keras.Input((6,))
        model = kind(given, keras.layers.Dense(1)(dense(8)(given)))
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", **compiling)
    model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return np.concatenate([np.ravel(keras.ops.convert_to_numpy(each)) for each in model.trainable_variables])


class Step(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.use(tape, loss)
        return {"error": loss}

    def put(self, gradients):
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))


class Late(Step):
    """Asks for gradients in a branch."""

    def use(self, tape, loss):
        def apply():
            with tf.GradientTape() as inner:
                value = tf.reduce_mean(self(tf.ones((2, 6))) ** 2)
            self.put(inner.gradient(value, self.trainable_variables))
            return 0

        tf.cond(tf.convert_to_tensor(self.optimizer.iterations) < 100, apply, lambda: 0)


class ByLoss(Step):
    """In a branch, by the loss."""

    def use(self, tape, loss):
        gradients = tape.gradient(loss, self.trainable_variables)

        def apply():
            self.put([each * loss for each in gradients])
            return 0

        tf.cond(tf.convert_to_tensor(self.optimizer.iterations) < 100, apply, lambda: 0)


class Spikes(Step):
    """Leaves a step out by its loss."""

    def use(self, tape, loss):
        gradients = tape.gradient(loss, self.trainable_variables)

        def apply():
            self.put(gradients)
            return 0

        tf.cond(loss < 7.0, apply, lambda: 0)


class Polyak(Step):
    def use(self, tape, loss):
        self.optimizer.learning_rate.assign(0.01 * loss)
        self.put(tape.gradient(loss, self.trainable_variables))


class Rated(Step):
    """Sets its rate by what all have."""

    def use(self, tape, loss):
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.learning_rate.assign(0.05 / (1 + tf.linalg.global_norm(gradients)))
        self.put(gradients)


class Clips(Step):
    def use(self, tape, loss):
        self.put(tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.2)[0])


@pytest.mark.parametrize("kind", [Late, ByLoss, Spikes, Polyak, Rated])
@pytest.mark.slow
def test_branches_and_rates_are_decided_by_the_whole_batch(four_devices, kind):
    two = strategies.create("mirrored", devices=four_devices[:2])
    one = fitted(strategies.create("one_device", devices=four_devices[:1]), kind)
    np.testing.assert_allclose(fitted(two, kind), one, atol=1e-6)


@pytest.mark.slow
def test_a_norm_over_parts_of_gradients_is_refused(four_devices):
    with pytest.raises(StrategyError, match="computed from those of sharded layers.*global_clipnorm"):
        fitted(strategies.create("mirrored", devices=four_devices[:2]), Clips, dense=parallel.ShardedDense)


@pytest.mark.parametrize("options", [{"optimizer_state": "sharded"}, {"gradients": None}, {"devices": 4}])
@pytest.mark.slow
def test_a_clip_with_other_options(four_devices, options):
    devices = four_devices[: options.pop("devices", 2)]
    one = fitted(strategies.create("one_device", devices=four_devices[:1]), Clips)
    np.testing.assert_allclose(fitted(strategies.create("mirrored", devices=devices, **options), Clips), one, atol=1e-6)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.slow
def test_a_loop_asks_for_the_batchs_gradients(four_devices, noisy):
    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(x) - y) ** 2) / 8
            variables = model.trainable_variables
            gradients = strategies.batch_gradients(tape.gradient(loss, variables), variables)
            gradients, norm = tf.clip_by_global_norm(gradients, 0.2)
            if noisy:
                gradients = [each + 0.01 * tf.random.normal(each.shape, seed=3) for each in gradients]
            optimizer.apply(gradients, variables)
            return norm

        run = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
        data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(8))
        norms = [float(strategy.experimental_local_results(run(*batch))[0]) for _ in range(2) for batch in data]
        return norms, np.concatenate([each.ravel() for each in model.get_weights()])

    (norms, one), (mine, two) = (
        trained(strategies.create(kind, devices=four_devices[:count]))
        for kind, count in (("one_device", 1), ("mirrored", 2))
    )
    np.testing.assert_allclose(mine, norms, rtol=1e-5)
    np.testing.assert_allclose(two, one, atol=1e-6)


def test_how_tensors_differ():
    variable = tf.Variable(2.0)
    seen = {}

    @tf.function
    def step(given):
        gradient, other = tf.identity(given, "gradient"), tf.identity(given, "other")
        seen["alike"] = differs([gradient * 2 + variable], [gradient])
        seen["by data"] = differs([gradient + other], [gradient])
        seen["by draws"] = differs([gradient + tf.random.normal(())], [gradient])
        seed = tf.constant([1, 2])
        seen["by a seed"] = differs([gradient + tf.random.stateless_normal((), seed)], [gradient], [seed])
        seen["by all one seed"] = differs([tf.random.stateless_normal((), seed)])
        seen["by a branch"] = differs([tf.cond(other > 0, lambda: gradient, lambda: gradient)], [gradient])
        seen["derived"] = derives_from(tf.sqrt(gradient), [gradient]), derives_from(other, [gradient])

        def inside():
            seen["captured"] = differs([gradient * 3], [gradient]), derives_from(gradient * 3, [gradient])
            return gradient

        tf.cond(other > 0, inside, lambda: gradient)
        variable.assign(other)
        seen["a variable that was set"] = differs([tf.convert_to_tensor(variable)])

    step(tf.constant(1.0))
    assert seen == {
        "alike": Differs.NOWHERE,
        "by data": Differs.BY_DATA,
        "by draws": Differs.BY_DRAWS,
        "by a seed": Differs.BY_DRAWS,
        "by all one seed": Differs.NOWHERE,
        "by a branch": Differs.BY_DATA,
        "derived": (True, False),
        "captured": (Differs.NOWHERE, True),
        "a variable that was set": Differs.BY_DATA,
    }


def test_a_replicas_own_number_of_rows_differs_and_other_sizes_are_alike():
    seen = {}

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(rows):
        seen["rows"] = differs([tf.zeros(tf.shape(rows)[:1])])
        seen["rows of what is alike"] = differs([tf.zeros(tf.shape(rows)[:1])], [rows])
        seen["rows, moved"] = differs([tf.zeros(tf.shape(tf.transpose(rows))[1])])
        seen["elements"] = differs([tf.size(rows)])
        seen["width"] = differs([tf.zeros(tf.shape(rows)[1])])
        seen["widths"] = differs([tf.zeros(tf.shape(rows)[1:])])
        seen["rank"] = differs([tf.rank(rows)])

    step(tf.ones([2, 3]))
    by_data = ("rows", "rows, moved", "elements")
    assert seen == {name: Differs.BY_DATA if name in by_data else Differs.NOWHERE for name in seen}


class OfNoExchange(Step):
    """Gives a weight a gradient that comes from nothing that replicas have exchanged, and that differs between them."""

    def use(self, tape, loss):
        *gradients, last = tape.gradient(loss, self.trainable_variables)
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        number = tf.get_static_value(tf.convert_to_tensor(number))
        self.put([*gradients, tf.fill(last.shape, float(number))])


@pytest.mark.slow
def test_a_gradient_that_comes_from_no_exchange_is_exchanged(four_devices):
    strategy = strategies.create("mirrored", devices=four_devices[:2])
    keras.utils.set_random_seed(1)
    with strategy.scope():
        given = keras.Input((6,))
        model = OfNoExchange(given, keras.layers.Dense(1)(keras.layers.Dense(8)(given)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(X, Y, batch_size=23, shuffle=False, verbose=0)
    first, second = strategy.experimental_local_results(model.trainable_variables[-1].value)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, [-0.1 * 11 / 23], rtol=1e-6)  # Of the second replica's share.


@pytest.mark.slow
def test_a_gradient_that_no_exchange_takes_is_refused_by_its_variable(four_devices, monkeypatch):
    monkeypatch.setattr(exchanges, "EXCHANGES", tuple(each for each in exchanges.EXCHANGES if each is not Sum))
    with pytest.raises(StrategyError, match="gradient of dense_?[0-9]*/bias .*none of Shards takes it"):
        fitted(strategies.create("mirrored", devices=four_devices[:2]), keras.Model)
