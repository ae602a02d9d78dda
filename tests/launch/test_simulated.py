"""The supervisor's own decisions under a simulated clock: hundreds of schedules of faults, and what must hold in each.

A seed decides everything: hosts, delays, doubled messages, faults far apart, at once, and within a recovery. More
schedules: TOOLKIT_SIMULATED_SCHEDULES=20000 python -m pytest tests/launch/test_simulated.py
"""

import itertools
import os

import pytest
import simulation

SCHEDULES = int(os.environ.get("TOOLKIT_SIMULATED_SCHEDULES", "200"))
FOUND = (6, 61, 1504, 2603)  # Schedules that have found something.
FIRST = int(os.environ.get("TOOLKIT_SIMULATED_FIRST", "0"))


def outcome(folder, seed, most=2):
    chance = simulation.random.Random(-seed)
    world = simulation.World(
        seed, hosts=chance.choice([1, 2, 3]), tasks=chance.choice([1, 2, 3]) + 1, faults=chance.choice([0, 1, 1, 2, 4])
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        try:
            events, error = simulation.run(monkeypatch, folder / str(seed), world, max_restarts=most)
        except simulation.HangError as error:
            return world, [str(error)]
    return world, simulation.problems(world, events, error, most=most)


@pytest.mark.slow
def test_every_schedule_ends_names_its_cause_keeps_its_budget_and_leaves_nobody(tmp_path):
    found, kinds = {}, set()
    for seed in (*FOUND, *range(FIRST, FIRST + SCHEDULES)):
        world, problems = outcome(tmp_path, seed)
        kinds |= {fault.kind for fault in world.faults}
        if problems:
            found[seed] = [problems, world.faults]
    assert not found, f"{len(found)} of {SCHEDULES}: {dict(itertools.islice(found.items(), 5))}"
    assert kinds == {*simulation.OF_TASKS, *simulation.OF_HOSTS}


def test_while_a_lost_host_refuses_calls_nobody_waits_busily(tmp_path, monkeypatch):
    world = simulation.World(0, hosts=2, tasks=1, faults=0)
    world.later(20.0, lambda: world.inject_host("crash"))
    _, error = simulation.run(monkeypatch, tmp_path, world, max_restarts=1)  # Raises where time stands still.
    assert error is None
    assert [fault.kind for fault in world.faults] == ["crash"]
