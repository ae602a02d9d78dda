"""Keras's own loops under parameter servers, in real processes, undisturbed and killed in mid-step."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import processes
import psutil
import pytest

pytestmark = pytest.mark.slow

SCRIPT = pathlib.Path(__file__).with_name("served.py")


class Job:
    """A launched job whose tasks can be found and killed."""

    def __init__(self, folder, flags, command):
        self.folder = folder
        self.log = folder / "launch.out"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "toolkit", "launch", f"--log_dir={folder / 'logs'}", *flags, *command],
                env={**os.environ, "PYTHONPATH": str(processes.ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self):
        return self.log.read_text(errors="replace")

    def until(self, pattern, *, limit=60):
        """Waits for a line."""
        deadline = time.monotonic() + limit
        while not re.search(pattern, self.text):
            assert self.process.poll() is None, self.text[-3000:]
            assert time.monotonic() < deadline, f"no {pattern!r} in {limit} s\n{self.text[-3000:]}"
            time.sleep(0.02)

    def kill(self, task):
        """Ends a task at once; returns when."""
        (found,) = [child for child in psutil.Process(self.process.pid).children() if self._is(child, task)]
        found.send_signal(signal.SIGKILL)
        return time.monotonic()

    def _is(self, process, task):
        with contextlib.suppress(psutil.Error):
            return process.environ().get("TOOLKIT_STATUS", "").startswith(f"{task}@")
        return False

    def wait(self, *, limit):
        return self.process.wait(limit)


@pytest.fixture
def job(tmp_path):
    started = []

    def start(*flags, tasks=processes.SERVED, command=None, **options):
        options = {"epochs": 2, "steps": 60, **options}
        given = command or [str(SCRIPT), "out.json", json.dumps(options)]
        started.append(Job(tmp_path, [*tasks, *flags], given))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()
            one.process.wait(30)


def result(folder):
    return json.loads((folder / "out.json").read_text())


def counted(seen, *, epochs=2, steps=60, batch=16):
    """What is exact whatever the workers did."""
    assert seen["iterations"] == epochs * steps
    assert seen["history"]["seen"] == [steps * batch] * epochs
    assert seen["rates"] == pytest.approx([0.01 - 0.009 * (n + 1) / epochs for n in range(epochs)], rel=1e-5)
    assert sum(seen["staleness"].values()) == seen["updates"]
    assert seen["evaluated"]["seen"] == 203
    assert seen["evaluated"]["accuracy"] * 203 == pytest.approx(round(seen["evaluated"]["accuracy"] * 203), abs=1e-3)
    assert seen["predicted"] == seen["here"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"numbered": False, "servers": {"variables": "sharded", "min_shard_bytes": 512, "steps_per_dispatch": 4}},
        {"numbered": False, "servers": {"synchronous": True}},
        {"servers": {"max_staleness": 1, "variables": "balanced"}},
    ],
    ids=["free", "sharded, handed out, 4 at once", "rounds, handed out", "bounded"],
)
def test_every_step_counts_once_under_three_workers(job, tmp_path, options):
    run = job(tasks=("--chief", "--workers=3", "--ps=2"), **options)
    assert run.wait(limit=120) == 0, run.text[-3000:]
    seen = result(tmp_path)
    counted(seen)
    assert seen["updates"] == 120
    oldest = max(map(int, seen["staleness"]))
    servers = options.get("servers", {})
    if servers.get("synchronous"):
        assert oldest == 0
    else:
        assert oldest >= 1
        assert oldest <= servers.get("max_staleness", 1000)
    sharded = servers.get("variables") == "sharded"
    load = [size for task, size in seen["bytes_by_task"].items() if task.startswith("ps")]
    assert (max(load) < 1.2 * min(load)) == sharded  # Whole, the hidden layer's kernel outweighs all others.


def test_a_killed_worker_costs_nothing_and_its_successor_gets_steps(job, tmp_path):
    run = job("--max_restarts=1", epochs=3, steps=400, width=1024)
    run.until(r"batch 60\n")
    run.kill("worker:1")
    assert run.wait(limit=150) == 0, run.text[-3000:]
    assert "worker:1 was ended by SIGKILL; starting it again, restart 1 of 1" in run.text
    seen = result(tmp_path)
    counted(seen, epochs=3, steps=400)
    assert seen["updates"] == 1200
    assert seen["dispatches_run_again"] >= 1
    assert seen["steps_by_worker"]["worker:1"] > 100


def test_a_killed_worker_is_done_without_and_the_chief_ends_by_itself(job, tmp_path):
    run = job(epochs=2, steps=300, width=512)
    run.until(r"batch 60\n")
    run.kill("worker:0")
    assert run.wait(limit=120) == 0, run.text[-3000:]
    assert "worker:0 was ended by SIGKILL; the job goes on without it" in run.text
    counted(result(tmp_path), epochs=2, steps=300)


def test_a_killed_ps_is_named_within_30_seconds(job):
    run = job(epochs=2, steps=3000, width=512)
    run.until(r"batch 60\n")
    killed = run.kill("ps:1")
    assert run.wait(limit=60) != 0
    assert time.monotonic() - killed < 30
    assert "ps:1 failed first: it was ended by SIGKILL" in run.text


@pytest.mark.parametrize("task", ["ps:0", "chief:0"])
def test_with_restarts_the_job_comes_back_from_its_last_checkpoint(job, tmp_path, task):
    flags = ["--epochs=3", "--steps_per_epoch=30", "--checkpoint_steps=10", "--run_dir=it's", "--data=shapes"]
    run = job("--max_restarts=1", command=["-m", "recipes.cifar_parameter_server", *flags])
    run.until(r"epoch 1/3: ", limit=120)
    killed = run.kill(task)
    run.until(r"Resumed after step \d+", limit=60)
    assert time.monotonic() - killed < 45
    assert run.wait(limit=200) == 0, run.text[-3000:]
    assert "starting the job again, restart 1 of 1" in run.text
    summary = json.loads((tmp_path / "it's" / "summary.json").read_text())
    assert (summary["steps"], summary["epochs"], summary["status"]) == (90, 3, "completed")
    assert summary["resumed_from_step"] >= 30
