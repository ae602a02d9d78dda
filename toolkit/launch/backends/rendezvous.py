"""Hosts that find one another at an address: the same command on each, no ssh and no scheduler.

The first launcher that comes at HOST listens there, and supervises; the others come to it, and are its agents. Each
runs the command that it was itself given, and no other: who connects can have it start, end and tell of that one.
"""

import hashlib
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit import __version__
from toolkit.cluster import Cluster, Task, split
from toolkit.errors import JobStopped, LaunchError, ToolkitError
from toolkit.launch.agent.agent import Agent
from toolkit.launch.agent.channel import Channel
from toolkit.launch.agent.tasks import own_addresses, visible_gpus
from toolkit.launch.backends.remote import ConnectedAgent
from toolkit.launch.events import Event, event
from toolkit.launch.job.hosts import Host
from toolkit.launch.job.spec import JobSpec
from toolkit.launch.supervisor.agents import AgentLike
from toolkit.launch.supervisor.layout import assign, check_addresses, spread

__all__ = ["RendezvousPlace", "listen", "program_of"]

_TICK = 0.05
_HELLO = 10.0  # Seconds in which who connects must say who it is.


def listen(spec: JobSpec) -> socket.socket | None:
    """Returns a socket that listens at the rendezvous; None where this isn't its host, or another launcher came first.

    Raises:
        LaunchError: The host has no address.
    """
    host, port = split(spec.rendezvous or "")
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            asked=f"--rendezvous={spec.rendezvous} is where the hosts find one another",
            found=f"{host} has no address here ({(error.strerror or str(error)).lower()})",
            remedy="Name a host that every one of them can look up, or its address",
        ) from None
    own = own_addresses()
    here = next((answer for answer in answers if answer[4][0] in own), None)
    if here is None:
        return None
    made = socket.socket(here[0], socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(here[4])
        made.listen(128)
        made.setblocking(False)
        return made
    except OSError:  # Somebody listens there: this job's first launcher, or whoever says otherwise when it is asked.
        made.close()
        return None


def program_of(spec: JobSpec) -> str:
    """Returns what tells the jobs that gather at one address apart."""
    return hashlib.sha256(repr((spec.command, spec.counts)).encode()).hexdigest()[:16]


class _Seat(ConnectedAgent):
    """A host's place: taken by a launcher that has come, or waiting for one.

    Args:
        place: Seats those that come.
        prepare: What the agent is to prepare.
    """

    def __init__(self, place: "RendezvousPlace", prepare: Event) -> None:
        self._place = place
        self._prepare = prepare
        self._made = self._beaten = time.monotonic()
        self._socket: socket.socket | None = None

    def take(self, connection: socket.socket, channel: Channel) -> None:
        """Seats a launcher."""
        self._socket, self._channel = connection, channel
        channel.send(self._prepare)

    @property
    def free(self) -> bool:
        """Whether nobody has come yet."""
        return self._socket is None

    @property
    def gone(self) -> bool:
        """Whether who had come is gone."""
        return not self.free and self._channel.ended

    @property
    def silence(self) -> float:
        """Seconds since its last event, or since it waits."""
        return time.monotonic() - self._made if self.free else self._channel.silence

    def send(self, kind: str, **facts: Any) -> None:
        """Sends what is asked for, to whoever is there."""
        if not self.free:
            super().send(kind, **facts)

    def read(self) -> list[Event]:
        """Returns what has happened there; while nobody is, looks whether somebody comes."""
        if self.free:
            self._place.receive()
        return [] if self.free else self._channel.read()

    def close(self) -> None:
        """Ends the connection."""
        if self._socket is not None:
            self._socket.close()
        self._place.leave(self)


class RendezvousPlace:
    """The hosts that have come.

    Args:
        spec: What was asked.
        listener: As `listen` returns it.
        received: Signals to this process are appended to it.

    Attributes:
        hosts, addresses, remedy, where: As `toolkit.launch.supervisor.agents.Place` has them.

    Raises:
        LaunchError: Not all have come in time.
        JobStopped: A signal has come.
    """

    remedy = "See what the launcher on {host} says"
    where = ""

    def __init__(self, spec: JobSpec, listener: socket.socket, received: Sequence[int]) -> None:
        self._spec = spec
        self._listener = listener
        self._coming: list[tuple[socket.socket, Channel]] = []
        self._seats: list[tuple[Host, _Seat]] = []
        self._refused = ""
        self._first: list[tuple[socket.socket, Channel, Event]] = []
        self._wait(received)
        wanted = sum(number for _, number in spec.counts)
        own = len(visible_gpus(os.environ)) or 1
        rooms = spread(wanted, spec.nodes) if wanted else [own, *(hello["room"] for _, _, hello in self._first)]
        names = [socket.gethostname(), *(str(hello["host"]) for _, _, hello in self._first)]
        names = [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names)]
        self.hosts = tuple(Host(name, room) for name, room in zip(names, rooms, strict=True))
        self.addresses = {self.hosts[0]: split(spec.rendezvous or "")[0]}
        for host, (connection, _, _) in zip(self.hosts[1:], self._first, strict=True):
            self.addresses[self.hosts[0]] = connection.getsockname()[0]
            self.addresses[host] = connection.getpeername()[0]
        check_addresses(self.addresses, open_network=spec.open_network)

    def call(self, host: Host) -> AgentLike:
        """Returns an agent of this machine; of another, that of the launcher that has come or will come from there."""
        if host == self.hosts[0]:
            agent = Agent()
            agent.send("prepare", number=host.tasks, command=self._spec.command)
            return agent
        times = {"silence": self._spec.silence, "grace": self._spec.grace}
        prepare = event("prepare", number=host.tasks, mark="", first=False, **times)
        seat = _Seat(self, prepare)
        self._seats.append((host, seat))
        if self._first:
            connection, channel, _ = self._first.pop(0)
            seat.take(connection, channel)
        return seat

    def cluster(self, ports: Mapping[Host, Sequence[int]]) -> tuple[Cluster, dict[Task, Host]]:
        """Returns the cluster of the hosts that are there, and each task's host."""
        return assign(self._spec.counts, self.hosts, self.addresses, ports)

    def receive(self) -> None:
        """Seats a launcher that comes after the start, in the place of one that is gone."""
        for connection, channel, _ in self._arrived():
            host, seat = next(((h, s) for h, s in self._seats if s.free), (None, None))
            if host is None or seat is None:
                self._refuse(connection, channel, "that job already has all its hosts", "End one of them first")
                continue
            self.addresses[host] = connection.getpeername()[0]
            seat.take(connection, channel)

    def leave(self, seat: _Seat) -> None:
        """Forgets a seat."""
        self._seats = [(host, each) for host, each in self._seats if each is not seat]

    def close(self, ended: ToolkitError | None = None) -> None:
        """Tells those that have come how the job has ended, and lets the address go."""
        code, text = (ended.exit_code, str(ended)) if ended else (0, "")
        for _, seat in self._seats:
            seat.send("over", code=code, text=text, stopped=isinstance(ended, JobStopped))
        for connection, channel in [(c, ch) for c, ch, _ in self._first] + self._coming:
            channel.send(event("over", code=code, text=text, stopped=isinstance(ended, JobStopped)))
            connection.close()
        self._listener.close()

    def _wait(self, received: Sequence[int]) -> None:
        """Waits until the others have come."""
        deadline = time.monotonic() + self._spec.start_timeout
        while len(self._first) < self._spec.nodes - 1:
            if received:
                self.close(JobStopped(received[0]))
                raise JobStopped(received[0])
            if time.monotonic() > deadline:
                error = LaunchError(
                    asked=f"{self._spec.nodes} hosts are to meet at {self._spec.rendezvous}",
                    found=f"{1 + len(self._first)} came within {self._spec.start_timeout:g} s{self._refused}",
                    remedy="Run the same command on every host, and see that they can reach that address",
                )
                self.close(error)
                raise error
            select.select([self._listener.fileno(), *(channel.fileno() for _, channel in self._coming)], [], [], _TICK)
            self._first += self._arrived()

    def _arrived(self) -> list[tuple[socket.socket, Channel, Event]]:
        """Returns those that have come and belong to this job; answers the others."""
        try:
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._coming.append((connection, Channel(connection.fileno(), connection.fileno())))
        except BlockingIOError:
            pass
        found, waiting = [], []
        for connection, channel in self._coming:
            said = channel.read()
            hello = said[0] if said and said[0]["event"] == "hello" else None
            if hello is None:
                if channel.ended or channel.silence > _HELLO or said or channel.strange:
                    connection.close()  # Whoever it was.
                else:
                    waiting.append((connection, channel))
                continue
            wrong = self._wrong(hello)
            if wrong:
                self._refused += f"; the launcher on {hello.get('host')} was refused because {wrong[0]}"
                self._refuse(connection, channel, *wrong)
            else:
                found.append((connection, channel, hello))
        self._coming = waiting
        return found

    def _wrong(self, hello: Event) -> tuple[str, str] | None:
        if hello.get("version") != __version__:
            return (
                f"it has version {hello.get('version')} of this toolkit, not {__version__}",
                f"Install {__version__} on every host",
            )
        if hello.get("nodes") != self._spec.nodes:
            return f"it has --nodes={hello.get('nodes')}, not {self._spec.nodes}", "Give every host the same number"
        if hello.get("program") != program_of(self._spec):
            return "it starts another job: command or numbers of tasks differ", "Use a different address for each job"
        return None

    def _refuse(self, connection: socket.socket, channel: Channel, found: str, remedy: str) -> None:
        asked = f"this launcher asked to join the job at --rendezvous={self._spec.rendezvous}"
        channel.send(event("refused", asked=asked, found=found, remedy=remedy))
        connection.close()
