"""Joins a rendezvous: starts this host's tasks as the launcher there says, until the job is over."""

import base64
import math
import os
import select
import shlex
import socket
import time
from collections.abc import Sequence
from typing import Any

from toolkit import __version__
from toolkit.cluster import Task, split
from toolkit.errors import JobStopped, LaunchError, TaskFailed
from toolkit.launch.agent.channel import Channel
from toolkit.launch.agent.connection import started_here
from toolkit.launch.agent.program import serve
from toolkit.launch.agent.tasks import visible_gpus
from toolkit.launch.backends import token
from toolkit.launch.display.display import Display
from toolkit.launch.display.output import Output
from toolkit.launch.events import Event, data, event
from toolkit.launch.job.spec import JobSpec
from toolkit.launch.supervisor import state
from toolkit.launch.supervisor.decide import Budget, Next, What, decide
from toolkit.support import signals
from toolkit.support.words import counted

__all__ = ["join"]

_TICK = 0.05
_HELLO = 15.0  # Seconds in which the launcher at the address must answer.
_CALL = 5.0  # Seconds that a connection may take; signals wait meanwhile.
_AGAIN = 0.5  # Seconds between two attempts to connect while no launcher listens.


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
        budget = Budget(spec.max_restarts, in_all=spec.max_total_restarts)
        while True:
            over = _serve_once(spec, display, received, work, budget)
            if over is not None:
                break
            if received:
                raise JobStopped(received[0])
            if decide(What.FAILED, budget) is Next.FAIL:
                break
            display.say(f"launch: the launcher at {spec.rendezvous} is gone; waiting for it")
        if over is None:
            raise TaskFailed(f"The launcher at {spec.rendezvous} is gone, and the tasks here have ended.", code=1)
        if over["stopped"]:
            raise JobStopped(over["code"] - 128)
        if over["code"]:
            raise TaskFailed(over["text"], code=over["code"])
        display.say(f"launch: done; logs are with the launcher at {spec.rendezvous}")


def _serve_once(spec: JobSpec, display: Display, received: list[int], work: bytes, budget: Budget) -> Event | None:
    with _connected(spec, received) as connection:
        channel = Channel(connection.fileno(), connection.fileno())
        channel.send(event("knock"))  # A program that isn't a launcher answers otherwise or hangs up.
        answers = _Answers(spec, channel, received)
        theirs, mine = str(answers.next(_HELLO).get("nonce")), token.nonce()
        # Only now, because the listening launcher has written the token by now.
        secret = token.read(spec.rendezvous or "")
        hello = {
            "nodes": spec.nodes,
            "version": __version__,
            "program": token.program_of(spec),
            "host": socket.gethostname(),
        }
        room = len(visible_gpus({**os.environ, **spec.environment})) or 1
        channel.send(event("hello", room=room, nonce=mine, proof=token.proof(secret, "joiner", theirs, mine), **hello))
        welcome = answers.next()
        if not token.proves(welcome.get("proof"), secret, "listener", theirs, mine):
            raise answers.strange()
        asked = answers.next()
        if asked["event"] == "over":
            return asked
        display.say(
            f"launch: {counted(asked['number'], 'task')} here of the job at {spec.rendezvous}; "
            "that launcher has the logs"
        )
        outputs: dict[str, Output] = {}
        agent = started_here(number=asked["number"], command=spec.command)
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
                    lines = outputs[found["task"]].take(data(found["text"]))
                    display.lines(Task.parse(found["task"]), lines)
                elif found["event"] == "report":
                    budget.advance(state.reached_by(found["facts"]))
                elif found["event"] == "note":
                    display.say(found["text"])

            return serve(agent, channel, received, silence=asked["silence"], grace=asked["grace"], seen=show, own=own)
        finally:
            agent.close()
            for output in outputs.values():
                output.close()


class _Answers:
    """The messages of the launcher at the rendezvous before the job begins, one after another."""

    def __init__(self, spec: JobSpec, channel: Channel, received: Sequence[int]) -> None:
        self._spec, self._channel, self._received = spec, channel, received
        self._read: list[Event] = []

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
        while not self._read and not self._channel.ended and not self._channel.strange:
            if self._received:
                raise JobStopped(self._received[0])
            if time.monotonic() > deadline:
                break
            select.select([self._channel], [], [], _TICK)
            self._read = self._channel.read()
        if self._read:
            found = self._read.pop(0)
            if found["event"] == "refused":
                raise LaunchError(**{name: str(found.get(name)) for name in ("asked", "found", "remedy")})
            return found
        if self._channel.strange or self._channel.ended or within < self._spec.start_timeout:
            raise self.strange()
        raise LaunchError(
            asked=f"--rendezvous={self._spec.rendezvous} is where the hosts find one another",
            found=f"not all {self._spec.nodes} hosts came within {self._spec.start_timeout:g} s, "
            "so that launcher didn't answer",
            remedy="Run the same command on every host",
        )

    def strange(self) -> LaunchError:
        """Returns the error about a program that answers but isn't this job's launcher."""
        return LaunchError(
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
