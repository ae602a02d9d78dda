"""Hosts that find one another at an address: the same command on each, without ssh or a scheduler.

The first launcher that comes at HOST listens there, and supervises; the others come to it, and are its agents. Each
side proves that it has the job's token (see `token`) before anything else is taken from it. A host runs the command
that it was itself given, and no other; it is sent neither the first host's environment nor its function.
"""

import os
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from toolkit import __version__
from toolkit.cluster import split
from toolkit.errors import JobStopped, LaunchError, ToolkitError
from toolkit.launch.agent.channel import Channel
from toolkit.launch.agent.connection import ConnectedAgent, started_here
from toolkit.launch.agent.tasks import visible_gpus
from toolkit.launch.backends import token
from toolkit.launch.display import output
from toolkit.launch.events import Event, event
from toolkit.launch.job.hosts import Host
from toolkit.launch.job.spec import JobSpec
from toolkit.launch.supervisor.agents import Place
from toolkit.launch.supervisor.layout import check_addresses, spread

__all__ = ["RendezvousPlace"]

_TICK = 0.05
_HELLO = 10.0  # Seconds in which a new connection must identify itself.
_SAID = 30.0  # Seconds between two messages about missing hosts.
_OWN = ("command", "prefix", "environment", "call")  # What each host has by itself.


class _Seat(ConnectedAgent):
    """A host's place in the job: taken by a launcher, or free.

    Args:
        place: Seats those that come.
        prepare: What the agent is to prepare.
    """

    def __init__(self, place: "RendezvousPlace", prepare: Event) -> None:
        self._place = place
        self._prepare = prepare
        self._made = time.monotonic()
        self._socket: socket.socket | None = None

    def take(self, connection: socket.socket, channel: Channel) -> None:
        """Assigns it to a launcher."""
        self._socket = connection
        super().__init__(channel)
        channel.send(self._prepare)

    @property
    def free(self) -> bool:
        """Whether no launcher has connected yet."""
        return self._socket is None

    @property
    def gone(self) -> bool:
        """Whether its launcher is lost."""
        return not self.free and self._channel.ended

    @property
    def silence(self) -> float:
        """Seconds since its last event, or since it became free."""
        return time.monotonic() - self._made if self.free else self._channel.silence

    def send(self, kind: str, **facts: Any) -> None:
        """Sends requests to the launcher, if there is one, without what each host has by itself."""
        if not self.free:
            super().send(kind, **{name: fact for name, fact in facts.items() if name not in _OWN})

    def read(self, *, silent: bool = False) -> list[Event]:
        """Returns its events; while it has no launcher, accepts new ones."""
        self._place.receive()  # Also when all are present: a launcher that comes too late gets an answer.
        return [] if self.free else super().read(silent=silent)

    def close(self) -> None:
        """Ends the connection."""
        if self._socket is not None:
            super().close()
            self._socket.close()
        self._place.seats = [(host, each) for host, each in self._place.seats if each is not self]


