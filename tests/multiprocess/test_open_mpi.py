"""Ranks that mpirun starts find their cluster in its environment, and train."""

import json
import os
import re
import shutil
import subprocess
import sys

import processes
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine: apt-get install openmpi-bin"),
]


def mpirun(folder, ranks, recipe, *flags, **environment):
    command = (sys.executable, "-m", recipe, "--data=shapes", "--epochs=1", "--steps_per_epoch=8", *flags)
    as_root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    done = subprocess.run(
        ["mpirun", *as_root, "--oversubscribe", "-n", str(ranks), *command, f"--run_dir={folder / 'it is'}"],
        env={**os.environ, "PYTHONPATH": str(processes.ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout, json.loads((folder / "it is" / "summary.json").read_text())


@pytest.mark.long
def test_workers_by_mpirun(tmp_path):
    out, _ = mpirun(tmp_path, 2, "recipes.cifar_multi_worker")
    weights = re.findall(r"Done: .*? weights (\w+)", out)
    assert len(weights) == 2
    assert len(set(weights)) == 1


@pytest.mark.long
def test_chief_worker_and_ps_by_mpirun(tmp_path):
    _, summary = mpirun(tmp_path, 3, "recipes.cifar_parameter_server", TOOLKIT_TASKS="chief:1,worker:1,ps:1")
    assert summary["steps"] == 8
    assert set(summary["cluster"]) == {"chief", "worker", "ps"}
