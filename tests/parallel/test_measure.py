"""What is measured: not how fast, but that it is there, and that it is a sum of what it should be."""

import math
import types

import keras
import pytest

from toolkit import strategies
from toolkit.parallel import measure
from toolkit.parallel.graph import layers_of
from toolkit.parallel.plan import measure as measuring

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
    found = measure(
        model, strategy, global_batch=4 * strategy.num_replicas_in_sync, optimizer=keras.optimizers.Adam(), slots=2
    )
    assert set(found.seconds) == {name for name, _ in layers_of(model)}
    assert all(seconds >= 0 for seconds in found.seconds.values())
    assert found.seconds["mine"] > 0, "what isn't known by formula is known by its time"
    assert found.seconds["flat"] == 0
    assert 1e5 < found.memory < 1e13
    assert found.fixed > 0
    assert math.isfinite(found.inside.bandwidth) == (replicas > 1)
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float16", 2)])
def test_gradients_have_the_bytes_that_they_are_sent_in(four_devices, dtype, size):
    exchange = strategies.GradientExchange(dtype=dtype)
    took = iter([0.01, 0.03, 0.5, 0.9, 0.002, 2.002])  # Little, much; computing alone, and in turn; few, all.
    clock = types.SimpleNamespace(
        strategy=strategies.create("mirrored", devices=four_devices[:2], gradients=exchange),
        seconds=lambda *_: next(took),
    )
    link = measuring._link(clock, [1_000_000, 3_000_000], 0.0)
    assert link.reducing == pytest.approx(4_000_000 * size / 2.0)
    assert link.smallest == 0.002
    # A message of 64 KiB took 40 ms, of which 0.3125 are its bytes.
    assert link.bandwidth == pytest.approx(4 * 1024**2 / 0.02)
    assert link.latency == pytest.approx(0.04 - 0.0003125)
