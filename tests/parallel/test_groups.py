"""Sharded layers of which several groups of replicas have a copy each: the numbers of plain layers on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import test_layers

from toolkit import strategies
from toolkit.errors import StrategyError
from toolkit.parallel import ShardedDense
from toolkit.strategies.fit import equality

pytestmark = pytest.mark.slow


@pytest.fixture
def mesh(four_devices):
    return strategies.create("mirrored", devices=four_devices, shards=2)


def test_a_loop_of_the_users_own_adds_up_over_groups(mesh):
    """As TensorFlow's guides have it: a loss divided by the global batch, gradients summed."""

    def weights_after(strategy):
        keras.utils.set_random_seed(2)
        with strategy.scope():
            model = test_layers.network(**test_layers.PAIR)
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / 24 + tf.add_n(model.losses) / count
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        count = strategy.num_replicas_in_sync
        data = tf.data.Dataset.from_tensor_slices((test_layers.X[:48], test_layers.Y[:48])).batch(24)
        run = tf.function(lambda batch: strategy.run(step, batch))
        for batch in strategy.experimental_distribute_dataset(data):
            run(batch)
        return [weight.numpy() for weight in model.weights]

    test_layers.same(weights_after(mesh), weights_after(tf.distribute.get_strategy()))


@pytest.mark.long
def test_a_model_goes_on_at_another_mesh(mesh, four_devices, tmp_path):
    keras.utils.set_random_seed(3)
    with mesh.scope():
        model = test_layers.network(**test_layers.PAIR)
        model.compile("adam", "mse")
    model.fit(test_layers.X[:48], test_layers.Y[:48], batch_size=24, verbose=0)
    model.save(tmp_path / "m.keras")
    with strategies.create("mirrored", devices=four_devices).scope():
        other = keras.models.load_model(tmp_path / "m.keras")
    for first, second in zip(
        [*model.variables, *model.optimizer.variables], [*other.variables, *other.optimizer.variables], strict=True
    ):
        assert np.array_equal(np.asarray(first.numpy()), np.asarray(second.numpy())), first.path


def test_a_group_that_holds_other_weights_is_found(mesh):
    with mesh.scope():
        model = test_layers.network(**test_layers.PAIR)
        model.compile("sgd", "mse")
    equality.check_equal_weights(model)
    model.weights[2].shards[3].assign_add(tf.ones(model.weights[2].shard_shape))
    with pytest.raises(StrategyError, match=f"different values of {model.weights[2].path}"):
        equality.check_equal_weights(model)


def test_of_shards_of_one_nothing_is_sharded(four_devices):
    with strategies.create("mirrored", devices=four_devices[:2], shards=1).scope():
        layer = ShardedDense(3)
        layer.build((None, 8))
    assert tuple(layer.kernel.value.shape) == (8, 3)
