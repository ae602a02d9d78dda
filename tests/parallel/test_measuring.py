"""What is measured: not how fast, but that it is there, and that it is a sum of what it should be."""

import math

import keras
import pytest

from toolkit import strategies
from toolkit.parallel import measure
from toolkit.parallel.graph import layers_of

L = keras.layers


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_layer_and_what_joins_replicas(four_devices, replicas):
    strategy = strategies.create("auto", devices=four_devices[:replicas])
    inputs = keras.Input((16, 16, 3))
    x = L.BatchNormalization(synchronized=True)(L.Conv2D(8, 3)(inputs))
    model = keras.Model(
        inputs,
        L.Dense(5, name="fc")(
            L.Lambda(lambda x: keras.ops.matmul(x, keras.ops.ones((1568, 3000))), name="mine")(
                L.Flatten(name="flat")(x)
            )
        ),
    )
    before = model.get_weights()
    found = measure(model, strategy, batch=4, optimizer=keras.optimizers.Adam(), slots=2)
    assert set(found.seconds) == {name for name, _ in layers_of(model)}
    assert all(seconds >= 0 for seconds in found.seconds.values())
    assert found.seconds["mine"] > 0, "what isn't known by formula is known by its time"
    assert found.seconds["flat"] == 0
    assert 1e5 < found.memory < 1e13
    assert found.fixed > 0
    assert math.isfinite(found.inside.bandwidth) == (replicas > 1)
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))
