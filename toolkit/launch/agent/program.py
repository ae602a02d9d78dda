"""The agent's process, and what every agent does when its connection ends.

    python -m toolkit.launch.agent.program

What it is asked for comes as lines of JSON on standard input, so no shell ever sees a name, a path or a value, and what
happens goes to standard output. The end of its input, or silence there, means that the supervisor or the connection is
gone: the tasks get time for a checkpoint, and are ended. When the process itself ends, in whatever way, so do they.
"""

import os
import pathlib
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence

from toolkit.errors import RequestError
from toolkit.launch.agent.agent import Agent
from toolkit.launch.agent.channel import Channel
from toolkit.launch.agent.connection import ConnectedAgent
from toolkit.launch.events import Event, event
from toolkit.support import signals

__all__ = ["serve"]

_TICK = 0.05
_FIRST = 60.0  # Seconds in which the first request must arrive.


def serve(
    agent: Agent | ConnectedAgent,
    channel: Channel,
    received: Sequence[int],
    *,
    silence: float,
    grace: float,
    seen: Callable[[Event], object] = lambda _: None,
    own: dict | None = None,
) -> Event | None:
    """Serves requests until the connection ends; the tasks then get time to end.

    Args:
        agent: Does it; it has been asked to prepare.
        channel: The connection to the supervisor.
        received: Signals to this process are appended to it.
        silence: Seconds after which the supervisor counts as gone.
        grace: Seconds that the tasks then get to end.
        seen: Is given each event, too.
        own: What takes the place of such facts where tasks are to be started.

    Returns:
        The supervisor's last word; None where it, or the connection, is gone without one.
    """
    ends, sent = float("inf"), 0
    asked: list[Event] = []
    alive: set[str] = set()
    over: Event | None = None
    while True:
        for message in asked:
            if message["event"] == "over":
                over = message
            else:
                facts = {**message, **((own or {}) if message["event"] == "start" else {})}
                agent.send(facts.pop("event"), **facts)
        found = agent.read(silent=channel.full)
        if agent.gone:
            return over
        for each in found:
            if each["event"] == "started":
                alive.add(each["task"])
            elif each["event"] == "ended":
                alive.discard(each["task"])
            seen(each)
        found += [event("signal", number=int(number)) for number in received[sent:]]
        sent = len(received)
        channel.send(*found)
        now = time.monotonic()
        if now > ends or ((over or ends < float("inf")) and not alive):
            return over
        waits = [agent.fileno(), *([channel.fileno()] if ends == float("inf") else [])]
        if channel.full:
            time.sleep(_TICK / 10)
        else:
            select.select(waits, [], [], _TICK)
        asked = channel.read()
        if ends == float("inf") and (channel.ended or channel.silence > silence):
            # If the other side was only suspended, it reads this later.
            channel.send(event("unheard", seconds=round(channel.silence)))
            agent.send("signal", number=int(signal.SIGTERM))
            ends = now + grace


def _main() -> int:
    writing = os.dup(1)
    os.dup2(2, 1)  # Anything else on standard output would not be an event.
    channel = Channel(0, writing)
    asked: list[Event] = []
    while not asked and not channel.ended and channel.silence < _FIRST:
        select.select([channel], [], [], 1.0)
        asked = channel.read()
    if not asked or asked[0]["event"] != "prepare":
        sys.stderr.write("error: toolkit.launch.agent.program is started by toolkit launch, not by hand\n")
        return RequestError.exit_code
    prepare = dict(asked[0])
    try:
        directory = pathlib.Path(prepare["directory"]).expanduser()
        os.chdir(directory if directory.is_absolute() else pathlib.Path.home() / directory)
    except OSError as error:
        why = f"can't enter the directory {prepare['directory']}: {(error.strerror or '').lower()}"
        channel.send(event("refused", asked="", found=why, remedy=""))
        return RequestError.exit_code
    with signals.recorded() as received, signals.waiting_for_children():
        agent = Agent()
        try:
            for message in asked:
                agent.send(message.pop("event"), **message)
            serve(agent, channel, received, silence=prepare["silence"], grace=prepare["grace"])
        finally:
            agent.close()
    return 0


if __name__ == "__main__":
    sys.exit(_main())
