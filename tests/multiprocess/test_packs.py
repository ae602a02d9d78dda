"""Gradients in packs that travel while others are computed: the same numbers to the last bit."""

import pathlib

import numpy as np
import processes
import pytest

SCRIPT = pathlib.Path(__file__).with_name("packs.py")


@pytest.mark.long
@pytest.mark.slow
def test_packs_and_their_order_change_no_bit(tmp_path):
    outs = [tmp_path / f"{number}.npz" for number in range(2)]
    threads = {"TF_NUM_INTRAOP_THREADS": "1"}  # Several threads may add in another order.
    with processes.group([SCRIPT], [[str(out)] for out in outs], tmp_path, **threads) as run:
        run.succeed(limit=150)
    mine, others = (dict(np.load(out)) for out in outs)
    losses = {way: mine.pop(f"losses {way}") for way in list(mine) if f"losses {way}" in mine}
    assert len(losses["without overlap"]) == 12
    for way in ("chosen", "small packs", "by TensorFlow's all-reduce"):
        np.testing.assert_array_equal(losses[way], losses["without overlap"], err_msg=way)
    for way, weights in mine.items():
        np.testing.assert_array_equal(weights, others[way], err_msg=f"{way}: workers differ")
        if way == "eager":  # A graph's operations may be fused.
            np.testing.assert_allclose(weights, mine["without overlap"], atol=1e-4)
        elif way == "float16":
            assert 0 < np.abs(weights - mine["without overlap"]).max() < 1e-2
        else:
            np.testing.assert_array_equal(weights, mine["without overlap"], err_msg=way)