class RendezvousPlace(Place):
    """The hosts that have connected.

    Args:
        spec: What was asked.
        listener: As `listen` returns it.
        received: Signals to this process are appended to it.
        say: Shows a message.

    Attributes:
        hosts, addresses, remedy: As `toolkit.launch.supervisor.agents.Place` has them.
        seats: The places of the other hosts.

    Raises:
        LaunchError: Not all have come in time.
        JobStopped: A signal has come.
    """

    remedy = "See what the launcher on {host} says"

    def __init__(
        self, spec: JobSpec, listener: socket.socket, received: Sequence[int], say: Callable[[str], None]
    ) -> None:
        self.spec = spec
        self._listener = listener
        self._say = say
        self._token = token.make(spec.rendezvous or "")
        self._coming: list[tuple[socket.socket, Channel, str]] = []
        self.seats: list[tuple[Host, _Seat]] = []
        self._refused = ""
        self._late: list[tuple[socket.socket, Channel, float]] = []  # And until when each waits for a place.
        self._first: list[tuple[socket.socket, Channel, Event]] = []
        self._wait(received)
        wanted = sum(number for _, number in spec.counts)
        own = len(visible_gpus({**os.environ, **spec.environment})) or 1
        rooms = spread(wanted, spec.nodes) if wanted else [own, *(hello["room"] for _, _, hello in self._first)]
        names = [socket.gethostname(), *(str(hello["host"]) for _, _, hello in self._first)]
        names = [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names)]
        self.hosts = tuple(Host(name, room) for name, room in zip(names, rooms, strict=True))
        self.addresses = {self.hosts[0]: split(spec.rendezvous or "")[0]}
        for host, (connection, _, _) in zip(self.hosts[1:], self._first, strict=True):
            self.addresses[self.hosts[0]] = connection.getsockname()[0]
            self.addresses[host] = connection.getpeername()[0]
        check_addresses(self.addresses, open_network=spec.open_network)

    def call(self, host: Host) -> ConnectedAgent:
        """Returns an agent of this machine, or the launcher that has connected or will connect from another host."""
        if host == self.hosts[0]:
            return started_here(number=host.tasks, command=self.spec.command)
        times = {"silence": self.spec.silence, "grace": self.spec.grace}
        prepare = event("prepare", number=host.tasks, mark="", first=False, **times)
        seat = _Seat(self, prepare)
        self.seats.append((host, seat))
        if self._first:
            connection, channel, _ = self._first.pop(0)
            seat.take(connection, channel)
        return seat

    def receive(self) -> None:
        """Gives the place of a lost launcher to one that connects later."""
        patience = time.monotonic() + self.spec.silence + self.spec.grace
        self._late += [(connection, channel, patience) for connection, channel, _ in self._arrived()]
        waiting, self._late = self._late, []
        for connection, channel, until in waiting:
            host, seat = next(((h, s) for h, s in self.seats if s.free), (None, None))
            if host is not None and seat is not None:
                self.addresses[host] = connection.getpeername()[0]
                seat.take(connection, channel)
            elif time.monotonic() < until:
                self._late.append((connection, channel, until))
            else:
                self._refuse(connection, channel, "that job already has all its hosts", "End one of them first")

    def close(self, ended: ToolkitError | None) -> None:
        """Tells the connected launchers how the job has ended, and closes the address."""
        code, text = (ended.exit_code, str(ended)) if ended else (0, "")
        word = {"code": code, "text": text, "stopped": isinstance(ended, JobStopped)}
        token.forget(self.spec.rendezvous or "")
        for _, seat in self.seats:
            seat.send("over", **word)
        for _, channel, _ in [*self._first, *self._late]:
            channel.send(event("over", **word))
        for connection, *_ in [*self._first, *self._late, *self._coming]:
            connection.close()
        self._listener.close()

    def _wait(self, received: Sequence[int]) -> None:
        """Waits until the others have connected."""
        began = said = time.monotonic()
        deadline = began + self.spec.start_timeout
        if self.spec.nodes > 1:
            self._say(f"launch: {self._here()}, waiting for {self.spec.nodes - 1} more")
        if self.spec.nodes > 1 and not os.environ.get(token.VARIABLE):
            shown = sys.stdout is not None and sys.stdout.isatty()  # Written to no file.
            (output.say if shown else self._say)(token.words(self.spec.rendezvous or "", self._token, shown=shown))
        while len(self._first) < self.spec.nodes - 1:
            error: ToolkitError | None = JobStopped(received[0]) if received else None
            if time.monotonic() > deadline:
                error = LaunchError(
                    asked=f"{self.spec.nodes} hosts are to meet at {self.spec.rendezvous}",
                    found=f"{1 + len(self._first)} came within {self.spec.start_timeout:g} s{self._refused}",
                    remedy="Run the same command on every host, and see that they can reach that address",
                )
            if error is not None:
                self.close(error)
                raise error
            waits = [self._listener.fileno(), *(channel.fileno() for _, channel, _ in self._coming)]
            select.select(waits, [], [], _TICK)
            self._first += self._arrived()
            if time.monotonic() - said > _SAID:
                said = time.monotonic()
                self._say(f"launch: {self._here()} after {said - began:.0f} s")

    def _here(self) -> str:
        return f"{1 + len(self._first)} of {self.spec.nodes} hosts at {self.spec.rendezvous}"

    def _arrived(self) -> list[tuple[socket.socket, Channel, Event]]:
        """Returns the launchers that have connected and belong to this job; answers the others."""
        try:
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                channel, number = Channel(connection.fileno(), connection.fileno()), token.nonce()
                channel.send(event("challenge", nonce=number))
                self._coming.append((connection, channel, number))
        except BlockingIOError:
            pass
        found, waiting = [], []
        for connection, channel, number in self._coming:
            said = [each for each in channel.read() if each["event"] != "knock"]
            hello = said[0] if said and said[0]["event"] == "hello" else None
            if hello is None:
                if channel.ended or channel.silence > _HELLO or said or channel.strange:
                    connection.close()  # Not one of ours: drop the connection.
                else:
                    waiting.append((connection, channel, number))
                continue
            wrong = self._wrong(hello, number)
            if wrong:
                self._say(f"launch: the launcher on {str(hello.get('host'))[:60]!r} is refused, because {wrong[0]}")
                self._refused += f"; the launcher on {str(hello.get('host'))[:60]!r} was refused because {wrong[0]}"
                self._refuse(connection, channel, *wrong)
            else:
                numbers = number, str(hello["nonce"])
                channel.send(event("welcome", proof=token.proof(self._token, "listener", *numbers)))
                found.append((connection, channel, hello))
        self._coming = waiting
        return found

    def _wrong(self, hello: Event, number: str) -> tuple[str, str] | None:
        if hello.get("version") != __version__:
            return (
                f"it has version {hello.get('version')} of this toolkit, not {__version__}",
                f"Install {__version__} on every host",
            )
        if not token.proves(hello.get("proof"), self._token, "joiner", number, str(hello.get("nonce"))):
            return (
                "it hasn't this job's token",
                f"Set {token.VARIABLE} here to the token that the host of that address shows",
            )
        if hello.get("nodes") != self.spec.nodes:
            return f"it has --nodes={hello.get('nodes')}, not {self.spec.nodes}", "Give every host the same number"
        if hello.get("program") != token.program_of(self.spec):
            return "it starts another job: command or numbers of tasks differ", "Use a different address for each job"
        return None

    def _refuse(self, connection: socket.socket, channel: Channel, found: str, remedy: str) -> None:
        asked = f"this launcher asked to join the job at --rendezvous={self.spec.rendezvous}"
        channel.send(event("refused", asked=asked, found=found, remedy=remedy))
        connection.close()
