"""Gradients that several steps add up: exchanged once, with one device's numbers."""

import pathlib

import numpy as np
import processes
import pytest

SCRIPT = pathlib.Path(__file__).with_name("accumulating.py")


@pytest.mark.slow
@pytest.mark.long
def test_gradients_of_several_steps_are_exchanged_once(tmp_path):
    seen = []
    for workers in (1, 2):
        outs = [tmp_path / f"{workers}-{number}.npz" for number in range(workers)]
        threads = {"TF_NUM_INTRAOP_THREADS": "1"}
        with processes.group([SCRIPT], [[str(out)] for out in outs], tmp_path, cluster=workers > 1, **threads) as run:
            run.succeed(limit=150)
        seen.append([dict(np.load(out)) for out in outs])
    (alone,), (chief, worker) = seen
    always, at_updates = chief.pop("sent")
    worker.pop("sent")
    for key, array in alone.items():
        np.testing.assert_array_equal(chief[key], worker[key], err_msg=f"{key}: workers differ")
        np.testing.assert_allclose(chief[key], array, atol=2e-6, err_msg=key)
    np.testing.assert_array_equal(chief["went on"], chief["resumed"])
    # 8 x 8 weights and biases of the layer between, 49 of the last one; beside them rows and a few numbers.
    dense = 8 * 8 + 8 + 49
    assert at_updates == dense
    assert always < dense
