"""An agent as its supervisor sees it: a program at the other end of a connection, on this machine or another.

Events go over a pair of pipes or a socket, and neither end ever blocks.
"""

import collections
import contextlib
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from toolkit.launch.events import Event, Reader, event, line
from toolkit.support import alone

_AT_ONCE = 1 << 18  # Bytes read or written in one call.
_READS = 64  # The most reads in one call: a sender that writes faster than they are done would keep it for ever.
_BACKLOG = 16 << 20  # When so many bytes wait to be sent, nothing more is read for this connection.
_SLICES, _SLICE = 30, 10.0  # The usual delay is the least of five minutes, of which each ten seconds keep one.
_MOST_LATE = 10.0  # Seconds. A host that was suspended has a clock that stood still.


class Channel:
    """Two file descriptors, which the caller owns and closes.

    Args:
        reading: What the other end's events come from.
        writing: Where events go; perhaps the same.
        most: How many bytes are read; what comes after them counts as the end.

    Attributes:
        most: How many more are read. The owner raises it when the other end has proved itself.
        ended: Whether the other end has closed it, and all that came is read.
        unsent: What the other end has not accepted yet.
        strange: The last lines that were no events, such as a shell's greeting.
    """

    def __init__(self, reading: int, writing: int, *, most: float = math.inf) -> None:
        self._reading, self._writing, self.most = reading, writing, most
        for descriptor in {reading, writing}:
            os.set_blocking(descriptor, False)
        self._reader = Reader()
        self.unsent = bytearray()
        self._heard = time.monotonic()
        self._lock, self._closed = threading.Lock(), False
        self.ended = False

    @property
    def silence(self) -> float:
        """Seconds since its last event."""
        return time.monotonic() - self._heard

    @property
    def full(self) -> bool:
        """Whether so much waits to be sent that the sender should pause."""
        return len(self.unsent) > _BACKLOG

    @property
    def strange(self) -> list[str]:
        """The last lines that weren't events."""
        return self._reader.strange

    def fileno(self) -> int:
        """The descriptor from which events are read."""
        return self._reading

    def send(self, *events: Event) -> None:
        """Sends as much as the other end accepts and keeps the rest; nothing to a closed connection. Thread-safe."""
        with self._lock:
            if self._closed:
                return
            for event in events:
                self.unsent += line(event)
            try:
                while self.unsent:
                    # Deleting from a bytearray's beginning is cheap.
                    del self.unsent[: os.write(self._writing, self.unsent[:_AT_ONCE])]
            except BlockingIOError:
                pass
            except OSError:  # The reading side notices it.
                self.unsent.clear()

    def close(self) -> None:
        """Stops sending: the owner is about to close the descriptors, whose numbers may be used again."""
        with self._lock:
            self._closed = True

    def read(self) -> list[Event]:
        """Returns the events received, and sends more of what is waiting."""
        self.send()
        found = []
        try:
            for _ in range(_READS):
                piece = os.read(self._reading, int(min(_AT_ONCE, self.most)))
                self.most -= len(piece)
                found += self._reader.events(piece)
                if not piece:
                    self.ended = True
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        if found:
            self._heard = time.monotonic()
        return found


class Lateness:
    """How much later than usual the events of one sender arrive, by its clock, which may show any time.

    Output that fills a connection, or a network that stalls, delays what happened on one host, and the failures that
    followed from it on others would seem to be earlier.
    """

    def __init__(self) -> None:
        # By time and not by the number of events: those of a host with many tasks may all be late for half a minute.
        self._least: collections.deque[float] = collections.deque(maxlen=_SLICES)
        self._until = -math.inf

    def of(self, sent: float, now: float) -> float:
        """Returns for how many seconds an event was held up.

        Args:
            sent: When it was sent, by the sender's clock.
            now: When it arrived, by this process's.
        """
        delay = now - sent
        if now >= self._until:
            self._least.append(delay)
            self._until = now + _SLICE
        self._least[-1] = min(self._least[-1], delay)
        return min(_MOST_LATE, delay - min(self._least))


class ConnectedAgent:
    """An agent and the connection to it.

    Args:
        channel: The connection.

    Attributes:
        local: Whether it runs on this machine.
        scratch: The directory that it has for its tasks, once it is ready.
        unsent: What still waits to be sent, which `read` does.
        polled: Whether it is to be read though nothing has come.
    """

    local = polled = False
    scratch = _word = ""
    unsent: bytes | bytearray = b""

    def __init__(self, channel: Channel) -> None:
        self._channel, self.unsent = channel, channel.unsent
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
            if each["event"] == "over":
                self._word = each["text"].rstrip(".")
        return found

    def last_line(self) -> str:
        """Returns the last lines written at the other end, to show to a person."""
        return self._word or "its connection was closed"

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


def local_agent(*, number: int, command: Sequence[str], **prepare: Any) -> StartedAgent:
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
    made.local = True
    return made
