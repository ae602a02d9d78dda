"""Jobs that outlive their terminal, and faults of those who watch them and of their supervisor."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import time

import faulty
import limits
import processes
import psutil
import pytest

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


class Detached:
    """The multi-worker recipe, launched with --detach."""

    def __init__(self, folder):
        self.folder = folder
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(processes.ROOT),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "XDG_STATE_HOME": str(folder / "state"),
        }
        tasks, command = faulty.RECIPES["workers"]
        what = ["--detach", "--log_dir=logs", *tasks, *command, "--epochs=1000", "--run_dir=run"]
        said = self.toolkit("launch", "--show=all", *what)
        self.id = re.search(r"job (\S+) runs", said)[1]
        entry = json.loads((folder / "state" / "toolkit" / "jobs" / f"{self.id}.json").read_text())
        self.supervisor = psutil.Process(entry["pid"])

    def toolkit(self, *arguments):
        return processes.preloaded.run(
            [sys.executable, "-m", "toolkit", *arguments], env=self.environ, cwd=self.folder, timeout=90
        ).stdout

    def step(self):
        found = (self.folder / "run" / "checkpoints").glob("step-*")
        return max((int(path.name.split("-")[1]) for path in found), default=0)

    def until(self, holds, *, limit=90):
        """Seconds until something holds."""
        began = time.monotonic()
        while not holds():
            assert time.monotonic() - began < limits.patient(limit), next(
                (self.folder / "logs").glob("*/launcher.log")
            ).read_text()[-3000:]
            time.sleep(0.02)
        return time.monotonic() - began

    def attach(self):
        """`toolkit attach` in a terminal of its own: its process, and the terminal's other end."""
        master, slave = pty.openpty()
        watching = subprocess.Popen(
            ["setsid", "--ctty", "--wait", sys.executable, "-m", "toolkit", "attach", self.id],
            env={**self.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
            cwd=self.folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        return watching, master

    def end(self):
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (*self.supervisor.children(recursive=True), self.supervisor):
                process.kill()


@pytest.fixture
def job(tmp_path):
    made = Detached(tmp_path)
    yield made
    made.end()


def test_a_terminal_that_is_closed_costs_a_detached_job_nothing(job, measured):
    job.until(lambda: job.step() > 0)
    watching, master = job.attach()
    seen = b""
    while b"epoch" not in seen:
        seen += os.read(master, 1 << 16)
    os.close(master)  # The window is closed: SIGHUP to whoever is in it.
    assert watching.wait(20) == 129
    before = job.step()
    again = job.until(lambda: job.step() > before)
    assert "running" in job.toolkit("jobs")
    began = time.monotonic()
    assert "stopped" in job.toolkit("stop", job.id)
    measured(
        "a detached job is watched, and the terminal closed; then `toolkit stop`",
        seconds_to_steps_again=again,
        seconds_to_group_down=time.monotonic() - began,
    )
    assert json.loads((job.folder / "run" / "summary.json").read_text())["status"] == "interrupted"


def test_a_killed_supervisor_leaves_no_task_and_its_job_is_said_to_be_dead(job, measured):
    job.until(lambda: job.step() > 0)
    watching, master = job.attach()
    tasks = job.supervisor.children(recursive=True)
    began = time.monotonic()
    job.supervisor.kill()
    _, alive = psutil.wait_procs(tasks, timeout=15)
    down = time.monotonic() - began
    assert alive == []
    seen = b""
    while b"is dead" not in seen and time.monotonic() - began < limits.patient(20):
        seen += os.read(master, 1 << 16)
    measured(
        "SIGKILL of a detached job's launcher, while `toolkit attach` follows it",
        seconds_to_notice=time.monotonic() - began,
        seconds_to_group_down=down,
    )
    assert watching.wait(20) == 1
    os.close(master)
    assert "dead" in job.toolkit("jobs")
