"""Notice that a machine is about to be taken away: a command that the user names is asked from time to time."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping

from toolkit.errors import LaunchError

__all__ = ["Preemption"]

_EVERY = 5.0  # Seconds between two questions.
_LONGEST = 30.0  # Seconds after which a command that hasn't answered is ended, which is no notice.
_NOT_RUN = (126, 127)  # A shell's exit codes for a program that it can't start or find.


class Preemption:
    """A command whose exit code 0 means that this machine is about to be taken away.

    Args:
        command: For `sh -c`.
        environ: Its environment.

    Raises:
        LaunchError: A shell can't read it.
    """

    def __init__(self, command: str, environ: Mapping[str, str]) -> None:
        self._command = command
        self._environ = environ
        self._process: subprocess.Popen | None = None
        self._began = -_EVERY
        self._answered = False
        read = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True, check=False)
        if read.returncode:
            raise self._fault(f"a shell can't read it ({read.stderr.strip()[-200:]})")

    def _fault(self, found: str) -> LaunchError:
        return LaunchError(
            asked=f"--preempt_when={self._command[:60]!r} is asked whether {socket.gethostname()} is taken away",
            found=found,
            remedy="Try it in a shell on that machine: exit code 0 means notice, and any other code means none",
        )

    def noticed(self) -> bool:
        """Asks again when it is time; returns whether the last answer is notice.

        Raises:
            LaunchError: The first question shows that the command can't be run.
        """
        now = time.monotonic()
        if self._process is None:
            if now - self._began >= _EVERY:
                self._began = now
                self._process = subprocess.Popen(
                    ["sh", "-c", self._command],
                    env=dict(self._environ),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            return False
        code = self._process.poll()
        if code is None:
            if now - self._began > _LONGEST:
                self.close()
            return False
        self._process = None
        first, self._answered = not self._answered, True
        if first and code in _NOT_RUN:
            raise self._fault(f"a shell can't run it (exit code {code})")
        return code == 0

    def close(self) -> None:
        """Ends the command if it runs."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
