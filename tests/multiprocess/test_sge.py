"""Jobs of two hosts under a real Grid Engine."""

import re
import signal
import sys
import tempfile
import time

import limits
import processes
import pytest
from sge_cluster import HOSTS, grid_engine, lacking

REASON = lacking()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.skipif(bool(REASON), reason=REASON)]
OWN = {"PYTHONPATH": str(processes.ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
# Asked to end, it keeps how far it has come; started again, it goes on from there.
COUNTS = """
import os, pathlib, signal, sys, time
kept = pathlib.Path(f"kept-{os.environ['RANK']}")
number = int(kept.read_text()) if kept.exists() else 0
print("begins at", number, "on", os.uname().nodename, flush=True)
def end(*_):
    kept.write_text(str(number))
    print("kept", number, flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
last = int(sys.argv[1])
while number < last:
    number += 1
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="sge-") as folder, grid_engine(folder) as made:
        yield made


class Launched(processes.Job):
    """`toolkit launch --on=sge`, with what it has printed so far."""

    def __init__(self, cluster, folder, *flags):
        self._cluster = cluster
        super().__init__(
            folder,
            ["--on=sge", "--nodes=2", "--pe=one_each"],
            flags,
            environ={**cluster.environ, **OWN, "XDG_STATE_HOME": str(folder / "state")},
            before=cluster.on(HOSTS[0]),
        )

    @property
    def job(self):
        return re.search(r"launch: Grid Engine job (\S+), 2 tasks on 2 nodes", self.text)[1]

    def end(self, limit=60):
        try:
            return self.process.wait(limits.patient(limit))
        finally:
            self.process.kill()
            self.process.wait()
            self._cluster.empty()


def test_a_job_is_submitted_followed_and_completed_or_fails_with_its_cause(cluster, tmp_path):
    (tmp_path / "it.py").write_text(COUNTS)
    job = Launched(cluster, tmp_path, "it.py", "3")
    assert job.end() == 0, job.text
    assert re.search(r"^launch: done in ", job.text, re.MULTILINE)
    assert set(re.findall(r"begins at 0 on (\S+)", job.text)) == set(HOSTS)
    (tmp_path / "it.py").write_text("import os\nif os.environ['RANK'] == '1': raise ValueError('no such column')\n")
    job = Launched(cluster, tmp_path, "it.py")
    assert job.end() == 1, job.text
    assert "worker:1 failed first: it ended with exit code 1" in job.text
    assert "ValueError: no such column" in job.text


def test_a_cancelled_job_has_time_for_a_checkpoint(cluster, tmp_path):
    (tmp_path / "it.py").write_text(COUNTS)
    job = Launched(cluster, tmp_path, "it.py", "10000")
    job.until(lambda: len(re.findall("begins at 0", job.text)) == 2)
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130, job.text
    assert f"cancelling Grid Engine job {job.job}" in job.text
    assert sorted(path.name for path in tmp_path.glob("kept-*")) == ["kept-0", "kept-1"]


def test_a_detached_job_is_listed_and_stopped(cluster, tmp_path):
    (tmp_path / "it.py").write_text(COUNTS)
    environ = {**OWN, "XDG_STATE_HOME": str(tmp_path / "state")}

    def toolkit(*arguments):
        done = cluster.run(sys.executable, "-m", "toolkit", *arguments, limit=90, **environ)
        return done.stdout + done.stderr

    what = ("--on=sge", "--nodes=2", "--pe=one_each", "--detach", f"--log_dir={tmp_path / 'logs'}")
    said = toolkit("launch", *what, str(tmp_path / "it.py"), "10000")
    number = re.search(r"launch: Grid Engine job (\S+), 2 tasks on 2 nodes", said)[1]
    deadline = time.monotonic() + limits.patient(40)
    while not (logs := list(tmp_path.glob("logs/*/worker-1.log"))) or "begins" not in logs[0].read_text():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert re.search(rf"running, Grid Engine {number} .*it.py", toolkit("jobs").replace("\n", " "))
    assert re.search(r": stopped", toolkit("stop", number))
    cluster.empty()


@pytest.mark.parametrize("by", ["the time limit", "a suspension"])
def test_a_job_that_gets_notice_is_queued_again_and_goes_on(cluster, tmp_path, by):
    (tmp_path / "it.py").write_text(COUNTS)
    flags = ["--time=0:20", "--notice=15"] if by == "the time limit" else []
    job = Launched(cluster, tmp_path, *flags, "it.py", "80")
    job.until(lambda: len(re.findall("begins at 0", job.text)) == 2)
    if by == "a suspension":
        time.sleep(1)
        cluster.run("qmod", "-sj", job.job)
    job.until("queueing the job again: its time was nearly up")
    job.until(lambda: len(re.findall(r"begins at [1-9]\d* on", job.text)) >= 2)
    assert job.end() == 0, job.text
    assert len(re.findall("kept", job.text)) >= 2
