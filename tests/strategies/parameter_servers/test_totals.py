"""What the chief counts while steps are under way, loss scales among it."""

import types

import keras
import numpy as np
import pytest

from toolkit.strategies.parameter_servers import rounds
from toolkit.strategies.parameter_servers.session import Counters
from toolkit.strategies.step.rows import ALIKE, MEAN, ROWS, Of, Rows


@pytest.fixture
def counters():
    """Counters of an optimizer with a loss scale of 64, which is doubled after four finite steps."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=64.0, dynamic_growth_steps=4)
    optimizer.build([keras.Variable([1.0])])
    kept = [optimizer.iterations, optimizer.dynamic_scale, optimizer.step_counter]
    model = types.SimpleNamespace(optimizer=optimizer)
    seeds = keras.random.SeedGenerator(1)
    made = Counters(types.SimpleNamespace(told=frozenset(), counters=kept, model=model, seeds=seeds))
    made.note([1, 1, 1], [0, 1, 2])
    made.after(0)
    return made


def values(counters, steps):
    return [float(value) for value in counters.after(steps)]


def dispatched(counters, before, after, steps):
    counters.take(np.array([*before, *after], dtype=float), steps)


def test_a_step_that_overflowed_is_not_counted(counters):
    dispatched(counters, (0, 64, 0), (1, 64, 1), 1)
    dispatched(counters, (1, 64, 1), (1, 32, 0), 1)
    assert values(counters, 2) == [1, 32, 0]
    dispatched(counters, (1, 32, 0), (4, 64, 0), 4)  # One of four overflowed, the others' scale was doubled again.
    assert values(counters, 6) == [4, 64, 0]
    counters.set_after(6)
    assert values(counters, 0) == [4, 64, 0]


def test_two_workers_that_overflow_at_once_halve_the_scale_once(counters):
    dispatched(counters, (0, 64, 0), (0, 32, 0), 1)
    dispatched(counters, (0, 64, 0), (0, 32, 0), 1)
    assert values(counters, 2) == [0, 32, 0]


def test_a_late_finite_step_says_nothing_of_a_scale_that_is_another_by_now(counters):
    dispatched(counters, (0, 64, 0), (0, 32, 0), 1)
    dispatched(counters, (0, 64, 0), (1, 64, 1), 1)
    assert values(counters, 2) == [1, 32, 0]


def test_steps_of_several_workers_bring_the_scale_to_where_the_next_doubles_it(counters):
    for _ in range(5):
        dispatched(counters, (0, 64, 0), (1, 64, 1), 1)
    assert values(counters, 5) == [5, 64, 3]
    dispatched(counters, (5, 64, 3), (6, 128, 0), 1)
    assert values(counters, 6) == [6, 128, 0]


def test_without_branches_nothing_is_told(counters):
    counters.note([1, 0, 0], [])
    counters.take(np.zeros(0), 3)
    assert values(counters, 3) == [3, 64, 0]
    assert counters.branched_after(3) == {}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Rows(Of.SUM), [8.0, 10.0]), (MEAN, [3.5, 4.5]), (ROWS, [2.0, 3.0, 6.0, 7.0]), (ALIKE, [2.0, 3.0])],
    ids=["a sum", "a mean", "rows", "alike"],
)
def test_what_shares_return_is_put_together_by_its_kind(kind, expected):
    """Of two shares, the first has five of eight examples."""
    parts = [np.array([2.0, 3.0], "float32"), np.array([6.0, 7.0], "float32")]
    found = rounds._together(kind, parts, [5 / 8, 3 / 8])
    assert found.dtype == np.float32
    assert found.tolist() == expected
