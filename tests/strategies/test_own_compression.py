"""The manual's compression, written outside of the toolkit: its numbers, its bytes, and what is kept of it."""

import math
import pathlib
import re

import keras
import numpy as np
import pytest

from toolkit import strategies
from toolkit.errors import StrategyError
from toolkit.strategies import GradientExchange
from toolkit.strategies.step import collectives
from toolkit.training import state

pytestmark = pytest.mark.slow
PAGE = pathlib.Path(__file__).parents[2] / "docs/guides/own_compression.md"
RATE, SHARE, STEPS = 0.05, 0.1, 6
X = np.random.default_rng(0).normal(size=(8, 12)).astype("float32")
Y = (X @ np.linspace(-1, 1, 12 * 10).reshape(12, 10)).astype("float32")


@pytest.fixture(scope="module")
def top_k():
    found = {}
    exec(re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1], found)
    return found["TopK"]


def one_layer(strategy, optimizer=None):
    with strategy.scope():
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(10)])
        model.compile(optimizer or keras.optimizers.SGD(RATE), "mse")
    model.set_weights([np.full((12, 10), 0.1), np.zeros(10)])
    return model


def trained(model, epochs=STEPS):
    model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()


def in_numpy():
    """Two replicas, each with half of the batch, which send the kernel's largest elements."""
    kernel, bias = np.full((12, 10), 0.1), np.zeros(10)
    unsent, count = [np.zeros(120), np.zeros(120)], round(SHARE * 120)
    for _ in range(STEPS):
        total, of_bias = np.zeros(120), 0
        for replica in range(2):
            x, y = (each[4 * replica : 4 * replica + 4].astype("float64") for each in (X, Y))
            error = 2 * (x @ kernel + bias - y) / y.size / 2  # By the replica's share of the batch.
            whole = (x.T @ error).ravel() + unsent[replica]
            largest = np.argsort(-np.abs(whole))[:count]
            total[largest] += whole[largest]
            whole[largest] = 0
            unsent[replica], of_bias = whole, of_bias + error.sum(0)
        kernel, bias = kernel - RATE * total.reshape(12, 10), bias - RATE * of_bias
    return kernel, bias, unsent


def create(devices, top_k, **more):
    return strategies.create("mirrored", devices=devices, gradients=GradientExchange(compression=top_k(SHARE), **more))


def test_its_steps_are_those_that_numpy_makes(four_devices, top_k):
    strategy = create(four_devices[:2], top_k)
    model = one_layer(strategy)
    kernel, bias, unsent = in_numpy()
    for mine, theirs in zip(trained(model), (kernel, bias), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)
    kept = {name: array for name, array in state.capture(model).items() if name.startswith("exchange/")}
    assert list(kept) == ["exchange/0/compression/0000/unsent"]
    np.testing.assert_allclose(*kept.values(), np.concatenate(unsent), rtol=0, atol=1e-5)
    assert strategies.describe(strategy)["compression"] == "TopK(share=0.1)"


def test_a_resumed_run_is_that_of_no_pause(four_devices, top_k):
    strategy = create(four_devices[:2], top_k)
    model = one_layer(strategy)
    trained(model, epochs=3)
    arrays = state.capture(model)
    through = trained(model, epochs=3)
    again = one_layer(strategy)
    state.restore(again, arrays)
    for mine, theirs in zip(trained(again, epochs=3), through, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_sends_the_bytes_of_its_formula(four_devices, top_k, monkeypatch, dtype):
    sent = []

    def noted(original):
        def exchange(x, *args, dtype=None, **more):
            sent.append(math.prod(x.shape) * (dtype or x.dtype).size)
            return original(x, *args, dtype=dtype, **more)

        return exchange

    for name in ("all_gather", "all_reduce"):
        monkeypatch.setattr(collectives, name, noted(getattr(collectives, name)))
    model = one_layer(create(four_devices[:2], top_k, dtype=dtype))
    sent.clear()
    trained(model, epochs=1)
    k, width = round(SHARE * 120), 4 if dtype == "float32" else 2
    by_replica = sum(sorted(sent)[-4:]) / 2
    assert by_replica == k * width + k * 4, sent


def test_whole_gradients_are_sent_until_it_begins_and_beside_a_loss_scale_nothing_is_lost(four_devices, top_k):
    plain = trained(one_layer(strategies.create("mirrored", devices=four_devices[:2])), epochs=2)
    later = create(four_devices[:2], top_k, start_step=2)
    model = one_layer(later)
    for mine, theirs in zip(trained(model, epochs=2), plain, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not np.allclose(
        trained(model, epochs=1)[0],
        trained(one_layer(strategies.create("mirrored", devices=four_devices[:2])), epochs=3)[0],
    )
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE), initial_scale=1024.0)
    scaled = trained(one_layer(create(four_devices[:2], top_k), optimizer))
    np.testing.assert_allclose(scaled[0], in_numpy()[0], rtol=0, atol=1e-5)


def test_what_makes_no_sense_is_refused(four_devices, top_k):
    with pytest.raises(StrategyError, match=r"rank=3, but TopK\(share=0.1\) has no such option"):
        GradientExchange(compression=top_k(0.1), rank=3)
    with pytest.raises(StrategyError, match="'top', but there is no such choice"):
        GradientExchange(compression="top")
    much = GradientExchange(compression=top_k(0.9))
    model = one_layer(strategies.create("mirrored", devices=four_devices[:2], gradients=much))
    with pytest.raises(StrategyError, match=r"TopK\(share=0.9\), but no gradient gets smaller: the largest"):
        trained(model)
    assert GradientExchange(compression=top_k(0.1)) == GradientExchange(compression=top_k(0.1))
    assert GradientExchange(compression=top_k(0.1)) != GradientExchange(compression=top_k(0.2))
