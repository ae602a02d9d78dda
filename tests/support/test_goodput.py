"""Where the time of a training went: by a clock of the tests', over attempts that fail."""

import json

import pytest

from toolkit.support import goodput, status


class Clock:
    """Seconds that pass where a test says so."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def time(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(goodput, "time", made)
    for name in (status.SPENT, status.JOB_ID, status.SOCKET):
        monkeypatch.delenv(name, raising=False)
    return made


def train(clock, account, *, steps, every=10, save=3.0):
    """A first step of 30 s, steps of 2 s, and a checkpoint after each ten."""
    clock.now += 20
    account.mark("starting")
    for step in range(1, steps + 1):
        clock.now += 30 if step == 1 else 2
        account.mark("progress" if step > 1 else "first_step", steps=1)
        if step % every == 0:
            with account.during("saving"):
                clock.now += save - 1
                with account.during("saving"):
                    clock.now += 1


def test_a_process_accounts_for_all_of_its_time(clock):
    account = goodput.Account()
    train(clock, account, steps=20)
    clock.now += 8
    account.mark("validating")
    assert account.own == {"starting": 20, "first_step": 30, "progress": 38, "saving": 6, "validating": 8}
    assert account.made == 20
    assert sum(account.own.values()) == clock.now - 1000
    account.input = 0.25
    assert account.own["waiting_for_data"] == 0.25 * 38
    assert sum(account.own.values()) == clock.now - 1000


def test_a_job_with_two_failures_and_what_they_cost(clock):
    spent, since, events = {}, clock.now, []
    for number, (begins, ends) in enumerate([(0, 27), (20, 33), (30, 50)], start=1):
        clock.now += 5  # The agents start the processes.
        account = goodput.Account()
        train(clock, account, steps=ends - begins)
        facts = {"spent": account.own, "made": account.made, "step": ends, "checkpoint": ends // 10 * 10}
        clock.now += 10  # The failure is noticed, and the other tasks are ended.
        found = goodput.of_attempt(facts, seconds=clock.now - since, first=number == 1, done=ends == 50)
        events.append({"event": "spent", "attempt": number, "seconds": {"progress": 1e9}})  # Of some minutes before.
        events.append({"event": "spent", "attempt": number, "seconds": found})
        spent, since = goodput.summed(spent, found), clock.now
    assert goodput.of_events(events) == spent
    assert sum(spent.values()) == pytest.approx(clock.now - 1000, abs=0.01)
    lost = 7 / 27 * 52 + 3 / 13 * 24  # Of the steps after a first one, those beyond the newest checkpoint.
    assert spent["done_twice"] == pytest.approx(lost, abs=0.01)
    assert spent["progress"] == pytest.approx(52 + 24 + 38 - lost, abs=0.01)
    assert spent["first_step"] == 90
    assert spent["starting"] == 20  # Of the first attempt.
    assert spent["restarting"] == 2 * 20 + 2 * (5 + 10)  # What no process has seen of attempts that failed counts, too.
    said = goodput.in_words(spent)
    assert said.startswith("29% of 5 min made progress; 28% the first step, 22% restarting, ")
    assert "6% steps done twice" in said


def test_a_run_goes_on_counting_after_its_checkpoint(clock, monkeypatch):
    first = goodput.Account()
    train(clock, first, steps=10)
    state = json.loads(json.dumps(first.state))
    second = goodput.Account()
    second.resume(state)
    train(clock, second, steps=10)
    assert second.whole == {kind: 2 * seconds for kind, seconds in first.own.items()}

    # The same job's launcher knows what came after the checkpoint, and has told the process.
    monkeypatch.setenv(status.JOB_ID, "job")
    monkeypatch.setenv(status.SPENT, json.dumps({"progress": 100.0, "done_twice": 7.0}))
    third = goodput.Account()
    third.resume({**state, "job": "job", "earlier": {"progress": 1000.0}})
    assert third.whole == {"progress": 1100, "done_twice": 7}
    # Another job has begun it.
    third.resume({**state, "job": "another", "earlier": {"progress": 1000.0}})
    assert third.whole["progress"] == 1118
    assert third.whole["starting"] == 20


def test_a_job_that_does_not_train_has_no_goodput():
    found = goodput.of_attempt({"state": "ending"}, seconds=12.0, first=True, done=True)
    assert found == {"other": 12}
    assert goodput.summary(found) is None
    assert goodput.in_words(found) == ""


def test_without_a_checkpoint_all_steps_of_a_failed_attempt_are_done_again():
    facts = {"spent": {"first_step": 2.0, "progress": 8.0}, "made": 5, "step": 5}
    found = goodput.of_attempt(facts, seconds=11.0, first=True, done=False)
    assert found == {"first_step": 2, "done_twice": 8, "restarting": 1}
