"""What follows from what has happened to a job: the whole table, without a process."""

import pathlib

import pytest

from toolkit.errors import JobStopped, LaunchError, TaskFailed
from toolkit.launch.supervisor.decide import TABLE, Budget, Next, What, decide, what_ended

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
    assert (decide(what, Budget(1)), decide(what, Budget(1, used=1))) == (left, none)


@pytest.mark.parametrize("what", What, ids=lambda what: what.name)
def test_only_what_is_said_to_count_counts(what):
    budget = Budget(3, used=1)
    follows = decide(what, budget)
    assert budget.used == 1 + ("that counts" in follows.value)
    spent = Budget(1, used=1)
    decide(what, spent)
    assert spent.used == 1, "no more than were asked for, earlier ones included"


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
