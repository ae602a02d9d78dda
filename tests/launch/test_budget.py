"""Restarts within a window, each after a longer wait."""

from toolkit.launch.supervisor.budget import Budget


def test_failures_of_long_ago_are_forgiven():
    now = [0.0]
    budget = Budget(2, window=100, clock=lambda: now[0])
    assert (budget.take(), budget.words, budget.delay) == (True, "restart 1 of 2", 0)
    now[0] = 60
    assert (budget.take(), budget.words, budget.delay) == (True, "restart 2 of 2", 1)
    assert not budget.take()
    now[0] = 101
    assert (budget.take(), budget.words) == (True, "restart 2 of 2")
    assert not budget.take()


def test_waits_double_up_to_a_minute():
    budget = Budget(20, window=1e9, clock=lambda: 0.0)
    waits = [budget.take() and budget.delay for _ in range(10)]
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_none():
    assert not Budget(0, window=1).take()
