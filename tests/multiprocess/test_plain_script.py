"""What a launcher knows of a script that knows nothing of the toolkit: its steps, its speed, and where it hangs."""

import pathlib
import re

import processes
import pytest

pytestmark = pytest.mark.slow
SCRIPT = pathlib.Path(__file__).with_name("plain.py")


@pytest.mark.smoke
@pytest.mark.long
def test_steps_and_speed_are_known(tmp_path):
    events = """
import json, sys
from toolkit.launch.supervisor.task_group import TaskGroup
take = TaskGroup._take
def taken(self, host, event):
    if event["event"] == "report":
        print("REPORT", json.dumps(event), file=sys.stderr)
    take(self, host, event)
TaskGroup._take = taken
from toolkit.cli.main import main
main()
"""
    (tmp_path / "launch.py").write_text(events)
    done = processes.python(tmp_path, "launch.py", "launch", "--show=all", "--workers=2", str(SCRIPT), "run")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = [int(step) for step in re.findall(r'"task": "worker:1".*"state": "training".*"step": (\d+)', done.stderr)]
    assert steps == sorted(steps)
    assert 1 < steps[-1] <= 40  # Told once a second, and all 40 steps take two.
    rates = [float(rate) for rate in re.findall(r'"images_per_second": ([\d.]+)', done.stderr)]
    assert 20 < rates[-1] < 401, "20 examples in each step of 50 ms or more"
    assert '"state": "running", "step": 40' in done.stderr
