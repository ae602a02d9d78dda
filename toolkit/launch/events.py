"""What happens in a job, in one form: in memory, between machines, and in events.jsonl.

An event is a dictionary that JSON can hold. "event" says what it is; "task" whose it is, where it is a task's:

started   pid, attempt            a task's process has been started
output    data                    what it wrote, as it is: bytes as `text` makes them
report    facts, ago              what it reported of itself so many seconds ago: state, step, images_per_second ...
sample    cpu, memory, computes, stopped, dying      its process, looked at
stacks    text                    where its threads are
result    data                    the next piece of what a function has returned: base64 of a pickle, "" at its end
ended     code, pid               its process has ended
open      ports, addresses        ports of the job that other machines reach
note      text                    something that a person should know
ready     version, host, ports ...     an agent can start tasks
refused   asked, found, remedy    an agent can't do what it was asked for
signal    number                  an agent has received a signal

What an agent is asked for has the same form: prepare, start, again, signal, kill, stacks, look, finish, beat.
"""

import json
from typing import Any

__all__ = ["BEAT", "Event", "Reader", "data", "event", "line", "text"]

Event = dict[str, Any]

BEAT = 1.0  # Seconds between two signs of life.
_LONGEST = 256 << 20  # Bytes; what is longer is no event.


def event(kind: str, **facts: Any) -> Event:
    """Returns an event."""
    return {"event": kind, **facts}


def line(found: Event) -> bytes:
    """Returns an event as a line of JSON."""
    return json.dumps(found).encode() + b"\n"


def text(written: bytes) -> str:
    """Returns bytes in a form that JSON can hold, whether or not they are UTF-8."""
    return written.decode("utf-8", errors="surrogateescape")


def data(held: str) -> bytes:
    """Returns the bytes that `text` was given."""
    return held.encode("utf-8", errors="surrogateescape")


class Reader:
    """Takes bytes as they come, and returns whole events.

    Attributes:
        strange: The last lines that were none, such as a shell's greeting.
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # Of a line whose end hasn't come.
        self.strange: list[str] = []

    def events(self, piece: bytes) -> list[Event]:
        """Returns the events that these bytes complete."""
        *lines, rest = piece.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._rest, lines[0]])
            self._rest = []
        self._rest.append(rest)
        if sum(map(len, self._rest)) > _LONGEST:
            self._rest = []
        found = []
        for each in lines:
            try:
                made = json.loads(each)
                if not isinstance(made["event"], str):
                    raise TypeError(each)
                found.append(made)
            except (ValueError, KeyError, TypeError, RecursionError):
                self.strange = [*self.strange[-4:], each.decode(errors="replace")[:300]]
        return found
