import signal
import subprocess
import sys
import threading

import pytest

from toolkit.errors import JobStopped
from toolkit.support import signals


@pytest.fixture
def hangup():
    """SIGHUP as a shell leaves it, whatever the tests themselves were started under."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield signal.SIGHUP
    signal.signal(signal.SIGHUP, before)


def test_signals_are_recorded_in_the_block_and_handled_as_before_after_it(hangup):
    with signals.recorded() as received:
        signal.raise_signal(hangup)
        signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGHUP, signal.SIGTERM]
    assert signal.getsignal(hangup) is signal.SIG_DFL


def test_an_ignored_signal_stays_ignored(hangup):
    signal.signal(hangup, signal.SIG_IGN)
    with signals.recorded() as received, signals.exiting("waiting"):
        signal.raise_signal(hangup)
        assert signal.getsignal(hangup) is signal.SIG_IGN
    assert received == []
    assert signal.getsignal(hangup) is signal.SIG_IGN


def test_outside_the_main_thread_nothing_is_changed(hangup):
    found = []

    def look():
        with signals.recorded() as received, signals.exiting("waiting"):
            found.extend([signal.getsignal(hangup), received])

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL, []]


@pytest.mark.slow
def test_a_program_that_waits_ends_with_a_line_and_leaves_others_handlers_alone():
    script = """
import signal
from toolkit.support import signals
signal.signal(signal.SIGHUP, lambda *_: print("its own", flush=True))
with signals.exiting("waiting for worker:1"):
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (
        143,
        "its own\n",
        "Stopped by SIGTERM while waiting for worker:1.\n",
    )


def test_sleep_ends_with_a_signal():
    with pytest.raises(JobStopped) as stopped:
        signals.sleep(60, [signal.SIGTERM])
    assert stopped.value.exit_code == 143


def test_of_a_grace_what_is_left_is_counted_from_the_signal(hangup, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    with signals.StopSignals() as stop:
        stop.held = True
        assert stop.left(15.0) == 15.0
        signal.raise_signal(signal.SIGTERM)
        now[0] += 4
        assert stop.left(15.0) == 10.0, "and a second in which the process ends"
        now[0] += 20
        assert stop.left(15.0) == 0.0
