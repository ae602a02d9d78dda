"""A process that waits for the others says so each time that it has waited twice as long."""

import logging
import types

import pytest
import tensorflow as tf

from toolkit.strategies.processes import agreement


@pytest.fixture
def pauses(monkeypatch):
    """What a thread that tells waits for, four times, before the wait is over."""
    waited = []

    class Over:
        def wait(self, seconds):
            waited.append(seconds)
            return len(waited) > 4

        def set(self):
            """It is over at the fifth look."""

    class Thread:
        def __init__(self, target, **_):
            self.start = target

    stands = types.SimpleNamespace(get_ident=lambda: None, Event=Over, Thread=Thread)
    monkeypatch.setattr(agreement, "threading", stands)
    return waited


def test_it_is_said_each_time_that_the_waiting_has_doubled(pauses, monkeypatch, caplog):
    monkeypatch.setattr(agreement.status, "listened", lambda: False)
    monkeypatch.setattr(agreement, "_where", lambda _: "somewhere")
    monkeypatch.setattr(agreement, "_own", lambda _: "worker:0")
    caplog.set_level(logging.WARNING)
    with agreement._waiting_aloud(tf.distribute.get_strategy()):
        pass
    assert [record.getMessage().split("has waited ")[1].split(" s ")[0] for record in caplog.records] == [
        *("20", "40", "80", "160")
    ]
    assert pauses == [20, 20, 40, 80, 160]
