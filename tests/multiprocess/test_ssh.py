"""toolkit launch --on=ssh: real ssh servers, in two network namespaces."""

import json
import re
import signal
import time

import processes
import pytest
from ssh_hosts import lacking, launched, two_ssh_hosts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(lacking()), reason=lacking())]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with two_ssh_hosts(tmp_path_factory.mktemp("ssh") / "keys and the like") as both:
        yield both


@pytest.fixture
def odd(tmp_path):
    """A directory whose name a shell would read otherwise."""
    folder = tmp_path / "it's a $(touch ran) directory"
    folder.mkdir()
    return folder


def gone(job, seconds):
    deadline = time.monotonic() + seconds
    while job.tasks() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not job.tasks()


def waiting_script(folder):
    """A task that says that it runs, ignores no signal, and waits."""
    script = folder / "wait.py"
    script.write_text("import os, time\nprint('here', os.getpid(), flush=True)\ntime.sleep(300)\n")
    return [str(script)]


RECIPE = ["-m", "recipes.cifar_multi_worker", "--data=shapes", "--seed=3", "--run_dir=run"]


def test_arguments_variables_and_paths_arrive_as_they_are(hosts, odd):
    (odd / "tell it's.py").write_text(processes.TELL)
    copy = odd / "copied"
    with launched(hosts, odd, [f"--copy_to={copy}", processes.ODD_ENV], ["tell it's.py", *processes.ODD]) as job:
        assert job.wait(limit=60) == 0, job.text
    assert processes.told(copy)
    assert not list(odd.rglob("ran"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--on=ssh:a,nobody"], r"nobody is to run 1 of the tasks, but no agent started there .*(No route|timed out)"),
        (["--python=/no/python"], r"a is to run 1 of the tasks, but no agent started there .*No such file"),
        (
            ["--directory=/no/such"],
            r"no agent started there \(can't enter the directory /no/such: no such file or directory",
        ),
        (["--ssh_config=/no/such"], r"ssh is to reach a, but it says: Can't open user config file"),
        (["--on=ssh:localhost,a"], r"localhost means another machine there"),
    ],
)
def test_what_is_wrong_with_a_host_is_said(hosts, tmp_path, flags, said):
    with launched(hosts, tmp_path, flags, waiting_script(tmp_path)) as job:
        assert job.wait(limit=60) == 2
        assert re.search(said, job.text), job.text
        assert "Traceback" not in job.text
        assert gone(job, 5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_is_left_of_a_launcher_that_ends(hosts, tmp_path, number):
    with launched(hosts, tmp_path, ["--grace=2"], waiting_script(tmp_path)) as job:
        job.until(lambda: job.text.count("here") == 2)
        job.process.send_signal(number)
        assert job.wait(limit=30) in (-number, 128 + number)
        assert gone(job, 20)


def test_a_host_that_is_cut_off_is_named_and_its_tasks_end_by_themselves(hosts, tmp_path):
    with launched(hosts, tmp_path, ["--grace=2", "--heartbeat_timeout=5"], waiting_script(tmp_path)) as job:
        job.until(lambda: job.text.count("here") == 2)
        try:
            hosts.cut()
            assert job.wait(limit=40) == 1
            assert re.search(r"b is gone: nothing was heard of it for \d s. Its tasks were worker:1", job.text)
            assert gone(job, 20)
        finally:
            hosts.mend()


TASK = """
import json, os, signal, sys, time
from toolkit.support import status

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
print(f"start {status.attempt()} of {workers} workers", os.getpid(), flush=True)
step = 0
while not os.path.exists("finish"):
    step += 1
    status.report(state="training", step=step)
    time.sleep(0.1)
"""


def test_a_killed_worker_ends_the_job_which_starts_again(hosts, tmp_path):
    script = tmp_path / "task.py"
    script.write_text(TASK)
    with launched(hosts, tmp_path, ["--max_restarts=1"], [str(script)]) as job:
        job.until(lambda: job.text.count("start 1 of 2 workers") == 2)
        job.tasks()["worker:1"].kill()
        job.until(r"On b: worker:1 failed first: it was ended by SIGKILL")
        (file,) = (tmp_path / "logs").glob("*/failure.json")
        failure = json.loads(file.read_text())
        assert (failure["task"], failure["signal"], failure["host"]) == ("worker:1", 9, "b")
        assert re.search(rf"Its last lines, from {tmp_path}/logs/launch-\S+/worker-1.log", job.text)
        job.until(lambda: job.text.count("start 2 of 2 workers") == 2)
        (tmp_path / "finish").touch()
        assert job.wait(limit=60) == 0, job.text[-3000:]
    (file,) = (tmp_path / "logs").glob("*/events.jsonl")
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert [e["code"] for e in events if e["event"] == "ended" and e["host"] == "b"] == [-9, 0]


def test_tasks_that_make_no_progress_are_named_and_their_stacks_are_in_the_logs_here(hosts, tmp_path):
    with launched(hosts, tmp_path, ["--stall_timeout=4", "--grace=1"], waiting_script(tmp_path)) as job:
        assert job.wait(limit=60) == 1
    assert re.search(r"No task made progress for 4 s.*wait.py, line 3", job.text), job.text
    assert f"at the end of its log in {tmp_path / 'logs'}" in job.text
    assert any("wait.py" in log.read_text() for log in (tmp_path / "logs").glob("launch-*/worker-*.log"))


@pytest.mark.fault
def test_a_host_that_is_gone_is_done_without_and_taken_in_again(hosts, tmp_path):
    script = tmp_path / "task.py"
    script.write_text(TASK)
    flags = ["--min_workers=1", "--max_restarts=3", "--heartbeat_timeout=10"]
    with launched(hosts, tmp_path, flags, [str(script)]) as job:
        job.until(lambda: job.text.count("start 1 of 2 workers") == 2)
        try:
            hosts.cut()
            job.until(r"start 2 of 1 workers", limit=90)
        finally:
            hosts.mend()
        job.until(r"b is back; the tasks write a checkpoint and start again with it", limit=90)
        job.until(lambda: job.text.count("start 3 of 2 workers") == 2)
        (tmp_path / "finish").touch()
        assert job.wait(limit=60) == 0, job.text[-3000:]
    assert re.findall(r"launch: (\d) tasks? on", job.text) == ["2", "1", "2"]


@pytest.mark.fault
def test_a_host_that_is_gone_for_good_is_said(hosts, tmp_path):
    script = tmp_path / "task.py"
    script.write_text(TASK)
    flags = ["--max_restarts=3", "--heartbeat_timeout=5", "--start_timeout=6"]
    with launched(hosts, tmp_path, flags, [str(script)]) as job:
        job.until(lambda: job.text.count("start 1 of 2 workers") == 2)
        try:
            hosts.cut()
            assert job.wait(limit=90) == 1
        finally:
            hosts.mend()
    assert re.search(r"b didn't answer for \d+ s; the last checkpoint is kept", job.text)


@pytest.mark.long
def test_the_recipe_trains_on_both(hosts, tmp_path):
    with launched(hosts, tmp_path, [], [*RECIPE, "--epochs=1", "--steps_per_epoch=3"]) as job:
        assert job.wait(limit=150) == 0, job.text[-3000:]
    assert len(set(re.findall(r"Done: .*weights (\w+)", job.text))) == 1
    assert re.search(r"worker:\d's port \d+.*Let a firewall admit these hosts only: a, b", job.text)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["replicas"] == 2
