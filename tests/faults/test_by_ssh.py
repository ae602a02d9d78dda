"""Jobs by ssh that lose a task, or a host: they go on, with fewer hosts too, and sharded layers are cut again."""

import contextlib
import json
import re
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


SHORT = ["--data=shapes", "--epochs=2", "--steps_per_epoch=20", "--checkpoint_steps=5", "--global_batch_size=32"]


def newest(folder):
    return max((int(path.name.split("-")[1]) for path in (folder / "run" / "checkpoints").glob("step-*")), default=0)


def run(hosts, folder, *flags, disturb=None):
    """The digest of the weights that the recipe ends with."""
    folder.mkdir()
    with launched(hosts, folder, flags, ["-m", "recipes.cifar_multi_worker", *SHORT, "--run_dir=run"]) as job:
        job.LIMIT = 120
        if disturb:
            disturb(job)
        assert job.wait(limit=200) == 0, job.text[-3000:]
    return json.loads((folder / "run" / "summary.json").read_text())["weights_sha256"]


def test_a_killed_worker_costs_no_bit(hosts, tmp_path, measured):
    def kill(job):
        job.until(lambda: newest(job.folder) > 5)
        began, before = time.monotonic(), newest(job.folder)
        job.tasks()["worker:1"].kill()
        job.until(r"On b: worker:1 failed first: it was ended by SIGKILL")
        down = time.monotonic() - began
        job.until(lambda: newest(job.folder) > before)
        measured(
            "SIGKILL of worker:1 on another host, by ssh",
            seconds_to_group_down=down,
            seconds_to_steps_again=time.monotonic() - began,
        )

    disturbed = run(hosts, tmp_path / "disturbed", "--max_restarts=1", disturb=kill)
    assert disturbed == run(hosts, tmp_path / "undisturbed")


@contextlib.contextmanager
def beside_servers(hosts, folder):
    """A job with a ps and a worker on the second host, once it has a checkpoint; it ends well after the block."""
    flags = ["--on=ssh:a:2,b:2", "--chief", "--workers=2", "--ps=1", "--max_restarts=1"]
    with launched(hosts, folder, flags, ["-m", "recipes.cifar_parameter_server", *SHORT, "--run_dir=run"]) as job:
        job.LIMIT = 150
        job.until(lambda: newest(folder) > 5)
        yield job
        assert job.wait(limit=250) == 0, job.text[-3000:]


def test_parameter_servers_on_other_hosts_go_on_after_a_kill(hosts, tmp_path, measured):
    with beside_servers(hosts, tmp_path) as job:
        began, before = time.monotonic(), newest(tmp_path)
        job.tasks()["ps:0"].kill()
        job.until(r"On b: ps:0 failed first: it was ended by SIGKILL")
        down = time.monotonic() - began
        job.until(lambda: newest(tmp_path) > before)
        again = time.monotonic() - began
        measured("SIGKILL of ps:0 on another host, by ssh", seconds_to_group_down=down, seconds_to_steps_again=again)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 40
    assert summary["resumed_from_step"] >= 5


def test_a_worker_beside_parameter_servers_is_started_again_on_its_host(hosts, tmp_path, measured):
    with beside_servers(hosts, tmp_path) as job:
        began, before = time.monotonic(), newest(tmp_path)
        job.tasks()["worker:1"].kill()
        job.until(r"worker:1 was ended by SIGKILL; starting it again, restart 1 of 1")
        job.until(lambda: newest(tmp_path) > before)
        measured(
            "SIGKILL of a parameter server job's worker on another host, by ssh",
            seconds_to_steps_again=time.monotonic() - began,
        )
    assert "starting the job again" not in job.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 40
    assert "resumed_from_step" not in summary or not summary["resumed_from_step"]


def test_two_hosts_then_one_then_two(hosts, tmp_path, measured):
    flags = ["--min_workers=1", "--max_restarts=2"]
    with launched(hosts, tmp_path, flags, [*RECIPE, *FLAGS]) as job:
        job.LIMIT = 200
        job.until(lambda: newest(tmp_path) > 0)
        try:
            began = time.monotonic()
            hosts.cut()
            job.until(r"b is gone: nothing was heard of it")
            noticed = time.monotonic() - began
            job.until(r"launch: 1 task on 1 host, without b")
            before = newest(tmp_path)
            job.until(lambda: newest(tmp_path) > before)
            without = time.monotonic() - began
        finally:
            hosts.mend()
        began = time.monotonic()
        job.until(r"b is back; the tasks write a checkpoint and start again with it")
        job.until(lambda: len(re.findall(r"launch: 2 tasks on 2 hosts", job.text)) == 2)
        before = newest(tmp_path)
        job.until(lambda: newest(tmp_path) > before)
        measured(
            "a host cut off, and back, --min_workers=1 --heartbeat_timeout=15",
            seconds_to_notice=noticed,
            seconds_to_steps_again=without,
            seconds_to_take_in=time.monotonic() - began,
        )
        job.process.terminate()
        assert job.wait(limit=60) == 143, job.text[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["replicas"], summary["global_batch_size"]) == ("interrupted", 2, 32)
    assert 0 < summary["resumed_from_step"] <= before < summary["steps"] == newest(tmp_path)
