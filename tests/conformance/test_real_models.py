"""The models that everybody trains, unmodified, under every strategy: one device's losses over 20 steps, and weights.

A batch of 30 leaves replicas with different numbers of examples. What can't hold: beside free
parameter servers gradients are late, so that the counts of steps are one device's, and losses near it.
"""

import functools
import pathlib
import tempfile

import numpy as np
import processes
import pytest
import real_models
import train

SCRIPT = pathlib.Path(__file__).with_name("real_models.py")
FLOAT16 = ("mixed_float16, an overflow", "mixed_bfloat16")
# Beside free parameter servers accumulation is refused in a sentence: workers would add to one sum that others use up.
FREE = tuple(name for name in real_models.MODELS if name != "accumulating, clipped, averaged")
# A round applies the gradients of one optimizer, and adds those of a row before Adam squares them, where Keras squares
# each lookup's by itself on one device.
ROUNDS = (
    "time series transformer", "vision transformer", "U-Net", "mixed_float16, an overflow",
    "accumulating, clipped, averaged",
)  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1300)]


@functools.cache
def trained(strategy, replicas, names=()):
    """What each task's real_models.py saw, the first one's; the others' are the same."""
    arguments = (strategy, str(replicas))
    with tempfile.TemporaryDirectory() as folder:
        if strategy in train.SERVED:
            out = pathlib.Path(folder, "chief.npz")
            ended = processes.launch(
                folder, str(SCRIPT), *arguments, str(out), *names, tasks=processes.SERVED, limit=1200
            )
            assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
            return dict(np.load(out))
        together = strategy == "multi_worker"
        outs = [pathlib.Path(folder, f"{number}.npz") for number in range(replicas if together else 1)]
        command = [[*arguments, str(out), *names] for out in outs]
        with processes.group([SCRIPT], command, folder, cluster=together) as run:
            run.succeed(limit=1200)
        first, *others = [dict(np.load(out)) for out in outs]
    for other in others:
        trained_alike = [key for key in other if key.endswith(("/losses", "/weights"))]
        assert all(np.array_equal(other[key], first[key]) for key in trained_alike), "the workers don't agree"
    return first


def held(many, name, *, losses=True):
    if f"{name}/saved" in many:  # What is saved, and exported, answers as what was trained.
        left = [many[key] for key in (f"{name}/saved", f"{name}/exported") if key in many]
        np.testing.assert_allclose(left, 0, atol=1e-5)
    if f"{name}/resumed" in many:
        assert many[f"{name}/resumed"] == 0, "stopped in mid-epoch and gone on with, to the bit"
    one = trained("one_device", 1)
    if name in FLOAT16:  # A last digit of 16 bits, over 20 steps of Adam.
        tolerances = {"losses": (1e-2, 0), "weights": (0, 5e-3)}
    else:
        tolerances = {"losses": (1e-6, 1e-5), "weights": (0, 2e-5)}
    for key, (relative, absolute) in tolerances.items():
        if key == "weights" or losses:
            theirs = many[f"{name}/{key}"]
            np.testing.assert_allclose(theirs, one[f"{name}/{key}"], rtol=relative, atol=absolute, err_msg=key)


@pytest.mark.parametrize("name", real_models.MODELS)
@pytest.mark.parametrize(
    ("strategy", "replicas"), [("mirrored", 2), ("mirrored", 4), ("multi_worker", 2), ("multi_worker", 3)]
)
def test_the_numbers_are_those_of_one_device(strategy, replicas, name):
    many = trained(strategy, replicas)
    assert many[f"{name}/losses"].shape == (real_models.STEPS,)
    held(many, name)


@pytest.mark.parametrize("name", real_models.MODELS)
def test_weights_are_those_of_one_device_beside_parameter_servers(name):
    # Steps are under way when a batch's losses are reported.
    held(trained("in_turn_sharded", 2), name, losses=False)


@pytest.mark.parametrize("name", ROUNDS)
def test_weights_are_those_of_one_device_in_rounds(name):
    held(trained("rounds_sharded", 2, ROUNDS), name, losses=False)


@pytest.mark.parametrize("name", FREE)
def test_free_parameter_servers_do_every_step_once_and_learn_alike(name):
    free, one = trained("free", 2, FREE), trained("one_device", 1)
    assert free[f"{name}/steps"].tolist() == one[f"{name}/steps"].tolist()
    assert np.isfinite(free[f"{name}/weights"]).all()
    if name != "mixed_float16, an overflow":  # Its pictures are 1000 times as bright, and so are steps between them.
        np.testing.assert_allclose(free[f"{name}/losses"][-1], one[f"{name}/losses"][-1], rtol=0.1)
