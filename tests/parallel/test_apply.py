"""A plan put on a model, trained under a strategy, and taken off again."""

import dataclasses

import keras
import numpy as np
import pytest

from toolkit import strategies
from toolkit.errors import ModelError
from toolkit.parallel import (
    Choice,
    Link,
    Machine,
    Setting,
    ShardedConv2D,
    ShardedDense,
    choose,
    costs,
    parallelize,
    plain,
)
from toolkit.strategies.step.sharded_variable import ReplicaShardedVariable

L = keras.layers
MACHINE = Machine(name="any", speed=1e12, inside=Link(bandwidth=1e9))


def functional():
    """Two branches, a model within, dropout that draws nothing."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((8, 8, 3))
    x = L.Conv2D(6, 3, activation="relu", name="conv")(inputs)
    x = L.Flatten()(x)
    head = keras.Sequential(
        [keras.Input((216,)), L.Dense(20, activation="relu", name="a"), L.Dropout(0.0), L.Dense(7, name="b")],
        name="head",
    )
    return keras.Model(inputs, L.Add()([head(x), L.Dense(7, name="side", kernel_regularizer="l2")(x)]))


def planned(model, replicas, **ways):
    return choose(costs(model), MACHINE, Setting(replicas=replicas, global_batch=4 * replicas), **ways)


def trained(model, x, y):
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"]


@pytest.mark.slow
def test_a_parallel_model_trains_as_the_plain_one_and_comes_back_plain(four_devices, tmp_path):
    random = np.random.default_rng(0)
    x, y = random.random((16, 8, 8, 3), np.float32), random.random((16, 7), np.float32)
    reference = functional()
    start = [weight.copy() for weight in reference.get_weights()]
    plan = planned(reference, 4, conv="sharded", fc="sharded")
    pair = {
        "head/a": Choice(split="outputs", keep_split=True),
        "head/b": Choice(split="inputs", comes_split=True),
    }
    plan = dataclasses.replace(plan, choices={**plan.choices, **pair})
    strategy = strategies.create("mirrored", devices=four_devices)
    with strategy.scope():
        model = parallelize(reference, plan)
        losses_of_4 = trained(model, x, y)
    kinds = {type(layer) for layer in [*model.layers, *model.get_layer("head").layers]}
    assert {ShardedConv2D, ShardedDense} <= kinds
    assert isinstance(model.get_layer("head").get_layer("a").kernel, ReplicaShardedVariable)
    assert model.get_layer("head").get_layer("a").keep_split
    # The one it was made of is as it was.
    assert all(np.array_equal(mine, was) for mine, was in zip(reference.get_weights(), start, strict=True))
    assert trained(reference, x, y) == pytest.approx(losses_of_4, rel=1e-5)

    back = plain(model)
    assert not any(isinstance(layer, (ShardedConv2D, ShardedDense)) for layer in back.layers)
    for mine, theirs in zip(back.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    back.save(tmp_path / "plain.keras")
    again = keras.models.load_model(tmp_path / "plain.keras")
    np.testing.assert_allclose(again.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-5)


def test_what_a_plan_replicates_stays_keras_own(four_devices, caplog):
    model = functional()
    with strategies.create("mirrored", devices=four_devices[:2]).scope():
        copy = parallelize(model, planned(model, 2, conv="replicated", fc="replicated"))
    assert type(copy.get_layer("conv")) is L.Conv2D
    assert type(copy.get_layer("side")) is L.Dense
    assert "The plan shards no layer" in caplog.text


def test_another_models_plan_is_refused():
    plan = planned(functional(), 2)
    with pytest.raises(ModelError, match="the plan has a layer 'conv' and the model hasn't"):
        parallelize(keras.Sequential([keras.Input((3,)), L.Dense(2)]), plan)


class Closed(L.Layer):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def call(self, x):
        return x


def test_a_layer_without_a_configuration_is_said():
    model = keras.Sequential([keras.Input((3,)), Closed(3), L.Dense(4)])
    with pytest.raises(ModelError, match="get_config"):
        parallelize(model, planned(model, 2))
