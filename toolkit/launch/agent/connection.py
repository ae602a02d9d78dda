"""An agent as its supervisor sees it: a program at the other end of a connection, on this machine or another."""

import collections
import contextlib
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from toolkit.launch import alone
from toolkit.launch.agent.channel import Channel
from toolkit.launch.events import Event, event

__all__ = ["ConnectedAgent", "Lateness", "StartedAgent", "started_here"]

_OF = 300  # From how many events the usual delay is taken: those of some minutes.
_MOST = 10.0  # Seconds. A host that was suspended has a clock that stood still.


class Lateness:
    """How much later than usual the events of one sender arrive, by its clock, which may show any time.

    Output that fills a connection, or a network that stalls, delays what happened on one host, and the failures that
    followed from it on others would seem to be earlier.
    """

    def __init__(self) -> None:
        self._delays: collections.deque[float] = collections.deque(maxlen=_OF)

    def of(self, sent: float, now: float) -> float:
        """Returns for how many seconds an event was held up.

        Args:
            sent: When it was sent, by the sender's clock.
            now: When it arrived, by this process's.
        """
        self._delays.append(now - sent)
        return min(_MOST, now - sent - min(self._delays))


class ConnectedAgent:
    """An agent and the connection to it.

    Args:
        channel: The connection.

    Attributes:
        here: Whether it runs on this machine.
        scratch: The directory that it has for its tasks, once it is ready.
    """

    here = False
    scratch = ""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lateness = Lateness()

    @property
    def gone(self) -> bool:
        """Whether the connection has ended and all data from it has been read."""
        return self._channel.ended

    @property
    def silence(self) -> float:
        """Seconds since its last event."""
        return self._channel.silence

    def fileno(self) -> int:
        """A descriptor that becomes readable when an event arrives."""
        return self._channel.fileno()

    def send(self, kind: str, **facts: Any) -> None:
        """Sends a request; sends nothing to a host that is gone."""
        self._channel.send(event(kind, **facts))

    def read(self, *, silent: bool = False) -> list[Event]:
        """Returns the events from this agent; none if it is to be `silent`."""
        found = [] if silent else self._channel.read()
        for each in found:
            if isinstance(each.get("sent"), float):
                each["late"] = self._lateness.of(each["sent"], time.monotonic())
        return found

    def last_line(self) -> str:
        """Returns the last lines written at the other end, to show to a person."""
        return "its connection was closed"

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()


class StartedAgent(ConnectedAgent):
    """An agent started by this process: here, or on another host with ssh or srun.

    Args:
        program: What starts `agent.program` on the host, its standard input and output here.
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
            start_new_session=True,  # Ctrl-C is passed on, so that tasks can write a checkpoint.
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        super().__init__(Channel(self._process.stdout.fileno(), self._process.stdin.fileno()))
        self.send("prepare", **prepare)

    def last_line(self) -> str:
        """Returns the last lines that the program or the host's shell wrote."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):  # It has closed its output but still runs.
            code = self._process.wait(5) if self.gone else None
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4000))
        lines = [text for text in self._errors.read().decode(errors="replace").splitlines() if text.strip()]
        how = "its output was closed" if code is None else f"it ended with exit code {code}"
        if code is not None and code < 0:
            how = f"it was ended by {signal.Signals(-code).name}"
        lines = lines or self._channel.strange or [how]
        return lines[-1].strip()[:300]

    def close(self) -> None:
        """Ends the program. That closes the agent's input, and its tasks end soon after."""
        super().close()
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


def started_here(*, number: int, command: Sequence[str], **prepare: Any) -> StartedAgent:
    """Returns a new agent of this machine.

    It never counts its supervisor as gone for its silence: that may be stopped by Ctrl-Z, and its end closes the pipe.
    The tasks end with it at once: a job that is started again has nobody in the way.

    Args:
        number: For how many tasks it is to hold ports.
        command: What they are to run.
        prepare: What else it is to prepare.
    """
    made = StartedAgent(
        alone.command("toolkit.launch.agent.program"),
        directory=os.getcwd(),
        number=number,
        command=list(command),
        grace=0.0,
        silence=math.inf,
        **prepare,
    )
    made.here = True
    return made
