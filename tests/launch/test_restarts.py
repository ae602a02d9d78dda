"""Restarts are counted while they bring no progress: real processes that fail, and go on or begin again."""

import json

import pytest

PROGRESS = """
from toolkit.support import status
done = int(open("done").read()) if os.path.exists("done") else 0
for step in range(done + 1, 34):
    status.report(state="training", step=step)
    with open("done", "w") as file:
        file.write(str(step))
    if step % 3 == 0 and step < 33:
        sys.exit(5)
"""


@pytest.mark.slow
def test_a_job_with_progress_between_its_faults_goes_on(launcher):
    code, out, err, _ = launcher.run("--workers=1", "--max_restarts=2", limit=120, body=PROGRESS)
    assert code == 0, out + err
    assert "restart 1 of 2" in out
    assert "restart 10, 1 of 2 since the last progress" in out
    assert "after 10 restarts" in out


@pytest.mark.slow
def test_a_job_without_progress_ends_and_says_why(launcher):
    body = PROGRESS.replace("done + 1, 34", "4, 34")  # It never goes on from where it was.
    code, out, _, _ = launcher.run("--workers=1", "--max_restarts=2", body=body)
    assert code == 5
    why = "2 restarts in a row brought no progress beyond step 6 (--max_restarts=2)."
    assert f"launch: the job doesn't start again: {why}" in out
    events = [json.loads(line) for line in (launcher.record() / "events.jsonl").read_text().splitlines()]
    assert [event["in_vain"] for event in events if event["event"] == "restart"] == [1, 2]


@pytest.mark.slow
def test_restarts_in_all_have_a_limit_if_it_is_asked_for(launcher):
    code, out, _, _ = launcher.run("--workers=1", "--max_restarts=2", "--max_total_restarts=3", body=PROGRESS)
    assert code == 5
    assert "launch: the job doesn't start again: --max_total_restarts=3 allows no more." in out
    assert (launcher.folder / "done").read_text() == "12"
