"""The launcher's record: when each task started and ended, and at whose wish."""

import json
import socket

import pytest


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
    events = [json.loads(line) for line in (launcher.logs() / "events.jsonl").read_text().splitlines()]
    assert [(each["event"], each["task"]) for each in events[:2]] == [("started", "worker:0"), ("started", "worker:1")]
    ends = {each["task"]: each for each in events[2:]}
    assert (ends["worker:1"]["code"], ends["worker:1"]["dismissed"]) == (3, False)
    assert ends["worker:0"]["code"] != 0
    assert ends["worker:0"]["dismissed"]
    failure = json.loads((launcher.logs() / "failure.json").read_text())
    assert (failure["task"], failure["exit_code"], failure["signal"]) == ("worker:1", 3, None)
    assert failure["host"] == socket.gethostname()
    assert sorted(each["at"] for each in events) == [each["at"] for each in events]
