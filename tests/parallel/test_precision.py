"""Sharded layers under another dtype policy: what plain ones do, within what the policy leaves of precision."""

import keras
import numpy as np
import pytest

from toolkit import strategies
from toolkit.parallel import ShardedConv2D, ShardedDense


def trained(strategy, policy, conv, dense):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(24, 6, 6, 3)).astype("float32"), random.normal(size=(24, 3)).astype("float32")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6, 6, 3)),
                conv(5, 3, activation="relu", dtype=policy),
                keras.layers.Flatten(),
                dense(17, activation="relu", dtype=policy),
                keras.layers.Dense(3, dtype="float32"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05), "mse")
    losses = model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0).history["loss"]
    assert model.layers[0].kernel.dtype == keras.DTypePolicy(policy).variable_dtype
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [
        pytest.param("float64", 1e-6, marks=pytest.mark.long),
        pytest.param("mixed_bfloat16", 0.02, marks=pytest.mark.long),
        ("mixed_float16", 0.005),
    ],
)
def test_a_policy(four_devices, policy, tolerance):
    plain = trained(
        strategies.create("one_device", devices=four_devices[:1]), policy, keras.layers.Conv2D, keras.layers.Dense
    )
    split = trained(strategies.create("mirrored", devices=four_devices[:2]), policy, ShardedConv2D, ShardedDense)
    assert split == pytest.approx(plain, rel=tolerance)
