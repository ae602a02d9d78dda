"""The supervisor's own decisions under a simulated clock: hundreds of schedules of faults, and what must hold in each.

A seed decides everything: hosts, delays, doubled messages, faults far apart, at once, and within a recovery. More
schedules: TOOLKIT_SIMULATED_SCHEDULES=20000 python -m pytest tests/launch/test_simulated.py. Two thousand and more must
come to every rare state that has a name.
"""

import collections
import itertools
import os

import pytest
import simulated_properties
import simulation

SCHEDULES = int(os.environ.get("TOOLKIT_SIMULATED_SCHEDULES", "200"))
FOUND = (6, 61, 1504, 2603, 3219)  # Schedules that have found something.
MANY = 2000
FIRST = int(os.environ.get("TOOLKIT_SIMULATED_FIRST", "0"))


def outcome(folder, seed, most=2):
    chance = simulation.random.Random(-seed)
    hosts, tasks, faults = chance.choice([1, 2, 3]), chance.choice([2, 3, 4]), chance.choice([0, 1, 1, 2, 4])
    world = simulation.World(seed, hosts=hosts, tasks=tasks, faults=faults, stops=chance.random() < 0.15)
    without = {"min_workers": chance.choice([0, tasks])} if hosts > 1 else {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        try:
            events, error = simulation.run(monkeypatch, folder / str(seed), world, max_restarts=most, **without)
        except simulation.HangError as error:
            return world, [str(error)]
    return world, simulated_properties.problems(world, events, error, most=most)


@pytest.mark.slow
def test_every_schedule_ends_names_its_cause_keeps_its_budget_and_leaves_nobody(tmp_path):
    found, kinds, rare = {}, set(), collections.Counter()
    for seed in (*FOUND, *range(FIRST, FIRST + SCHEDULES)):
        world, problems = outcome(tmp_path, seed)
        kinds |= {fault.kind for fault in world.faults}
        rare.update(world.seen)
        if problems:
            found[seed] = [problems, world.faults]
    assert not found, f"{len(found)} of {SCHEDULES}: {dict(itertools.islice(found.items(), 5))}"
    assert kinds == {*simulation.OF_TASKS, *simulation.OF_HOSTS}
    assert SCHEDULES < MANY or rare.keys() == simulated_properties.RARE, rare


def hints(events):
    texts = [event["text"] for event in events if event["event"] == "note"]
    return [text for text in texts if "no task has written a line" in text or "has waited" in text]


def test_a_hint_says_where_each_task_is_and_the_next_one_comes_after_twice_as_long(tmp_path, monkeypatch):
    world = simulation.World(0, hosts=2, tasks=2, faults=0)
    world.later(20.0, lambda: world.inject("hang"))
    events, error = simulation.run(monkeypatch, tmp_path, world, settle=False, max_restarts=0, stall_timeout=1000.0)
    hung = world.faults[0].target
    said = hints(events)
    assert [int(text.split(" s; ")[0].rpartition(" ")[2]) // 10 for text in said] == [6, 12, 24, 48, 96]
    assert f"The others wait for {hung}, which is at train.py, line 31, in step." in said[0]
    others = ", ".join(name for name in sorted(world.tasks) if name != hung)
    inside = f"  {others}: inside TensorFlow, called at execute.py, line 31, in step"
    assert sorted(said[0].splitlines()[1:]) == sorted([inside, f"  {hung}: train.py, line 31, in step"])
    assert str(error).count("line 31, in step") == 1


def test_a_task_that_waits_for_the_others_has_them_named_at_once(tmp_path, monkeypatch):
    world = simulation.World(0, hosts=2, tasks=2, faults=0)
    world.later(20.0, lambda: world.inject("hang"))

    def wait(seconds):
        for task in world.tasks.values():
            if not task.hangs:
                waits = {"seconds": seconds, "words": f"{seconds} s for the others, in fit at train.py, line 7"}
                task.agent.tell("report", task=task.name, facts={"waits": waits}, ago=0.0)

    for seconds in (20, 40):
        world.later(22.0 + seconds, lambda seconds=seconds: wait(seconds))
    events, _ = simulation.run(monkeypatch, tmp_path, world, settle=False, max_restarts=0, stall_timeout=100.0)
    said = hints(events)
    assert ["has waited 20 s" in said[0], "has waited 40 s" in said[1], len(said)] == [True, True, 3]
    assert all("which is at train.py, line 31, in step.\n" in text for text in said)


def test_while_a_lost_host_refuses_calls_nobody_waits_busily(tmp_path, monkeypatch):
    world = simulation.World(0, hosts=2, tasks=1, faults=0)
    world.later(20.0, lambda: world.inject_host("crash"))
    _, error = simulation.run(monkeypatch, tmp_path, world, max_restarts=1)  # Raises where time stands still.
    assert error is None
    assert [fault.kind for fault in world.faults] == ["crash"]
