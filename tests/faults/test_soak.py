"""Three minutes of benchmarks/soak.py, which takes half an hour."""

import json
import os
import subprocess
import sys

import processes
import pytest


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_minutes_of_faults_leave_no_trace(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--minutes=3", "--seconds_between_faults=30", "--folder=job"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(processes.ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["faults"] >= 4
    assert all(found["holds"].values())
