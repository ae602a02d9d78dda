"""Restarts are counted while they bring no progress: real processes that fail, and go on or begin again."""

import json

import processes
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
    why = "2 restarts in a row brought no progress beyond the last reported step, 6 (--max_restarts=2)."
    assert f"launch: the job doesn't start again: {why}" in out
    events = [json.loads(line) for line in (launcher.record() / "events.jsonl").read_text().splitlines()]
    assert [event["in_vain"] for event in events if event["event"] == "restart"] == [1, 2]


@pytest.mark.slow
def test_restarts_in_all_have_a_limit_if_it_is_asked_for(launcher):
    code, out, _, _ = launcher.run("--workers=1", "--max_restarts=2", "--max_total_restarts=3", body=PROGRESS)
    assert code == 5
    assert "launch: the job doesn't start again: --max_total_restarts=3 allows no more." in out
    assert (launcher.folder / "done").read_text() == "12"


SPENDING = """
from toolkit.support import goodput, status
done = int(open("done").read()) if os.path.exists("done") else 0
account = goodput.Account()
for step in range(done + 1, 13):
    time.sleep(0.05)
    account.mark("progress" if account.made else "first_step", steps=1)
    if step % 4 == 0:
        with open("done", "w") as file:
            file.write(str(step))
        status.report(checkpoint=step, checkpoints="here")
    status.report(state="training", step=step, spent=account.own, made=account.made)
    if step in (3, 6) and not os.path.exists(f"failed-{step}"):
        open(f"failed-{step}", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    open("before", "w").write(os.environ["TOOLKIT_SPENT"])
"""


@pytest.mark.slow
def test_a_job_says_which_share_of_its_time_made_progress(launcher, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(launcher.folder / "state"))
    code, out, err, took = launcher.run("--workers=1", "--max_restarts=2", limit=120, body=SPENDING)
    assert code == 0, out + err
    (job,) = json.loads(processes.python(launcher.folder, "-m", "toolkit", "jobs", "--json").stdout)
    seconds = job["goodput"]["seconds"]
    assert set(seconds) == {"starting", "first_step", "restarting", "done_twice", "progress", "other"}
    assert job["goodput"]["share"] == pytest.approx(seconds["progress"] / sum(seconds.values()), abs=1e-4)
    assert seconds["progress"] + seconds["done_twice"] >= 0.05 * (2 + 5 + 7)
    assert 0.05 * 3 <= seconds["done_twice"] < seconds["progress"]
    assert sum(seconds.values()) <= took
    told = json.loads((launcher.folder / "before").read_text())  # What the last attempt knew of those before.
    assert told["done_twice"] == seconds["done_twice"]
