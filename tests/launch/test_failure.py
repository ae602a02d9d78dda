"""Whose failure is the cause: a process that is being killed is waited for."""

import os
import signal
import subprocess
import time

from toolkit.launch import failure


def test_a_process_that_has_a_sigkill_before_it_is_dying():
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert not failure.dying(process.pid)
        os.kill(process.pid, signal.SIGKILL)  # A zombie until it is waited for.
        deadline = time.monotonic() + 10
        while not failure.dying(process.pid):
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.wait()
    assert not failure.dying(process.pid)
