"""What follows from what has happened to a job: the whole table, without a process."""

import pathlib
import types

import pytest

from toolkit.cluster import Cluster
from toolkit.errors import JobStopped, LaunchError, TaskFailed
from toolkit.launch import JobSpec
from toolkit.launch.record import Record
from toolkit.launch.supervisor.decide import TABLE, Budget, Next, What, decide, what_ended
from toolkit.launch.supervisor.task_group import TaskGroup

FAILED = TaskFailed("worker:1 failed first", code=137)
REFUSED = TaskFailed("worker:1 failed first", code=2)
LAUNCH = LaunchError(asked="a", found="b", remedy="c")
STOPPED = JobStopped(15)

ENDS = [
    # What an attempt ended with, whether Slurm is to queue the job again, and what follows with and without a restart.
    (None, False, Next.END, Next.END),
    (FAILED, False, Next.RESTART, Next.FAIL),
    (REFUSED, False, Next.FAIL, Next.FAIL),
    (LAUNCH, False, Next.FAIL, Next.FAIL),
    (STOPPED, False, Next.STOP, Next.STOP),
    (FAILED, True, Next.REQUEUE, Next.REQUEUE),
    (STOPPED, True, Next.REQUEUE, Next.REQUEUE),
]


@pytest.mark.parametrize(("error", "out", "left", "none"), ENDS)
def test_what_follows_from_an_attempts_end(error, out, left, none):
    what = what_ended(error, out=out)
    spent = (Budget(1, used=1, in_vain=1), Budget(5, in_all=1, used=1))
    assert (decide(what, Budget(1)), *(decide(what, each) for each in spent)) == (left, none, none)


def test_a_job_that_is_done_does_not_start_again_with_a_host_that_is_back(tmp_path, monkeypatch):
    for name in ("_start", "_act", "_finish", "_clear"):
        monkeypatch.setattr(TaskGroup, name, lambda _: None)
    monkeypatch.setattr(TaskGroup, "say", lambda *_: None)
    group = TaskGroup(
        JobSpec(command=("train.py",)),
        agents={},
        tasks={},
        cluster=Cluster({"worker": ["a:1", "b:1"]}),
        number=2,
        record=Record(tmp_path),
        display=types.SimpleNamespace(live=None),
        received=[],
        asked_for_stacks=[],
        budget=Budget(1),
        since=0.0,
        before={},
        back=lambda: "b",
    )
    assert group.run()


@pytest.mark.parametrize("what", What, ids=lambda what: what.name)
def test_only_what_is_said_to_count_counts(what):
    budget = Budget(3, used=1, in_vain=1)
    follows = decide(what, budget)
    assert (budget.used, budget.in_vain) == (1 + ("that counts" in follows.value),) * 2
    spent = Budget(1, used=1, in_vain=1)
    decide(what, spent)
    assert spent.used == 1, "no more than were asked for, earlier ones included"


def test_progress_gives_all_restarts_back_but_those_in_all():
    budget = Budget(2, in_all=5)
    for step in (3, 6, 9, 12):
        budget.advance({"step": step, "epoch": 0})
        assert decide(What.FAILED, budget) is Next.RESTART
        assert budget.delay == 0
    assert budget.words == "restart 4, 1 of 2 since the last progress"
    budget.advance({"step": 12, "epoch": 0})
    assert decide(What.FAILED, budget) is Next.RESTART
    assert budget.words == "restart 5, 2 of 2 since the last progress"
    budget.advance({"step": 11})
    assert decide(What.FAILED, budget) is Next.FAIL
    assert (
        budget.why_none
        == "2 restarts in a row brought no progress beyond the last reported step, 12 (--max_restarts=2)."
    )
    budget.advance({"step": 11, "epoch": 1})  # A script that resumes may count its steps from 0.
    assert decide(What.FAILED, budget) is Next.FAIL
    assert budget.why_none == "--max_total_restarts=5 allows no more."


def test_another_launcher_of_the_job_counts_on():
    first = Budget(2, used=7, in_vain=1, reached={"step": 40})
    again = Budget(2, **first.facts)
    again.advance({"step": 40})
    assert [decide(What.FAILED, again) for _ in range(2)] == [Next.RESTART, Next.FAIL]


def test_all_has_its_row():
    assert set(TABLE) == set(What)
    assert {each for row in TABLE.values() for each in row} == set(Next)


def test_waits_double_up_to_a_minute():
    budget = Budget(20)
    waits = [decide(What.FAILED, budget) and budget.delay for _ in range(10)]
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert budget.words == "restart 10 of 20"


def test_the_manual_has_the_same_table():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    shown = [line for line in page.splitlines() if line.startswith("| ")]
    rows = [f"| {what.value} | {left.value} | {none.value} |" for what, (left, none) in TABLE.items()]
    first = shown.index(rows[0])
    assert shown[first : first + len(rows)] == rows
