"""Ranks that mpirun starts find their cluster in its environment, and train."""

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


def test_workers_by_mpirun(tmp_path):
    command = (sys.executable, "-m", "recipes.cifar_multi_worker", "--data=shapes", "--epochs=1", "--steps_per_epoch=8")
    as_root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    done = subprocess.run(
        ["mpirun", *as_root, "--oversubscribe", "-n", "2", *command, f"--run_dir={tmp_path / 'it is'}"],
        env={**os.environ, "PYTHONPATH": str(processes.ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    weights = re.findall(r"Done: .*? weights (\w+)", done.stdout)
    assert len(weights) == 2
    assert len(set(weights)) == 1
    assert (tmp_path / "it is" / "summary.json").exists()
