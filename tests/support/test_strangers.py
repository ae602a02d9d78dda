"""Connections that haven't proved themselves are few, and none stays."""

import errno
import socket

import pytest

from toolkit.support import strangers
from toolkit.support.strangers import Strangers


class Listener:
    """A listening socket at which somebody always waits."""

    def __init__(self, *peers):
        self.peers, self.made, self.errors = peers, 0, []

    def accept(self):
        if self.errors:
            raise OSError(self.errors.pop(0), "")
        if self.made == len(self.peers):
            raise BlockingIOError
        self.made += 1
        return socket.socket(), (self.peers[self.made - 1], 1)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(strangers.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(strangers, "_MOST", 8)
    made = Strangers(within=10.0)
    yield made
    for connection in list(made._known):
        connection.close()


def test_time_is_counted_from_the_beginning(known, clock):
    (one,), (two,) = known.accept(Listener("a")), known.accept(Listener("b"))
    known.forget(two[0])
    two[0].close()
    clock[0] += 9.9
    assert known.overdue() == []
    clock[0] += 0.2
    assert known.overdue() == [one[0]]


def test_hosts_that_come_together_wait_for_one_another(known, clock):
    listener = Listener(*map(str, range(20)))
    assert len(known.accept(listener)) == 8
    assert known.accept(listener) == []
    assert known.overdue() == []
    clock[0] += 1.1  # Who is still there is taken for a stranger.
    assert len(known.accept(listener)) == 8
    assert len(known.overdue()) == 8


def test_one_address_takes_no_room_from_others(known, clock):
    (honest,) = known.accept(Listener("honest"))
    flood = Listener(*["flood"] * 100)
    for _ in range(10):
        known.accept(flood)
        clock[0] += 0.01
        for each in known.overdue():
            assert each is not honest[0]
            known.forget(each)
            each.close()
    assert flood.made > 50


def test_errors_of_accept_are_survived(known, clock):
    listener = Listener("a", "b")
    listener.errors = [errno.ECONNABORTED, errno.EMFILE]
    assert known.accept(listener) == []
    assert len(known.accept(listener)) == 2
    clock[0] += 2.0
    listener.errors = [errno.EMFILE]
    assert known.accept(listener) == []
    assert len(known.overdue()) == 1  # Makes room for the next.
