"""Reports reach a launcher that has had no time for them, and a change of state always does."""

import json
import selectors
import socket
import threading
import time

import limits
import pytest

from toolkit.launch.agent.program import Reports
from toolkit.support import status


class Read:
    """Reports, and what has been taken of them."""

    def __init__(self):
        self.taken = []
        self.selector = selectors.DefaultSelector()
        self.reports = Reports(self.selector, self.taken.append)
        self.path = self.reports.path

    def read(self, seconds=0.2):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for key, _ in self.selector.select(0.05):
                key.data()
        return self.taken

    def close(self):
        self.reports.close()
        self.selector.close()


@pytest.fixture
def reports(monkeypatch):
    made = Read()
    monkeypatch.setenv(status.SOCKET, f"worker:1@{made.path}")
    yield made
    status._close()
    made.close()


def test_what_sixty_tasks_said_while_the_launcher_was_busy_is_there(reports):
    """A queue of datagrams holds ten of them."""
    channels = []
    for number in range(60):
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.connect(reports.path)
        for state in ("running", "connected", "serving"):
            channel.send(json.dumps({"task": f"worker:{number}", "state": state}).encode())
        channels.append(channel)
    taken = reports.read()
    assert len(taken) == 180
    assert [one["state"] for one in taken if one["task"] == "worker:59"] == ["running", "connected", "serving"]
    for channel in channels:
        channel.close()


def test_steps_may_be_missed_but_another_state_may_not(reports):
    status.report(state="training", step=0)
    for step in range(20_000):  # More than any buffer holds.
        status.report(state="training", step=step)
    taken = reports.taken
    reader = threading.Thread(target=lambda: (time.sleep(0.3), reports.read(1.0)))
    reader.start()
    status.report(state="evaluating")
    reader.join()
    assert taken[-1]["state"] == "evaluating"
    assert len(taken) < 20_000


def test_what_is_no_report_is_passed_over(reports):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.connect(reports.path)
        for message in (b"{", b"[1]", b'{"task": 3}'):
            channel.send(message)
        taken = reports.read()
    assert taken == [[1], {"task": 3}]


def test_where_nobody_listens_nothing_is_said_or_waited_for(monkeypatch, tmp_path):
    monkeypatch.setenv(status.SOCKET, f"worker:1@{tmp_path / 'gone'}")
    began = time.monotonic()
    status.report(state="running")
    limits.keep(time.monotonic() - began, 1)
