"""Weights of which each worker keeps a part: one device's numbers."""

import pathlib

import numpy as np
import processes
import pytest

SCRIPT = pathlib.Path(__file__).with_name("sharded_weights.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        ["dense/adamw", "lstm/sgd", "clipped/sgd"],
        pytest.param(
            ["conv/adamw", "vit/adamw", "own/sgd", "gan/adamw", "words/adamw", "lora/each"], marks=pytest.mark.long
        ),
    ],
    ids=lambda cases: cases[0],
)
def test_two_workers_have_one_devices_numbers(tmp_path, cases):
    seen = []
    for workers in (1, 2):
        outs = [[str(tmp_path / f"{workers}-{number}.npz"), "sharded", *cases] for number in range(workers)]
        threads = {"TF_NUM_INTRAOP_THREADS": "1"}
        with processes.group([SCRIPT], outs, tmp_path, cluster=workers > 1, **threads) as run:
            run.succeed(limit=250)
        seen.append([dict(np.load(out)) for out, *_ in outs])
    (alone,), (chief, worker) = seen
    assert {key.rpartition("/")[0] for key in alone} == set(cases)
    for each in (chief, worker):  # No gradient needs the first layer's weights.
        assert each["gathers"].tolist() == [3, 2], "weights are gathered for the forward pass, and again for gradients"
        assert each["chiefs"] == 701 * 1001, "a weight begins with what the chief has drawn"
        kept, *same = each["saved"].tolist()
        assert kept == 0, "a worker keeps no whole weights where Keras's callbacks and runs save"
        assert same == [1] * 23, "a run is resumed, and its files are loaded, bit for bit"
        for dtype in ("int8", "float16", "bfloat16", "float64"):
            np.testing.assert_array_equal(each[f"of {dtype}"], [np.arange(7), np.arange(7) + 1], err_msg=dtype)
    for key, array in alone.items():
        np.testing.assert_array_equal(chief[key], worker[key], err_msg=f"{key}: workers differ")
        tolerance = 1e-5 if key.startswith("lora") else 1e-10  # Keras makes LoRA weights in float32.
        np.testing.assert_allclose(chief[key], array, rtol=tolerance, atol=tolerance, err_msg=key)
