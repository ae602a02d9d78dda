"""Beside parameter servers, what is drawn at random is what one device draws, in rounds and in turn."""

import pathlib

import numpy as np
import processes
import pytest

pytestmark = pytest.mark.slow
HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draws")
    ended = processes.python(folder, str(HERE / "draws.py"), "out.npz", limit=240)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    with np.load(folder / "out.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("kind", ["dropout", "normalisation", "what stays on", "XLA", "accumulation"])
@pytest.mark.parametrize("mode", ["rounds", "in_turn"])
def test_losses_evaluation_and_predictions_are_one_devices(found, mode, kind):
    np.testing.assert_allclose(found[f"{mode} {kind}"], found[f"one_device {kind}"], atol=1e-5)
