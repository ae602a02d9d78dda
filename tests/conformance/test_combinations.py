"""Convolutions replicated or sharded, FC layers replicated or sharded: the numbers are those of one device."""

import functools
import pathlib
import tempfile

import numpy as np
import processes
import pytest
import train

SCRIPT = pathlib.Path(__file__).with_name("combinations.py")


WAYS = ("replicated", "sharded")
ALL = [f"{conv}/{fc}/{name}" for conv in WAYS for fc in WAYS for name in train.OPTIMIZERS]
# Every way with one optimizer, and one way with every optimizer, once; two ways elsewhere. The whole grid, ALL, was
# seen to agree on each of these; it takes four minutes.
SOME = [way for way in ALL if way.endswith("adamw") or way.startswith("sharded/sharded")]
FEW = ["replicated/sharded/adamw", "sharded/sharded/sgd"]
ALEXNET = "replicated/{}/sgd/alexnet"
ONE = [f"replicated/replicated/{name}" for name in train.OPTIMIZERS]


@functools.cache
def seen(strategy, replicas, ways):
    """What combinations.py saw, as a dict of arrays."""
    tasks = replicas if strategy == "multi_worker" else 1
    with tempfile.TemporaryDirectory() as folder:
        outs = [pathlib.Path(folder, f"{number}.npz") for number in range(tasks)]
        command = [[strategy, str(replicas), str(out), *ways] for out in outs]
        with processes.group([SCRIPT], command, folder, cluster=tasks > 1) as run:
            run.succeed(limit=280)
        found = [dict(np.load(out)) for out in outs]
    for other in found[1:]:
        assert all(np.array_equal(other[key], found[0][key]) for key in other), "the workers don't agree"
    return found[0]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "replicas", "ways"),
    [("mirrored", 2, SOME), ("mirrored", 4, FEW), ("multi_worker", 3, FEW)],
    ids=["mirrored 2", "mirrored 4", "multi_worker 3"],
)
def test_losses_are_those_of_one_device(strategy, replicas, ways):
    one, many = seen("one_device", 1, tuple(ONE)), seen(strategy, replicas, tuple(ways))
    for key, value in many.items():
        _, _, optimizer, what = key.split("/")
        tolerance = 1e-4 if what == "predicted" else 1e-5
        alone = one[f"replicated/replicated/{optimizer}/{what}"]
        np.testing.assert_allclose(value, alone, atol=tolerance, rtol=0, err_msg=key)
    assert sum(key.endswith("losses") for key in many) == len(ways)


@pytest.mark.long
@pytest.mark.slow
def test_alexnet_with_sharded_layers_is_that_of_one_device():
    one, two = (
        seen(strategy, replicas, (ALEXNET.format(fc),))[f"{ALEXNET.format(fc)}/losses"]
        for strategy, replicas, fc in (("one_device", 1, "replicated"), ("mirrored", 2, "sharded"))
    )
    np.testing.assert_allclose(two, one, rtol=1e-10)
    assert len(set(one)) > 1
