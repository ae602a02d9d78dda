"""The launcher's record: when each task started and ended, and at whose wish."""

import json
import os
import pathlib
import re
import shlex
import socket
import stat
import subprocess
import sys

import pytest

from toolkit.launch.record import Record


@pytest.mark.slow
def test_starts_and_ends_are_recorded_and_tasks_know_where(launcher):
    body = """
import json, os, sys, time
me = json.loads(os.environ["TF_CONFIG"])["task"]
assert os.path.samefile(os.environ["TOOLKIT_LOGS"], [f"runs/{d}" for d in os.listdir("runs")][0])
if me["index"] == 1:
    sys.exit(3)
time.sleep(60)
"""
    code, *_ = launcher.run("--workers=2", "--grace=2", body=body)
    assert code == 3
    every = [json.loads(line) for line in (launcher.record() / "events.jsonl").read_text().splitlines()]
    assert every[0]["event"] == "job"
    assert (every[-1]["event"], every[-1]["code"]) == ("end", 3)
    events = [each for each in every if each["event"] in ("started", "ended")]
    assert [(each["event"], each["task"]) for each in events[:2]] == [("started", "worker:0"), ("started", "worker:1")]
    ends = {each["task"]: each for each in events[2:]}
    assert (ends["worker:1"]["code"], ends["worker:1"]["dismissed"]) == (3, False)
    assert ends["worker:0"]["code"] != 0
    assert ends["worker:0"]["dismissed"]
    failure = json.loads((launcher.record() / "failure.json").read_text())
    assert (failure["task"], failure["exit_code"], failure["signal"]) == ("worker:1", 3, None)
    assert failure["host"] == socket.gethostname()
    assert sorted(each["at"] for each in events) == [each["at"] for each in events]


@pytest.mark.slow
def test_logs_are_kept_apart_by_attempts_and_a_success_leaves_no_failure(launcher):
    body = "print('attempt', os.environ['TOOLKIT_ATTEMPT'])\nif os.environ['TOOLKIT_ATTEMPT'] == '1': sys.exit(1)"
    code, out, err, _ = launcher.run("--workers=1", "--max_restarts=1", body=body)
    assert code == 0, err
    assert (launcher.logs() / "worker-0.log").read_text() == "attempt 1\n"
    assert (launcher.logs() / "worker-0.attempt-2.log").read_text() == "attempt 2\n"
    assert not (launcher.record() / "failure.json").exists()
    assert re.search(r"^launch: done in \d+ s, after 1 restart; logs in runs/launch-", out, re.MULTILINE)


@pytest.mark.slow
def test_a_job_says_what_it_was_asked_for(launcher):
    launcher.run("--workers=1", "--env=MY_TOKEN=hunter2hunter2", body="print(os.environ['MY_TOKEN'])")
    file = launcher.record() / "job.json"
    found = json.loads(file.read_text())
    assert found["cwd"] == str(launcher.folder)
    assert found["spec"]["command"] == [str(launcher.script)]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (launcher.logs() / "worker-0.log").read_text() == "hunter2hunter2\n"
    subprocess.run(
        [sys.executable, "-m", *shlex.split(found["again"])], cwd=launcher.folder, check=True,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}, stdout=subprocess.DEVNULL, timeout=60,
    )  # fmt: skip
    assert len(list((launcher.folder / "runs").iterdir())) == 2


def test_a_result_of_a_start_that_was_cut_off_is_no_part_of_the_next(tmp_path):
    record = Record(tmp_path)
    record.keep_result("worker:0", b"half of")
    record.forget_result("worker:0")
    record.forget_result("worker:1")
    record.keep_result("worker:0", b"whole")
    record.keep_result("worker:0", b"")
    assert record.results() == {"worker:0": b"whole"}
