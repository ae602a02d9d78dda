"""What a process says while it waits for the others."""

import time

import limits
import pytest

from toolkit.strategies.processes import agreement


def test_who_waits_tells_the_launcher_each_time_that_the_waiting_has_doubled(monkeypatch):
    told = []
    monkeypatch.setattr(agreement, "_SILENCE", 0.1)
    monkeypatch.setattr(agreement.status, "listened", lambda: True)
    monkeypatch.setattr(agreement.status, "report", lambda **facts: told.append(facts["waits"]))
    deadline = time.monotonic() + limits.patient(20)
    with agreement._waiting_aloud(None):
        while len(told) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [each["seconds"] for each in told[:3]] == pytest.approx([0.1, 0.2, 0.4])
    assert "for the other workers, in a call at test_agreement.py, line " in told[0]["words"]
