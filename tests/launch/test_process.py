"""A process that is being killed is told from one that runs."""

import os
import signal
import subprocess
import time

import limits

from toolkit.launch.agent.process import dying


def test_a_process_that_has_a_sigkill_before_it_is_dying():
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert not dying(process.pid)
        os.kill(process.pid, signal.SIGKILL)  # A zombie until it is waited for.
        deadline = time.monotonic() + limits.patient(10)
        while not dying(process.pid):
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.wait()
    assert not dying(process.pid)
