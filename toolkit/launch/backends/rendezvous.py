"""Hosts that find one another at an address: the same command on each, without ssh or a scheduler.

The first launcher that comes at HOST listens there, and supervises; the others come to it, and are its agents. A host
runs the command that it was itself given, and no other; it is sent neither the first host's environment nor its
function.

Each side proves that it has the job's token before anything else is taken from it. Who listens makes one for each job,
unless TOOLKIT_TOKEN gives it, and keeps it in a file that only its user may read: launchers that share the home
directory find it there. Others are given it in TOOLKIT_TOKEN. The token itself is never sent: each side sends a number
that is used once, and answers the other's with an HMAC over both (RFC 2104), each in its own role.
"""

import base64
import contextlib
import errno
import hashlib
import hmac
import math
import os
import pathlib
import secrets
import select
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from toolkit import __version__
from toolkit.cluster import Task, split
from toolkit.cluster.addresses import is_loopback
from toolkit.errors import JobStopped, LaunchError, TaskFailed
from toolkit.launch.agent.connection import Channel, ConnectedAgent, local_agent
from toolkit.launch.agent.program import serve
from toolkit.launch.agent.tasks import own_addresses, visible_gpus
from toolkit.launch.display import Display, Output, say
from toolkit.launch.events import Event, as_failure, ending, event, raise_ending
from toolkit.launch.spec import Host, JobSpec, spread
from toolkit.launch.supervisor import state
from toolkit.launch.supervisor.agents import Backend, check_addresses
from toolkit.launch.supervisor.decide import Budget, Next, What, decide
from toolkit.support import files, signals
from toolkit.support.strangers import Strangers
from toolkit.support.words import counted

TOKEN = "TOOLKIT_TOKEN"
_SHORTEST = 12  # Characters. With random letters and digits, that is 60 bits or more.
_TICK = 0.05
_HELLO_WITHIN = 10.0  # Seconds in all in which a new connection must prove itself.
_HELLO_BYTES = 1 << 13  # The most bytes that are read of it until then. A hello has some hundreds.
_WELCOME_BYTES = 1 << 16  # The same of a launcher that listens. It may have to say how the job has ended.
_MOST_REFUSED = 10  # How many refusals are said. Who has no token can ask for any number of them.
_SAID = 30.0  # Seconds between two messages about missing hosts.
_OWN = ("command", "prefix", "environment", "call")  # What each host has by itself.
_HELLO = 15.0  # Seconds in which the launcher at the address must answer.
_CALL = 5.0  # Seconds that a connection may take; signals wait meanwhile.
_DRAINED = 16  # The most reads from a connection that is being closed.
_AGAIN = 0.5  # Seconds between two attempts to connect while no launcher listens.


