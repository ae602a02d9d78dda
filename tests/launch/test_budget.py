"""Restarts within a number, each after a longer wait."""

from toolkit.launch.supervisor.budget import Budget


def test_no_more_than_were_asked_for_earlier_ones_included():
    budget = Budget(2, used=1)
    assert (budget.take(), budget.words, budget.delay) == (True, "restart 2 of 2", 1)
    assert not budget.take()
    assert budget.words == "restart 2 of 2"


def test_waits_double_up_to_a_minute():
    budget = Budget(20)
    waits = [budget.take() and budget.delay for _ in range(10)]
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_none():
    assert not Budget(0).take()
