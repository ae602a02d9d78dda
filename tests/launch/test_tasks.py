"""What a task is started with."""

import pytest

from toolkit import devices
from toolkit.cluster import Cluster
from toolkit.errors import LaunchError
from toolkit.launch import tasks
from toolkit.launch.spec import LaunchSpec

CLUSTER = Cluster({"chief": ["h:1"], "worker": ["h:2", "h:3"], "ps": ["h:4"], "evaluator": ["h:5"]})


TOGETHER = Cluster({"chief": ["h:1"], "worker": ["h:2", "h:3"], "evaluator": ["h:5"]})


def cards(count):
    return tuple(
        devices.Gpu(index=n, name="card", uuid=f"GPU-{n}", memory_mib=1000, mig_uuids=()) for n in range(count)
    )


def environments(monkeypatch, *, gpus, cores=8, cluster=CLUSTER, **environ):
    monkeypatch.setattr(devices.inventory, "take", lambda: devices.Inventory(gpus=cards(gpus), cores=cores))
    spec = LaunchSpec(command=("-m", "train"), jobs=(("worker", 1),))
    specs, _ = tasks.task_specs(spec, cluster, cluster.tasks, tag="t", socket_path="/s", job_id="j", environ=environ)
    return {str(one.task): one.environment for one in specs}


def test_gpus_are_dealt_to_those_that_train(monkeypatch):
    dealt = environments(monkeypatch, gpus=6, cluster=TOGETHER)
    assert [dealt[task]["CUDA_VISIBLE_DEVICES"] for task in ("chief:0", "worker:0", "worker:1")] == [
        "0,1",
        "2,3",
        "4,5",
    ]
    assert dealt["evaluator:0"]["CUDA_VISIBLE_DEVICES"] == "-1"
    assert {task["CUDA_DEVICE_ORDER"] for task in dealt.values()} == {"PCI_BUS_ID"}


def test_beside_parameter_servers_only_workers_need_gpus(monkeypatch):
    dealt = environments(monkeypatch, gpus=2)
    assert [dealt[task]["CUDA_VISIBLE_DEVICES"] for task in ("worker:0", "worker:1")] == ["0", "1"]
    assert [dealt[task]["CUDA_VISIBLE_DEVICES"] for task in ("chief:0", "ps:0", "evaluator:0")] == ["-1", "-1", "-1"]


def test_only_gpus_that_the_user_left_visible_are_dealt(monkeypatch):
    dealt = environments(
        monkeypatch, gpus=8, cluster=TOGETHER, CUDA_VISIBLE_DEVICES="7,5,3", CUDA_DEVICE_ORDER="FASTEST_FIRST"
    )
    assert [dealt[task]["CUDA_VISIBLE_DEVICES"] for task in ("chief:0", "worker:0", "worker:1")] == ["7", "5", "3"]
    assert "CUDA_DEVICE_ORDER" not in dealt["chief:0"], "it is in the launcher's environment already"


def test_the_users_numbers_are_not_given_another_meaning(monkeypatch):
    """In CUDA's own order they are other cards than in the bus's."""
    dealt = environments(monkeypatch, gpus=8, cluster=TOGETHER, CUDA_VISIBLE_DEVICES="7,5,3")
    assert not any("CUDA_DEVICE_ORDER" in task for task in dealt.values())


def test_gpus_that_are_left_over_are_said(monkeypatch):
    monkeypatch.setattr(devices.inventory, "take", lambda: devices.Inventory(gpus=cards(8), cores=8))
    spec = LaunchSpec(command=("-m", "train"), jobs=(("worker", 1),))
    given = {"tag": "t", "socket_path": "/s", "job_id": "j", "environ": {}}
    _, said = tasks.task_specs(spec, TOGETHER, TOGETHER.tasks, **given)
    assert said == "note: each of 3 tasks gets 2 of 8 GPUs; left over: 6, 7"
    _, said = tasks.task_specs(spec, CLUSTER, CLUSTER.tasks, **given)
    assert said == ""


def test_gpus_that_are_hidden_stay_hidden(monkeypatch):
    dealt = environments(monkeypatch, gpus=4, CUDA_VISIBLE_DEVICES="-1")
    assert {task["CUDA_VISIBLE_DEVICES"] for task in dealt.values()} == {"-1"}


def test_more_tasks_than_gpus_are_said(monkeypatch):
    with pytest.raises(LaunchError, match="there are 2 GPUs to deal out"):
        environments(monkeypatch, gpus=2, cluster=TOGETHER)


def test_without_gpus_nothing_is_said_of_them(monkeypatch):
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": "0"}):  # Fewer than the tasks, but of no cards that are there.
        dealt = environments(monkeypatch, gpus=0, cluster=TOGETHER, **environ)
        assert not any("CUDA_VISIBLE_DEVICES" in task for task in dealt.values())


def test_threads_are_divided(monkeypatch):
    dealt = environments(monkeypatch, gpus=0, cores=16)
    assert {task["OMP_NUM_THREADS"] for task in dealt.values()} == {"3"}
    assert {task["OMP_NUM_THREADS"] for task in environments(monkeypatch, gpus=0, cores=1).values()} == {"1"}
    kept = environments(monkeypatch, gpus=0, TF_NUM_INTRAOP_THREADS="9")
    assert not any("TF_NUM_INTRAOP_THREADS" in task for task in kept.values())


def test_web_proxies_are_kept_out_of_the_way(monkeypatch):
    dealt = environments(monkeypatch, gpus=0, http_proxy="http://proxy:1", no_proxy="intranet")
    assert {task["no_grpc_proxy"] for task in dealt.values()} == {"intranet,h"}