def make_token(address: str) -> str:
    """Returns the token of a job whose launchers connect to an address: the given one, or a new one.

    A new one is kept for launchers that share this home directory. Where it can't be, they are given it by hand.

    Args:
        address: HOST:PORT, as every launcher is given it.

    Raises:
        LaunchError: TOOLKIT_TOKEN is so short that it can be guessed.
    """
    if given := os.environ.get(TOKEN):
        if len(given) < _SHORTEST:
            raise LaunchError(
                asked=f"{TOKEN} is to prove who belongs to the job at {address}",
                found=f"it has {len(given)} characters, which can be guessed",
                remedy=f"Give it at least {_SHORTEST}, such as what `openssl rand -hex 16` writes, on every host",
            )
        return given
    token = secrets.token_urlsafe(18)
    _forget_token(address)
    try:
        files.make_directory(token_file(address).parent)
        with open(os.open(token_file(address), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
            written.write(token)
    except OSError:
        _forget_token(address)  # A partly written token doesn't count.
    return token


def _read_token(address: str) -> str:
    """Returns the token of a launcher that connects to an address; "" if it has none."""
    with contextlib.suppress(OSError):
        return os.environ.get(TOKEN) or token_file(address).read_text()
    return ""


def _forget_token(address: str) -> None:
    """Removes the file when the job is over or begins."""
    with contextlib.suppress(OSError):
        token_file(address).unlink()


def _nonce() -> str:
    """Returns a random text that is used once."""
    return secrets.token_hex(16)


def _proof(token: str, role: str, *numbers: str) -> str:
    """Returns a proof that one has the token, without revealing it.

    Args:
        token: The token.
        role: Whose proof it is, so that neither side's can be sent back as the other's.
        numbers: Both sides' numbers, the listener's first.
    """
    return hmac.new(token.encode(), _bytes(" ".join((role, *numbers))), hashlib.sha256).hexdigest()


def _proves(found: object, token: str, role: str, *numbers: str) -> bool:
    """Returns whether a text is such a proof."""
    return isinstance(found, str) and hmac.compare_digest(_bytes(found), _bytes(_proof(token, role, *numbers)))


def _bytes(text: str) -> bytes:
    """Returns a text's bytes. A stranger's may hold halves of letters, which have none."""
    return text.encode(errors="replace")


def _token_words(address: str, token: str, *, shown: bool) -> str:
    """Returns how other hosts get the token if they share no home directory: the token, or the name of its file."""
    visible = token if shown else f"..., which is in {token_file(address)}"
    return f"launch: start hosts that don't share this home directory with {TOKEN}={visible}"


def program_of(spec: JobSpec) -> str:
    """Returns what distinguishes the jobs that gather at one address."""
    return hashlib.sha256(repr((spec.command, spec.counts)).encode()).hexdigest()[:16]


def token_file(address: str) -> pathlib.Path:
    """Returns where a token is kept, in a file that only its user can read."""
    return files.state_directory() / "rendezvous" / hashlib.sha256(address.encode()).hexdigest()[:16]


def listen(spec: JobSpec) -> socket.socket | None:
    """Returns a socket that listens at the rendezvous; None if the address is another host's or already taken.

    Raises:
        LaunchError: The host has no address, or nobody may listen there.
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
    here = next((answer for answer in answers if answer[4][0] in own or is_loopback(str(answer[4][0]))), None)
    if here is None:
        return None
    made = socket.socket(here[0], socket.SOCK_STREAM)
    # Debian maps a machine's own name to 127.0.1.1, which other machines can't reach.
    named = is_loopback(str(here[4][0])) and host not in ("localhost", here[4][0])
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("", port) if named else here[4])
        made.listen(128)
        made.setblocking(False)
        return made
    except OSError as error:
        made.close()
        # Taken by this job's first launcher, or by another program, which answers otherwise.
        if error.errno == errno.EADDRINUSE:
            return None
        raise LaunchError(
            asked=f"--rendezvous={spec.rendezvous} is this machine, whose launcher listens there",
            found=f"it can't ({(error.strerror or str(error)).lower()})",
            remedy="Give a port from 1024 to 65535 at an address of this machine",
        ) from None


class _Link(Channel):
    """A channel over a socket, which it owns.

    Args:
        connection: The socket.
        peer: The address at its other end; "" if nobody needs it.
        most: How many bytes are read until the other end has proved itself.

    Attributes:
        socket: The socket.
        addresses: Of this end, and of the other one. A socket whose peer was killed can't be asked any more.
    """

    def __init__(self, connection: socket.socket, peer: str = "", *, most: int) -> None:
        super().__init__(connection.fileno(), connection.fileno(), most=most)
        self.socket = connection
        self.addresses = connection.getsockname()[0], peer

    def close(self) -> None:
        """Closes the socket, in a way that the other end still reads what was sent."""
        super().close()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            for _ in range(_DRAINED):  # Unread bytes would make of this end a reset, which overtakes the last word.
                if not self.socket.recv(1 << 16):
                    break
        self.socket.close()


class _HungUpError(LaunchError):
    """The program that listens has closed the connection without a strange word: it may have too many callers."""


class _GoneError(TaskFailed):
    """The launcher at the rendezvous, or the agent here, has ended without a word."""


class _Seat(ConnectedAgent):
    """A host's place in the job: taken by a launcher, or free.

    Args:
        backend: Seats those that come.
        prepare: What the agent is to prepare.
    """

    polled = True  # A launcher that comes too late gets an answer, too.

    def __init__(self, backend: "RendezvousBackend", prepare: Event) -> None:
        self._backend = backend
        self._prepare = prepare
        self._made = time.monotonic()
        self.free = True  # Whether no launcher has connected yet.

    def take(self, link: _Link) -> None:
        """Assigns it to a launcher."""
        self.free = False
        super().__init__(link)
        link.send(self._prepare)

    @property
    def gone(self) -> bool:
        """Whether its launcher is lost."""
        return not self.free and self._channel.ended

    @property
    def silence(self) -> float:
        """Seconds since its last event, or since it became free."""
        return time.monotonic() - self._made if self.free else self._channel.silence

    def fileno(self) -> int:
        """The launcher's connection; -1 while there is none."""
        return -1 if self.free else super().fileno()

    def send(self, kind: str, **facts: Any) -> None:
        """Sends requests to the launcher, if there is one, without what each host has by itself."""
        if not self.free:
            super().send(kind, **{name: fact for name, fact in facts.items() if name not in _OWN})

    def read(self, *, silent: bool = False) -> list[Event]:
        """Returns its events; while it has no launcher, accepts new ones."""
        self._backend.receive()
        return [] if self.free else super().read(silent=silent)

    def close(self) -> None:
        """Ends the connection."""
        if not self.free:
            super().close()
        self._backend.seats = [(host, each) for host, each in self._backend.seats if each is not self]


class RendezvousBackend(Backend):
    """The hosts that have connected.

    Args:
        spec: What was asked.
        listener: As `listen` returns it.
        received: Signals to this process are appended to it.
        say: Shows a message.

    Attributes:
        hosts, addresses, remedy: As `toolkit.launch.supervisor.agents.Backend` has them.
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
        self._token = make_token(spec.rendezvous or "")
        self._strangers = Strangers(within=_HELLO_WITHIN)
        self._coming: list[tuple[_Link, str]] = []  # With the number that each is to prove itself by.
        self._looked = 0.0  # When new connections were accepted last.
        self._first: list[tuple[_Link, Event]] = []  # With what each has said of itself.
        self._late: list[tuple[_Link, float]] = []  # And until when each waits for a place.
        self.seats: list[tuple[Host, _Seat]] = []
        self._refused: list[tuple[str, str]] = []  # Hosts, and why.
        try:
            self._gather(received)
        except BaseException as error:
            self.close(error)
            raise

    def _gather(self, received: Sequence[int]) -> None:
        """Waits for the other hosts, and lays all of them out."""
        spec = self.spec
        self._wait(received)
        wanted = sum(number for _, number in spec.counts)
        own = len(visible_gpus({**os.environ, **spec.environment})) or 1
        rooms = spread(wanted, spec.nodes) if wanted else [own, *(hello["room"] for _, hello in self._first)]
        names = [socket.gethostname(), *(str(hello["host"]) for _, hello in self._first)]
        names = [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names)]
        self.hosts = tuple(Host(name, room) for name, room in zip(names, rooms, strict=True))
        self.addresses = {self.hosts[0]: split(spec.rendezvous or "")[0]}
        for host, (link, _) in zip(self.hosts[1:], self._first, strict=True):
            self.addresses[self.hosts[0]], self.addresses[host] = link.addresses
        check_addresses(self.addresses, open_network=spec.open_network)

    def call(self, host: Host) -> ConnectedAgent:
        """Returns an agent of this machine, or the launcher that has connected or will connect from another host."""
        if host == self.hosts[0]:
            return local_agent(number=host.tasks, command=self.spec.command)
        times = {"silence": self.spec.silence, "grace": self.spec.grace}
        prepare = event("prepare", number=host.tasks, mark="", first=False, **times)
        seat = _Seat(self, prepare)
        self.seats.append((host, seat))
        if self._first:
            seat.take(self._first.pop(0)[0])
        return seat

    def receive(self) -> None:
        """Gives the place of a lost launcher to one that connects later."""
        patience = time.monotonic() + self.spec.silence + self.spec.grace
        waiting, self._late = [*self._late, *((link, patience) for link, _ in self._arrived())], []
        for link, until in waiting:
            host, seat = next(((h, s) for h, s in self.seats if s.free), (None, None))
            if host is not None and seat is not None:
                self.addresses[host] = link.addresses[1]
                seat.take(link)
            elif time.monotonic() < until:
                self._late.append((link, until))
            else:
                self._refuse(link, "that job already has all its hosts", "End one of them first")

    def close(self, ended: BaseException | None) -> None:
        """Tells the connected launchers how the job has ended, and closes the address."""
        word = ending(ended)
        _forget_token(self.spec.rendezvous or "")
        for _, seat in self.seats:
            seat.send("over", **word)
        for link, _ in [*self._first, *self._late]:
            link.send(event("over", **word))
        for link, _ in [*self._first, *self._late, *self._coming]:
            link.close()
        self._listener.close()

    def _wait(self, received: Sequence[int]) -> None:
        """Waits until the others have connected."""
        began = said = time.monotonic()
        deadline = began + self.spec.start_timeout
        if self.spec.nodes > 1:
            self._say(f"launch: {self._here()}, waiting for {self.spec.nodes - 1} more")
        if self.spec.nodes > 1 and not os.environ.get(TOKEN):
            shown = sys.stdout is not None and sys.stdout.isatty()  # Written to no file.
            (say if shown else self._say)(_token_words(self.spec.rendezvous or "", self._token, shown=shown))
        while len(self._first) < self.spec.nodes - 1:
            if received:
                raise JobStopped(received[0])
            if time.monotonic() > deadline:
                refused = "".join(f"; the launcher on {host} was refused because {why}" for host, why in self._refused)
                raise LaunchError(
                    asked=f"{self.spec.nodes} hosts are to meet at {self.spec.rendezvous}",
                    found=f"{1 + len(self._first)} came within {self.spec.start_timeout:g} s{refused}",
                    remedy="Run the same command on every host, and see that they can reach that address",
                )
            time.sleep(_TICK)  # Not for descriptors: strangers would keep it busy.
            self._first += self._arrived()
            if time.monotonic() - said > _SAID:
                said = time.monotonic()
                self._say(f"launch: {self._here()} after {said - began:.0f} s")

    def _here(self) -> str:
        return f"{1 + len(self._first)} of {self.spec.nodes} hosts at {self.spec.rendezvous}"

    def _arrived(self) -> list[tuple[_Link, Event]]:
        """Returns the launchers that have connected and belong to this job; answers the others."""
        if time.monotonic() - self._looked > _TICK:
            self._looked = time.monotonic()
            for connection, peer in self._strangers.accept(self._listener):
                link, number = _Link(connection, peer, most=_HELLO_BYTES), _nonce()
                link.send(event("challenge", nonce=number))
                self._coming.append((link, number))
        found, waiting, overdue = [], [], set(self._strangers.overdue())
        for link, number in self._coming:
            said = [each for each in link.read() if each["event"] != "knock"]
            hello = said[0] if said and said[0]["event"] == "hello" else None
            if hello is None and not (link.ended or link.socket in overdue or said or link.strange):
                waiting.append((link, number))
                continue
            self._strangers.forget(link.socket)
            if hello is None:
                link.close()  # Not one of ours: drop the connection.
            elif wrong := self._wrong(hello, number):
                refused = ascii(str(hello.get("host"))[:60]), wrong[0]
                if refused not in self._refused and len(self._refused) < _MOST_REFUSED:
                    self._refused.append(refused)
                    self._say(f"launch: the launcher on {refused[0]} is refused, because {refused[1]}")
                self._refuse(link, *wrong)
            else:
                link.most = math.inf
                proof = _proof(self._token, "listener", number, str(hello.get("nonce")))
                link.send(event("welcome", proof=proof))
                found.append((link, hello))
        self._coming = waiting
        return found

    def _wrong(self, hello: Event, number: str) -> tuple[str, str] | None:
        if hello.get("version") != __version__:
            return (
                f"it has version {ascii(str(hello.get('version'))[:20])[1:-1]} of this toolkit, not {__version__}",
                f"Install {__version__} on every host",
            )
        if not _proves(hello.get("proof"), self._token, "joiner", number, str(hello.get("nonce"))):
            return (
                "it hasn't this job's token",
                f"Set {TOKEN} here to the token that the host of that address shows",
            )
        if hello.get("nodes") != self.spec.nodes:
            return f"it has --nodes={hello.get('nodes')}, not {self.spec.nodes}", "Give every host the same number"
        if hello.get("program") != program_of(self.spec):
            return "it starts another job: command or numbers of tasks differ", "Use a different address for each job"
        return None

    def _refuse(self, link: _Link, found: str, remedy: str) -> None:
        asked = f"this launcher asked to join the job at --rendezvous={self.spec.rendezvous}"
        link.send(event("refused", asked=asked, found=found, remedy=remedy))
        link.close()


def join(spec: JobSpec, received: list[int], *, work: bytes = b"") -> None:
    """Connects to the launcher at the rendezvous, and starts this host's tasks for it until the job is over.

    Args:
        spec: What was asked, here.
        received: Signals to this process are appended to it.
        work: What the tasks call in the place of a script.

    Raises:
        LaunchError: Nobody listens there in time, or this launcher isn't one of that job's.
        TaskFailed: The job has failed, or that launcher is gone.
        JobStopped: The job was stopped.
    """
    with Display(show=spec.show, native_logs=spec.native_logs) as display:
        budget, came = Budget(spec.max_restarts, in_all=spec.max_total_restarts), time.monotonic()
        while True:
            try:
                over = _serve_once(spec, display, received, work, budget)
                break
            except _HungUpError:
                if time.monotonic() - came > _HELLO:
                    raise
                signals.sleep(_AGAIN, received)
            except _GoneError as error:
                came = time.monotonic()
                if decide(What.FAILED, budget) is Next.FAIL:
                    raise
                display.say(f"launch: {error.words} Waiting for the launcher at {spec.rendezvous}")
            except OSError as error:
                raise as_failure(error) from error
        raise_ending(over)
        display.say(f"launch: done; logs are with the launcher at {spec.rendezvous}")


@contextlib.contextmanager
def _connection(spec: JobSpec, received: Sequence[int]) -> Iterator[_Link]:
    """Yields a connection to the launcher that listens there; if this launcher ends, it says of what."""
    with contextlib.closing(_Link(_connected(spec, received), most=_WELCOME_BYTES)) as channel:
        try:
            yield channel
        except BaseException as error:
            channel.send(event("over", **ending(error)))
            raise


def _serve_once(spec: JobSpec, display: Display, received: list[int], work: bytes, budget: Budget) -> Event:
    """Serves the launcher at the rendezvous until the job is over; returns how it has ended."""
    room = len(visible_gpus({**os.environ, **spec.environment})) or 1  # May take longer than a stranger may.
    with _connection(spec, received) as channel:
        channel.send(event("knock"))  # A program that isn't a launcher answers otherwise or hangs up.
        answers = _Answers(spec, channel, received)
        theirs, mine = str(answers.next(_HELLO).get("nonce")), _nonce()
        # Only now, because the listening launcher has written the token by now.
        secret = _read_token(spec.rendezvous or "")
        hello = {
            "nodes": spec.nodes,
            "version": __version__,
            "program": program_of(spec),
            "host": socket.gethostname(),
        }
        channel.send(event("hello", room=room, nonce=mine, proof=_proof(secret, "joiner", theirs, mine), **hello))
        welcome = answers.next()
        if not _proves(welcome.get("proof"), secret, "listener", theirs, mine):
            raise answers.strange()
        channel.most = math.inf
        asked = answers.next()
        if asked["event"] == "over":
            return asked
        display.say(
            f"launch: {counted(asked['number'], 'task')} here of the job at {spec.rendezvous}; "
            "that launcher has the logs"
        )
        outputs: dict[str, Output] = {}
        agent = local_agent(number=asked["number"], command=spec.command)
        try:
            # This host's user decides what runs here.
            own: dict[str, Any] = {"command": list(spec.command), "environment": spec.environment}
            own["prefix"] = shlex.split(spec.prefix)
            own["preempt_when"] = spec.preempt_when
            own["call"] = base64.b64encode(work).decode()

            def show(found: Event) -> None:
                if found["event"] == "started":
                    display.expect(sorted({*map(Task.parse, outputs), Task.parse(found["task"])}, key=str))
                    outputs[found["task"]] = Output(os.devnull)
                elif found["event"] == "output":
                    lines = outputs[found["task"]].take(found["text"])
                    display.lines(Task.parse(found["task"]), lines)
                elif found["event"] == "report":
                    budget.advance(state.reached_by(found["facts"]))
                elif found["event"] == "note":
                    display.say(found["text"])

            times = {"silence": asked["silence"], "grace": asked["grace"]}
            over = serve(agent, channel, received, answers.rest, **times, seen=show, own=own)
            if over is not None:
                return over
            if received:
                raise JobStopped(received[0])
            raise _gone(spec, agent if agent.gone else None)
        finally:
            agent.close()
            for output in outputs.values():
                output.close()


def _gone(spec: JobSpec, agent: ConnectedAgent | None = None) -> _GoneError:
    """Returns the error about a launcher that is gone, or this host's agent."""
    gone = f"The launcher at {spec.rendezvous} is gone"
    if agent is not None:
        gone = f"The agent on {socket.gethostname()} is gone ({agent.last_line().rstrip('.')})"
    return _GoneError(f"{gone}, and the tasks here have ended.", code=1)


class _Answers:
    """The messages of the launcher at the rendezvous before the job begins, one after another.

    Attributes:
        rest: Those that have come and that nobody has asked for.
    """

    def __init__(self, spec: JobSpec, channel: Channel, received: Sequence[int]) -> None:
        self._spec, self._channel, self._received = spec, channel, received
        self.rest: list[Event] = []

    def next(self, within: float = math.inf) -> Event:
        """Waits for the next message.

        Args:
            within: Seconds in which whatever is a launcher answers.

        Raises:
            LaunchError: None comes in time, it is no launcher that answers, or it refuses this one.
            JobStopped: A signal has come.
        """
        began = time.monotonic()
        deadline = began + min(self._spec.start_timeout, within)
        while not self.rest and not self._channel.ended and not self._channel.strange:
            if self._received:
                raise JobStopped(self._received[0])
            if time.monotonic() > deadline:
                break
            select.select([self._channel], [], [], _TICK)
            self.rest = self._channel.read()
        if self.rest:
            found = self.rest.pop(0)
            if found["event"] == "refused":
                raise LaunchError(**{name: str(found.get(name)) for name in ("asked", "found", "remedy")})
            return found
        if self._channel.ended and not self._channel.strange:
            raise self.strange(_HungUpError) if self._channel.most < math.inf else _gone(self._spec)
        if self._channel.strange or within < self._spec.start_timeout:
            raise self.strange()
        raise LaunchError(
            asked=f"--rendezvous={self._spec.rendezvous} is where the hosts find one another",
            found=f"not all {self._spec.nodes} hosts came within {self._spec.start_timeout:g} s, "
            "so that launcher didn't answer",
            remedy="Run the same command on every host",
        )

    def strange(self, kind: type[LaunchError] = LaunchError) -> LaunchError:
        """Returns the error about a program that answers but isn't this job's launcher."""
        return kind(
            asked=f"--rendezvous={self._spec.rendezvous} is where the hosts find one another",
            found="a program that isn't a launcher of this toolkit answers there",
            remedy="Choose a free port at that host",
        )


def _connected(spec: JobSpec, received: Sequence[int]) -> socket.socket:
    """Returns a connection to the launcher that listens there."""
    deadline = time.monotonic() + spec.start_timeout
    while True:
        try:
            return socket.create_connection(split(spec.rendezvous or ""), timeout=_CALL)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    asked=f"--rendezvous={spec.rendezvous} is where the hosts find one another",
                    found=f"no launcher answered there for {spec.start_timeout:g} s "
                    f"({(error.strerror or str(error)).lower()})",
                    remedy="Run the same command on that host, too, and see that this one can reach it",
                ) from None
        signals.sleep(_AGAIN, received)
