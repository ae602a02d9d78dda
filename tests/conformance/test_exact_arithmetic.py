"""Where every sum is exact, several replicas end with one device's bits: no tolerance hides a wrong last digit."""

import functools
import pathlib

import batteries
import exact_arithmetic as exact
import numpy as np
import processes
import pytest
import tensorflow as tf

from toolkit import strategies

SCRIPT = pathlib.Path(exact.__file__)


@functools.cache
def one_device(name):
    return exact.trained(tf.distribute.get_strategy(), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", exact.IN_ANY_ORDER)
def test_the_order_of_a_batch_changes_no_bit(name):
    order = np.random.default_rng(1).permutation(exact.BATCH)
    assert np.array_equal(exact.trained(tf.distribute.get_strategy(), name, order), one_device(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", exact.NETWORKS)
@pytest.mark.parametrize("count", batteries.rows([2, 4], 4))
@pytest.mark.parametrize("way", exact.WAYS)
def test_replicas_have_one_devices_bits(four_devices, name, count, way):
    strategy = strategies.create("mirrored", devices=four_devices[:count], **exact.WAYS[way])
    assert np.array_equal(exact.trained(strategy, name), one_device(name))


@pytest.mark.slow
@pytest.mark.parametrize("how", batteries.rows(["jit_compile", "run_eagerly"], "jit_compile"))
def test_ways_to_compile_have_one_devices_bits(four_devices, how):
    strategy = strategies.create("mirrored", devices=four_devices[:2])
    assert np.array_equal(exact.trained(strategy, "dense", **{how: True}), one_device("dense"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "devices"),
    batteries.rows(
        [(way, devices) for way in exact.WAYS for devices in (1, 2)], [("sharded weights", 1), ("plain", 2)]
    ),
)
def test_workers_have_one_devices_bits(tmp_path, way, devices):
    """Each with one device, and with two, whose rows lie between the other's and which meet in one process."""
    outs = [tmp_path / f"{number}.npz" for number in range(2)]
    given = [[str(devices), str(out), way] for out in outs]
    with processes.group([SCRIPT], given, tmp_path, cluster=True) as run:
        run.succeed(limit=600)
    for out in outs:
        assert_one_devices(dict(np.load(out)))


def assert_one_devices(found):
    assert list(found) == list(exact.NETWORKS)
    for name, bits in found.items():
        assert np.array_equal(bits, one_device(name)), name


@pytest.mark.slow
@pytest.mark.parametrize("mode", batteries.rows(["rounds", "in_turn"], "rounds"))
def test_parameter_servers_have_one_devices_bits(tmp_path, mode):
    out = tmp_path / "out.npz"
    ended = processes.python(tmp_path, str(SCRIPT), "served", str(out), mode, limit=240)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert_one_devices(dict(np.load(out)))
