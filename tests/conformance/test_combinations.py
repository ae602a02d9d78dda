"""Convolutions replicated or sharded, FC layers replicated or sharded: the numbers are those of one device."""

import functools
import itertools
import pathlib
import tempfile

import numpy as np
import processes
import pytest
import train

SCRIPT = pathlib.Path(__file__).with_name("combinations.py")


@functools.cache
def seen(strategy, replicas):
    """What combinations.py saw, as a dict of arrays."""
    tasks = replicas if strategy == "multi_worker" else 1
    with tempfile.TemporaryDirectory() as folder:
        outs = [pathlib.Path(folder, f"{number}.npz") for number in range(tasks)]
        command = [[strategy, str(replicas), str(out)] for out in outs]
        with processes.group([SCRIPT], command, folder, cluster=tasks > 1) as run:
            run.succeed(limit=280)
        found = [dict(np.load(out)) for out in outs]
    for other in found[1:]:
        assert all(np.array_equal(other[key], found[0][key]) for key in other), "the workers don't agree"
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "replicas"), [("mirrored", 2), ("mirrored", 4), ("multi_worker", 2), ("multi_worker", 3)]
)
def test_losses_are_those_of_one_device(strategy, replicas):
    one, many = seen("one_device", 1), seen(strategy, replicas)
    ways = ("replicated", "sharded")
    for conv, fc, optimizer in itertools.product(ways, ways, train.OPTIMIZERS):
        key = f"{conv}/{fc}/{optimizer}/losses"
        np.testing.assert_allclose(
            many[key], one[f"replicated/replicated/{optimizer}/losses"], atol=1e-5, rtol=0, err_msg=key
        )
    for conv, fc in itertools.product(ways, ways):
        for what, tolerance in (("evaluated", 1e-5), ("predicted", 1e-4)):
            np.testing.assert_allclose(
                many[f"{conv}/{fc}/adam/{what}"], one[f"replicated/replicated/adam/{what}"], atol=tolerance, rtol=0
            )
