"""Workers that serve a chief, and die."""

import signal

import processes
import pytest

SCRIPT = """
import json, os, time
from toolkit.support import status
job = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
if job != "chief":
    status.report(state="serving")
    print(job, "serves", flush=True)
while job != "chief" or not os.path.exists("end"):
    time.sleep(0.05)
"""


@pytest.fixture
def launched(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    started = []

    def start(*flags):
        started.append(processes.Job(tmp_path, ["--chief", "--workers=2", "--ps=1", *flags], ["train.py"]))
        started[0].until(lambda: serving(started[0]) == 2)
        return started[0]

    yield start
    for job in started:
        job.process.terminate()
        job.process.wait(30)


def serving(job):
    return job.text.count("worker serves")


@pytest.mark.slow
def test_one_that_comes_back_alone_is_not_waited_for(launched):
    job = launched("--max_restarts=1")
    job.kill("worker:1")
    job.kill("worker:0")
    assert job.wait(limit=30) == 137
    assert "No worker is left" in job.text


@pytest.mark.slow
def test_one_that_is_stopped_is_done_without(launched, tmp_path):
    job = launched("--heartbeat_timeout=2")
    job.kill("worker:0", signal.SIGSTOP)
    job.until("worker:0 was ended by SIGKILL; the job goes on without it")
    assert job.text.count("was stopped for longer than --heartbeat_timeout") == 1
    (tmp_path / "end").touch()
    assert job.wait(limit=30) == 0
