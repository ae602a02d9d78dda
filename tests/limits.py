"""Limits in seconds: they fail a test in CI, on a machine of known speed; on any other machine they are reported.

Where nothing limits what a test does, a hang would never end. So limits against hangs stay, PATIENCE times as long.
"""

import os
import subprocess

import pytest

IN_CI = os.environ.get("CI") == "true"
PATIENCE = 1 if IN_CI else 10
_LONGEST_OF_TOOLKIT = 15  # Seconds; a shorter wait for a process may be the toolkit's own, and stays as it is.
_passed = []  # What the test that runs has taken more of than it should.


def patient(seconds):
    """A limit against hangs, as long as it may be on this machine."""
    return seconds * PATIENCE


def keep(seconds, most, *, what="it took", remedy="mend what is slow"):
    """Fails a test in CI where it takes its limit or more; elsewhere the end of the tests reports it."""
    if not seconds < most:
        said = f"{what} {seconds:.1f} s, of {most:g}"
        if IN_CI:
            pytest.fail(f"{said}: {remedy}")
        _passed.append(said)


def start():
    """Forgets what an earlier test has passed."""
    _passed.clear()


def passed():
    """The limits that the test has passed, in words."""
    return list(_passed)


def make_waits_patient():
    """Has every wait of a test for a process be PATIENCE times as long."""
    wait, communicate = subprocess.Popen.wait, subprocess.Popen.communicate

    def longer(timeout):
        return timeout if timeout is None or timeout < _LONGEST_OF_TOOLKIT else patient(timeout)

    subprocess.Popen.wait = lambda self, timeout=None: wait(self, longer(timeout))
    subprocess.Popen.communicate = lambda self, input=None, timeout=None: communicate(self, input, longer(timeout))  # noqa: A006


def make_tests_patient(items, default):
    """Has the limit of every test be PATIENCE times as long."""
    for item in items:
        mark = item.get_closest_marker("timeout")
        seconds = float(mark.args[0] if mark and mark.args else default or 0)
        item.add_marker(pytest.mark.timeout(patient(seconds)), append=False)
