"""Tasks that Slurm starts find their cluster in its environment, and train."""

import json
import os
import re
import sys
import tempfile

import processes
import pytest
from slurm_cluster import lacking, slurm

REASON = lacking()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]
FLAGS = ("--data=shapes", "--epochs=1", "--steps_per_epoch=8")
ENVIRONMENT = {
    "PYTHONPATH": str(processes.ROOT),
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "no_grpc_proxy": f"localhost,{os.uname().nodename}",
}


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm(folder) as made:
        yield made


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_workers_by_srun(cluster, tmp_path):
    command = (sys.executable, "-m", "recipes.cifar_multi_worker", *FLAGS, f"--run_dir={tmp_path / 'it is'}")
    done = cluster.run("srun", "--nodes=2", "--ntasks=2", "--label", *command, limit=150, **ENVIRONMENT)
    found = re.findall(r"^(\d): Done: .* weights (\w+)", done.stdout, re.MULTILINE)
    assert sorted(rank for rank, _ in found) == ["0", "1"], done.stdout[-2000:] + done.stderr[-2000:]
    assert len({weights for _, weights in found}) == 1
    hosts = [address.rpartition(":")[0] for address in summary(tmp_path / "it is")["cluster"]["worker"]]
    assert sorted(hosts) == sorted(cluster.nodes)


def test_chief_workers_and_ps_by_srun(cluster, tmp_path):
    command = (sys.executable, "-m", "recipes.cifar_parameter_server", *FLAGS, f"--run_dir={tmp_path / 'run'}")
    tasks = {"TOOLKIT_TASKS": "chief:1,worker:2,ps:1"}
    done = cluster.run("srun", "--nodes=2", "--ntasks=4", "--label", *command, limit=150, **ENVIRONMENT, **tasks)
    assert summary(tmp_path / "run")["steps"] == 8, done.stdout[-2000:] + done.stderr[-2000:]
    assert set(summary(tmp_path / "run")["cluster"]) == {"chief", "worker", "ps"}
