"""What a task is started with."""

import pytest

from toolkit import devices
from toolkit.cluster import Cluster
from toolkit.errors import LaunchError
from toolkit.launch import JobSpec
from toolkit.launch.agent import tasks
from toolkit.launch.backends.local import LocalBackend

CLUSTER = Cluster({"chief": ["h:1"], "worker": ["h:2", "h:3"], "ps": ["h:4"], "evaluator": ["h:5"]})


TOGETHER = Cluster({"chief": ["h:1"], "worker": ["h:2", "h:3"], "evaluator": ["h:5"]})


def cards(count):
    return tuple(
        devices.Gpu(index=n, name="card", uuid=f"GPU-{n}", memory_mib=1000, mig_uuids=()) for n in range(count)
    )


def made(cluster, environ):
    given = {"command": ("-m", "train"), "settings": {}, "as_is": False, "partial": False}
    return tasks.task_specs(cluster, cluster.tasks, environ=environ, socket_path="/s", **given)


def environments(monkeypatch, *, gpus, cores=8, cluster=CLUSTER, **environ):
    monkeypatch.setattr(devices.inventory, "take", lambda: devices.Inventory(gpus=cards(gpus), cores=cores))
    specs, _ = made(cluster, environ)
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
    _, said = made(TOGETHER, {})
    assert said == "note: each of 3 tasks gets 2 of 8 GPUs; left over: 6, 7"
    _, said = made(CLUSTER, {})
    assert said == ""


def test_gpus_that_are_hidden_stay_hidden(monkeypatch):
    dealt = environments(monkeypatch, gpus=4, CUDA_VISIBLE_DEVICES="-1")
    assert {task["CUDA_VISIBLE_DEVICES"] for task in dealt.values()} == {"-1"}


def test_more_tasks_than_gpus_are_said(monkeypatch):
    with pytest.raises(LaunchError, match="it has 2 visible GPUs, fewer than one for each task"):
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


def test_sets_have_one_order_in_all_tasks_unless_the_user_has_said(monkeypatch):
    dealt = environments(monkeypatch, gpus=0)
    assert {task["PYTHONHASHSEED"] for task in dealt.values()} == {"0"}
    assert not any("PYTHONHASHSEED" in task for task in environments(monkeypatch, gpus=0, PYTHONHASHSEED="7").values())


def test_web_proxies_are_kept_out_of_the_way(monkeypatch):
    dealt = environments(monkeypatch, gpus=0, http_proxy="http://proxy:1", no_proxy="intranet")
    assert {task["no_grpc_proxy"] for task in dealt.values()} == {"intranet,h"}


def test_what_torchrun_sets_is_there_too(monkeypatch):
    dealt = environments(monkeypatch, gpus=0, cluster=TOGETHER)
    ranks = [[dealt[t].get(n) for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] for t in ("chief:0", "worker:1")]
    assert ranks == [["0", "0", "3"], ["2", "2", "3"]]
    assert "RANK" not in dealt["evaluator:0"]
    served = environments(monkeypatch, gpus=0)
    assert [served["worker:1"][name] for name in ("RANK", "WORLD_SIZE")] == ["1", "2"]
    assert "RANK" not in served["chief:0"]


def test_under_slurm_each_task_has_the_numbers_of_one_srun(monkeypatch):
    monkeypatch.setattr(devices.inventory, "take", lambda: devices.Inventory(cores=8))
    cluster = Cluster({"worker": ["a:1", "a:2", "b:1", "b:2"]})
    given = {"command": ("x",), "settings": {}, "as_is": False, "partial": False, "socket_path": "/s"}
    made, _ = tasks.task_specs(cluster, cluster.tasks[2:], environ={"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, **given)
    names = ("PROCID", "LOCALID", "NODEID", "NTASKS", "NPROCS", "NNODES")
    assert [[one.environment[f"SLURM_{name}"] for name in names] for one in made] == [
        ["2", "0", "1", "4", "4", "2"],
        ["3", "1", "1", "4", "4", "2"],
    ]
    made, _ = tasks.task_specs(cluster, cluster.tasks, environ={}, **given)
    assert not any(name.startswith("SLURM_") for one in made for name in one.environment)


def test_gpus_that_the_tasks_environment_hides_are_not_counted(monkeypatch):
    monkeypatch.setattr(devices.inventory, "take", lambda: devices.Inventory(gpus=cards(4)))
    for env, number in (((), 4), (("CUDA_VISIBLE_DEVICES=0",), 1), (("CUDA_VISIBLE_DEVICES=1,3",), 2)):
        cluster, _ = LocalBackend(JobSpec(command=("x",), env=env)).planned()
        assert len(cluster.tasks) == number
