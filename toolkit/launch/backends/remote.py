"""An agent at the end of a connection, such as a program that reaches its host: ssh, or srun."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from toolkit.launch.agent.channel import Channel
from toolkit.launch.events import BEAT, Event, event

__all__ = ["ConnectedAgent", "RemoteAgent"]


class ConnectedAgent:
    """An agent, and the connection to it.

    Args:
        channel: The connection.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._beaten = time.monotonic()

    @property
    def gone(self) -> bool:
        """Whether the connection has ended, and all that came of it is read."""
        return self._channel.ended

    @property
    def silence(self) -> float:
        """Seconds since its last event."""
        return self._channel.silence

    def fileno(self) -> int:
        """A descriptor that can be read when something has happened."""
        return self._channel.fileno()

    def send(self, kind: str, **facts: Any) -> None:
        """Sends what is asked for, a sign of life once a second; to a host that is gone, nothing."""
        if kind == "beat":
            if time.monotonic() - self._beaten < BEAT:
                return
            self._beaten = time.monotonic()
        self._channel.send(event(kind, **facts))

    def read(self) -> list[Event]:
        """Returns what has happened there."""
        return self._channel.read()

    def last_line(self) -> str:
        """Returns what was written last at the other end, for a person."""
        return "its connection was closed"

    def close(self) -> None:
        """Ends the connection."""


class RemoteAgent(ConnectedAgent):
    """An agent that a program of this machine reaches.

    Args:
        program: What starts `python -m toolkit.launch.agent.program` on the host, its standard input and output here.
        prepare: What the agent is to prepare. An agent of another version reads it before versions are compared: its
            keys stay as they are.
    """

    def __init__(self, program: Sequence[str], **prepare: Any) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close().
        self._process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # The terminal's Ctrl-C is passed on, so that tasks can write a checkpoint.
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        super().__init__(Channel(self._process.stdout.fileno(), self._process.stdin.fileno()))
        self.send("prepare", **prepare)

    def last_line(self) -> str:
        """Returns what the program or the host's shell wrote last."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):  # It has closed its output, and lives.
            code = self._process.wait(5) if self.gone else None
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4000))
        lines = [text for text in self._errors.read().decode(errors="replace").splitlines() if text.strip()]
        lines = (
            lines
            or self._channel.strange
            or ["its output was closed" if code is None else f"it ended with exit code {code}"]
        )
        return lines[-1].strip()[:300]

    def close(self) -> None:
        """Ends the program; the agent's input ends with it, and the tasks there soon after."""
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                pass
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._errors.close()
