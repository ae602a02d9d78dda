import json
import os
import subprocess
import sys
import types

import pytest

from toolkit import strategies
from toolkit.cluster import Cluster, Membership, Task
from toolkit.errors import ClusterError, StrategyError
from toolkit.strategies.options import options_of


def test_each_name_makes_its_strategy(four_devices):
    import tensorflow as tf

    assert strategies.create("one_device", devices=("CPU:0",)) is tf.distribute.get_strategy()
    mirrored = strategies.create("mirrored", devices=four_devices[:3])
    assert isinstance(mirrored, tf.distribute.MirroredStrategy)
    assert mirrored.num_replicas_in_sync == 3


def test_auto_goes_by_the_number_of_devices(four_devices):
    assert strategies.create(devices=("CPU:0",)).num_replicas_in_sync == 1
    assert strategies.create(devices=four_devices[:2]).num_replicas_in_sync == 2
    assert strategies.create().num_replicas_in_sync == 4


def test_a_strategy_says_what_it_is(four_devices):
    import tensorflow as tf

    one = {"strategy": "one_device", "replicas": 1, "devices": ["CPU:0"]}
    assert strategies.describe(tf.distribute.get_strategy()) == one
    assert strategies.describe(strategies.create("one_device", devices=("CPU:0",))) == one
    mirrored = {
        "strategy": "mirrored",
        "replicas": 2,
        "devices": ["CPU:2", "CPU:1"],
        "mesh": {"shards": 2, "groups": 1},
        "optimizer_state": "replicated",
        "weights": "replicated",
    }
    assert strategies.describe(strategies.create("mirrored", devices=("CPU:2", "CPU:1"))) == mirrored
    theirs = tf.distribute.MirroredStrategy(["CPU:2", "CPU:1"])
    ours = ("mesh", "optimizer_state", "weights")  # TensorFlow's own replicas exchange nothing but gradients.
    assert strategies.describe(theirs) == {name: mirrored[name] for name in mirrored if name not in ours}
    assert strategies.describe(strategies.enable_fit(theirs)) == mirrored
    sharded = strategies.create("mirrored", devices=("CPU:2", "CPU:1"), weights="sharded")
    slots_too = {"weights": "sharded", "optimizer_state": "sharded"}
    assert strategies.describe(sharded) == {**mirrored, **slots_too}
    other = {"strategy": "OneDeviceStrategy", "replicas": 1, "devices": ["CPU:1"]}
    assert strategies.describe(tf.distribute.OneDeviceStrategy("/cpu:1")) == other


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(StrategyError, match="auto, one_device, mirrored"):
        strategies.create("mirored")


def test_one_device_is_one(four_devices):
    with pytest.raises(StrategyError, match="create mirrored"):
        strategies.create("one_device", devices=four_devices)


def test_auto_does_not_pass_over_a_cluster_in_silence(monkeypatch, four_devices):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1", "b:1"]}}))
    with pytest.raises(ClusterError, match="task: it is missing"):
        strategies.create()


def test_a_cluster_with_parameter_servers_is_no_all_reduce(monkeypatch):
    cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
    with pytest.raises(StrategyError, match="the cluster has parameter servers"):
        strategies.create("multi_worker")


def test_beside_parameter_servers_a_worker_trains_nothing_itself(monkeypatch):
    cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    for name in ("one_device", "mirrored"):
        with pytest.raises(StrategyError, match="workers and ps serve the chief"):
            strategies.create(name)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"dtype": "float16"}, "gradients with communication dtype float16, but parameter servers"),
        ({"compression": "powersgd"}, "gradients compressed by powersgd with parameter servers"),
    ],
)
def test_parameter_servers_take_gradients_as_they_are(monkeypatch, how, words):
    cluster = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
    with pytest.raises(StrategyError, match=words):
        strategies.create(gradients=strategies.GradientExchange(**how))


def test_multi_worker_needs_a_cluster():
    with pytest.raises(StrategyError, match="TF_CONFIG is not set"):
        strategies.create("multi_worker")


def test_multi_worker_has_one_cpu_device_a_worker(four_devices):
    member = Membership(cluster=Cluster({"worker": ["a:1", "b:1"]}), task=Task("worker", 0), source="test")
    with pytest.raises(StrategyError, match="one CPU device per worker"):
        strategies.create("multi_worker", devices=four_devices, membership=member)


def test_parameter_servers_have_the_options(monkeypatch):
    from toolkit.strategies.parameter_servers import strategy as served

    made = types.SimpleNamespace(num_replicas_in_sync=1)
    monkeypatch.setattr(served, "create", lambda *_, **__: made)
    cluster = Cluster({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]})
    member = Membership(cluster=cluster, task=Task("chief", 0), source="test")
    given = strategies.create(membership=member, batch_statistics="replica", check="first_step")
    assert (options_of(given).batch_statistics, options_of(given).check) == ("replica", "first_step")


def test_an_evaluator_trains_under_no_all_reduce():
    cluster = Cluster({"worker": ["a:1"], "evaluator": ["b:1"]})
    member = Membership(cluster=cluster, task=Task("evaluator", 0), source="test")
    with pytest.raises(StrategyError, match="evaluator:0 uses the strategy multi_worker"):
        strategies.create("multi_worker", membership=member)


def test_workers_are_numbered_without_gaps():
    member = Membership(cluster=Cluster({"worker": {0: "a:1", 2: "b:1"}}), task=Task("worker", 0), source="test")
    with pytest.raises(StrategyError, match="worker 0, 2 only"):
        strategies.create("multi_worker", membership=member)


def test_tensorflow_that_has_run_already_is_said(four_devices):
    member = Membership(cluster=Cluster({"worker": ["127.0.0.1:1"]}), task=Task("worker", 0), source="test")
    with pytest.raises(StrategyError, match="before the first operation"):
        strategies.create("multi_worker", membership=member)


def test_enable_fit_takes_strategies_whose_replicas_exchange_gradients():
    import tensorflow as tf

    with pytest.raises(StrategyError, match="MultiWorkerMirroredStrategy or a MirroredStrategy"):
        strategies.enable_fit(tf.distribute.OneDeviceStrategy("CPU:0"))


@pytest.mark.parametrize("name", strategies.NAMES)
@pytest.mark.parametrize("value", ["{broken", "[]", '{"cluster": 1}', '{"cluster": {"worker": 3}}'])
def test_a_cluster_that_can_not_be_read_is_said(monkeypatch, name, value):
    monkeypatch.setenv("TF_CONFIG", value)
    with pytest.raises(ClusterError, match="read a cluster from TF_CONFIG"):
        strategies.create(name, devices=("CPU:0",))


@pytest.mark.slow
def test_another_backend_is_named():
    program = (
        "import sys, types\n"
        "keras = types.ModuleType('keras')\n"
        "keras.backend = types.SimpleNamespace(backend=lambda: 'torch')\n"
        "sys.modules['keras'] = keras\n"
        "import toolkit\n"
        "try:\n    toolkit.strategies.create()\n"
        "except toolkit.errors.StrategyError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    assert "KERAS_BACKEND=tensorflow" in done.stdout, done.stderr
