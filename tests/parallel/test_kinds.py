"""Plans put on models whose layers are made within layers, and joined in Python."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import ModelError
from toolkit.parallel import (
    Link,
    Machine,
    Setting,
    ShardedDense,
    ShardedEmbedding,
    ShardedMultiHeadAttention,
    choose,
    costs,
    parallelize,
    plain,
)
from toolkit.parallel.graph import sublayers

L = keras.layers
MACHINE = Machine(name="any", speed=1e12, inside=Link(bandwidth=1e9))


class Block(L.Layer):
    """As in Keras's examples: layers made in the constructor, one within a Sequential."""

    def __init__(self, features, **kwargs):
        super().__init__(**kwargs)
        self.features = features
        self.attention = L.MultiHeadAttention(4, features // 4)
        self.forward = keras.Sequential([L.Dense(24, activation="gelu", name="up"), L.Dense(features, name="down")])
        self.norms = [L.LayerNormalization(), L.LayerNormalization()]

    def call(self, x):
        x = self.norms[0](x + self.attention(x, x, use_causal_mask=True))
        return self.norms[1](x + self.forward(x))

    def get_config(self):
        return {**super().get_config(), "features": self.features}


class BuiltBlock(L.Layer):
    """As in KerasHub: layers made and built in build()."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, shape):
        self._up = L.Dense(self.units, activation="relu", name="up")
        self._up.build(shape)
        self._drop = L.Dropout(0.0)
        self._down = L.Dense(shape[-1], name="down")
        self._down.build((*shape[:-1], self.units))
        self.built = True

    def call(self, x):
        return x + self._down(self._drop(self._up(x)))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class Words(L.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.words, self.places = L.Embedding(20, 16, name="words"), L.Embedding(8, 16, name="places")

    def call(self, x):
        return self.words(x) + self.places(keras.ops.arange(8))


class Subclassed(keras.Model):
    def __init__(self, blocks, **kwargs):
        super().__init__(**kwargs)
        self.words = Words(name="words")
        self.blocks = [Block(16, name=f"block{n}") for n in range(blocks)]
        self.built_block = BuiltBlock(24, name="built")
        self.head = L.Dense(3, name="head")
        self.number = blocks

    def call(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(keras.ops.mean(self.built_block(x), axis=1))

    def get_config(self):
        return {**super().get_config(), "blocks": self.number}


def functional():
    inputs = keras.Input((8,), dtype="int32")
    x = Words(name="words")(inputs)
    for n in range(2):
        x = Block(16, name=f"block{n}")(x)
    x = BuiltBlock(24, name="built")(x)
    return keras.Model(inputs, L.Dense(3, name="head")(L.GlobalAveragePooling1D()(x)))


def subclassed():
    model = Subclassed(2)
    model(tf.zeros([1, 8], tf.int32))
    return model


def trained(model, x, y):
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(functional, marks=pytest.mark.long), subclassed])
def test_layers_within_layers_train_sharded_as_they_do_plain(four_devices, kind):
    random = np.random.default_rng(0)
    x, y = random.integers(0, 20, (16, 8)), random.random((16, 3), np.float32)
    keras.utils.set_random_seed(3)
    reference = kind()
    plan = choose(costs(reference), MACHINE, Setting(replicas=2, global_batch=8), fc="sharded")
    pairs = [name for name, choice in plan.choices.items() if choice.keep_split]
    assert [(name.split("/")[0], name.split("/")[-1]) for name in pairs] == [
        ("block0", "up"),
        ("block1", "up"),
        ("built", "up"),
    ]
    strategy = strategies.create("mirrored", devices=four_devices[:2])
    with strategy.scope():
        model = parallelize(reference, plan)
    kinds = [type(layer) for layer in sublayers(model)]
    assert kinds.count(ShardedMultiHeadAttention) == 2
    assert kinds.count(ShardedDense) == 7
    assert kinds.count(ShardedEmbedding) == 2
    assert type(model) is type(reference)
    with strategy.scope():
        losses = trained(model, x, y)
    assert trained(reference, x, y) == pytest.approx(losses, rel=1e-5)
    back = plain(model)
    assert not any(type(layer).__module__.startswith("toolkit.") for layer in sublayers(back))
    np.testing.assert_allclose(back.predict(x, verbose=0), reference.predict(x, verbose=0), atol=1e-5)
    np.testing.assert_allclose(model.predict(x, verbose=0), reference.predict(x, verbose=0), atol=1e-5)
    assert type(L.Dense(3)) is L.Dense, "what is made afterwards is Keras's own"


class Changing(L.Layer):
    """Makes other layers each time."""

    made = 0

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        Changing.made += 1
        self.parts = [L.Dense(8) for _ in range(Changing.made)]

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


def test_layers_that_are_not_made_again_are_said(four_devices):
    model = keras.Sequential([keras.Input((4,)), Changing(name="outer"), L.Dense(8)])
    plan = choose(costs(model), MACHINE, Setting(replicas=4, global_batch=8), fc="sharded")
    says = pytest.raises(ModelError, match="within 'outer' .* doesn't give the same inner layers")
    with strategies.create("mirrored", devices=four_devices).scope(), says:
        parallelize(model, plan)


class Forgetful(L.Layer):
    def __init__(self, units, rate, **kwargs):
        super().__init__(**kwargs)
        self.units, self.rate = units, rate
        self.dense = L.Dense(units)

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def test_what_a_configuration_lacks_is_named_with_the_line_to_add(four_devices):
    model = keras.Sequential([keras.Input((4,)), Forgetful(8, 0.1, name="outer"), L.Dense(8)])
    plan = choose(costs(model), MACHINE, Setting(replicas=4, global_batch=8), fc="sharded")
    line = r'lacks rate, .*\{\*\*super\(\)\.get_config\(\), "rate": self\.rate\}'
    with strategies.create("mirrored", devices=four_devices).scope(), pytest.raises(ModelError, match=line):
        parallelize(model, plan)


def test_a_layer_that_is_shared_stays_replicated(four_devices):
    inputs = keras.Input((8,))
    shared = L.Dense(8, name="shared")
    model = keras.Model(inputs, L.Dense(4, name="last")(shared(shared(inputs))))
    plan = choose(costs(model), MACHINE, Setting(replicas=4, global_batch=8), fc="sharded")
    assert "several times" in plan.reasons["shared"]
    with strategies.create("mirrored", devices=four_devices).scope():
        made = parallelize(model, plan)
    assert type(made.get_layer("shared")) is L.Dense
    assert type(made.get_layer("last")) is ShardedDense
