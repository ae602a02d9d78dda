"""Coming to a rendezvous: this host's tasks are started as the launcher there says, until the job is over."""

import base64
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

from toolkit import __version__
from toolkit.cluster import Task, split
from toolkit.errors import JobStopped, LaunchError, TaskFailed
from toolkit.launch.agent.agent import Agent
from toolkit.launch.agent.channel import Channel
from toolkit.launch.agent.program import serve
from toolkit.launch.agent.tasks import visible_gpus
from toolkit.launch.backends.rendezvous import program_of
from toolkit.launch.display.display import Display
from toolkit.launch.display.output import Output
from toolkit.launch.events import Event, data, event
from toolkit.launch.job.spec import JobSpec
from toolkit.support import signals

__all__ = ["join"]

_TICK = 0.05
_CALL = 5.0  # Seconds that a connection may take, in which no signal is heeded.
_AGAIN = 0.5  # Seconds between two calls to an address where nobody listens yet.


def join(spec: JobSpec, received: list[int], *, work: bytes = b"") -> None:
    """Comes to the launcher that listens at the rendezvous, and starts this host's tasks as it says, until it is over.

    Args:
        spec: What was asked, here.
        received: Signals to this process are appended to it.
        work: What the tasks call in the place of a script.

    Raises:
        LaunchError: Nobody listens there in time, or this launcher isn't one of that job's.
        TaskFailed: The job has failed, or that launcher is gone.
        JobStopped: The job was stopped.
    """
    with Display(tee=spec.tee, only=spec.only, native_logs=spec.native_logs) as display:
        for attempt in range(spec.max_restarts + 1):
            over = _serve_once(spec, display, received, work)
            if over is not None:
                break
            if received:
                raise JobStopped(received[0])
            if attempt < spec.max_restarts:
                display.say(f"launch: the launcher at {spec.rendezvous} is gone; waiting for it")
        if over is None:
            raise TaskFailed(f"The launcher at {spec.rendezvous} is gone, and the tasks here have ended.", code=1)
        if over["stopped"]:
            raise JobStopped(over["code"] - 128)
        if over["code"]:
            raise TaskFailed(over["text"], code=over["code"])
        display.say(f"launch: done; logs are with the launcher at {spec.rendezvous}")


def _serve_once(spec: JobSpec, display: Display, received: list[int], work: bytes) -> Event | None:
    with _connected(spec, received) as connection:
        channel = Channel(connection.fileno(), connection.fileno())
        hello = {"nodes": spec.nodes, "version": __version__, "program": program_of(spec), "host": socket.gethostname()}
        channel.send(event("hello", room=len(visible_gpus(os.environ)) or 1, **hello))
        asked: list[Event] = []
        deadline = time.monotonic() + spec.start_timeout
        while not asked and not channel.ended:
            if received:
                raise JobStopped(received[0])
            if channel.strange or time.monotonic() > deadline:
                break
            select.select([channel], [], [], _TICK)
            asked = channel.read()
        if not asked:
            late = f"not all {spec.nodes} hosts came within {spec.start_timeout:g} s, so that launcher didn't answer"
            strange = channel.strange or channel.ended
            raise LaunchError(
                asked=f"--rendezvous={spec.rendezvous} is where the hosts find one another",
                found="a program that isn't a launcher of this toolkit answers there" if strange else late,
                remedy="Choose a free port at that host" if strange else "Run the same command on every host",
            )
        if asked[0]["event"] == "refused":
            raise LaunchError(**{name: asked[0][name] for name in ("asked", "found", "remedy")})
        if asked[0]["event"] == "over":
            return asked[0]
        display.say(
            f"launch: {asked[0]['number']} tasks of the job at {spec.rendezvous} run here; that launcher has the logs"
        )
        outputs: dict[str, Output] = {}
        agent = Agent()
        try:
            # Whoever asks, what runs here is what the user of this host has said.
            own: dict[str, Any] = {"command": list(spec.command), "environment": spec.environment}
            own["call"] = base64.b64encode(work).decode()

            def show(found: Event) -> None:
                if found["event"] == "started":
                    display.expect(sorted({*map(Task.parse, outputs), Task.parse(found["task"])}, key=str))
                    outputs[found["task"]] = Output(os.devnull)
                elif found["event"] == "output":
                    lines = outputs[found["task"]].take(data(found["text"]))
                    display.lines(Task.parse(found["task"]), lines)
                elif found["event"] == "note":
                    display.say(found["text"])

            return serve(agent, channel, received, prepare=asked[0], seen=show, own=own)
        finally:
            agent.close()
            for output in outputs.values():
                output.close()


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
