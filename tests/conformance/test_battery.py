"""One battery over all strategies: the same numbers as one device, from the first step to the checkpoint.

A strategy joins by a row in STRATEGIES. In float64 the arithmetic itself is compared: equal to the last digits, batch
normalisation included. In float32 the order of a sum changes its last digit, and a network magnifies that from step to
step; the plain network does so little enough to be held to 1e-5 for 20 steps.
"""

import functools
import os
import pathlib
import subprocess
import sys
import tempfile

import keras
import numpy as np
import pytest

from toolkit import models, strategies
from toolkit.training import state

STRATEGIES = {
    "mirrored on 1": ("mirrored", 1),
    "mirrored on 2": ("mirrored", 2),
    "mirrored on 4": ("mirrored", 4),
}
TRAININGS = {
    "float32": ("plain", "sgd", "float32", 1e-5, 1e-4),
    "float32 adam": ("plain", "adam", "float32", 1e-5, 1e-4),
    "float64 with batch normalisation": ("small_cnn", "adam", "float64", 1e-10, 1e-10),
}
STEPS = 20
ROOT = pathlib.Path(__file__).parents[2]


@functools.cache
def trained(strategy, replicas, model, optimizer, dtype):
    """What train.py saw, as a dict of arrays."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "out.npz")
        command = [sys.executable, str(pathlib.Path(__file__).with_name("train.py")), strategy, str(replicas), model]
        done = subprocess.run(
            [*command, optimizer, dtype, str(STEPS), str(out)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        with np.load(out) as saved:
            return dict(saved)


@pytest.mark.slow
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_numbers_are_those_of_one_device(strategy, training):
    *arguments, loss_tolerance, weight_tolerance = TRAININGS[training]
    one = trained("one_device", 1, *arguments)
    many = trained(*STRATEGIES[strategy], *arguments)
    assert np.max(np.abs(one["losses"] - many["losses"])) < loss_tolerance
    assert one["losses"].shape == (STEPS,)
    for key in one:
        if key.startswith("state/"):
            np.testing.assert_allclose(many[key], one[key], atol=weight_tolerance, rtol=0, err_msg=key)
    np.testing.assert_allclose(many["evaluated"], one["evaluated"], atol=loss_tolerance)
    np.testing.assert_allclose(many["predicted"], one["predicted"], atol=10 * weight_tolerance)
    # 203 test examples, each counted once: the accuracy is a whole number of 203rds.
    assert many["evaluated"][1] * 203 == pytest.approx(round(many["evaluated"][1] * 203), abs=1e-3)
    assert many["agree"], "replicas hold different weights"


def compiled(strategy):
    with strategy.scope():
        model = models.build("small_cnn")
        model.compile(keras.optimizers.Adam(1e-4), "sparse_categorical_crossentropy")
    return model


def test_a_checkpoint_comes_back_at_any_number_of_replicas(four_devices):
    model = compiled(strategies.create("mirrored", devices=four_devices[:2]))
    random = np.random.default_rng(0)
    saved = {
        name: array if array.dtype.kind == "i" else random.random(array.shape, np.float32)
        for name, array in state.capture(model).items()
    }
    for replicas in (1, 2, 4):
        other = compiled(strategies.create("auto", devices=four_devices[:replicas]))
        state.restore(other, saved)
        again = state.capture(other)
        assert list(again) == list(saved)
        assert all(np.array_equal(again[key], saved[key]) for key in saved)
