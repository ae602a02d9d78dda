"""A job that goes on with fewer hosts, and takes them in again: by ssh, with sharded layers, which are cut anew."""

import json
import time

import pytest
from ssh_hosts import lacking, launched, two_ssh_hosts

pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(lacking()), reason=lacking()),
]

RECIPE = ["-m", "recipes.cifar_hybrid", "--units=64", "--data=shapes", "--epochs=1", "--steps_per_epoch=100000"]
FLAGS = ["--checkpoint_steps=10", "--global_batch_size=32", "--run_dir=run"]


@pytest.fixture
def hosts(tmp_path):
    with two_ssh_hosts(tmp_path / "ssh") as both:
        yield both


def newest(folder):
    return max((int(path.name.split("-")[1]) for path in (folder / "run" / "checkpoints").glob("step-*")), default=0)


def test_two_hosts_then_one_then_two(hosts, tmp_path, measured):
    flags = ["--min_workers=1", "--max_restarts=2"]
    with launched(hosts, tmp_path, flags, [*RECIPE, *FLAGS]) as job:
        job.LIMIT = 200
        job.until(lambda: newest(tmp_path) > 0)
        try:
            began = time.monotonic()
            hosts.cut()
            job.until(r"launch: 1 tasks on 1 hosts, without b")
            before = newest(tmp_path)
            job.until(lambda: newest(tmp_path) > before)
            without = time.monotonic() - began
        finally:
            hosts.mend()
        began = time.monotonic()
        job.until(r"b is back; the tasks write a checkpoint and start again with it")
        job.until(lambda: job.text.count("2 workers, 2 replicas") == 4)
        before = newest(tmp_path)
        job.until(lambda: newest(tmp_path) > before)
        measured(
            "a host gone and back, --min_workers=1 --heartbeat_timeout=15",
            seconds_to_steps_without_it=without,
            seconds_to_steps_with_it_again=time.monotonic() - began,
        )
        job.process.terminate()
        assert job.wait(limit=60) == 143, job.text[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["replicas"], summary["global_batch_size"]) == ("interrupted", 2, 32)
    assert 0 < summary["resumed_from_step"] <= before < summary["steps"] == newest(tmp_path)
