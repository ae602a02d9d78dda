"""The events of a job, in one form: in memory, between machines, and in events.jsonl.

An event is a dictionary that JSON can hold. "event" says what it is, one of `KINDS`; "task" whose it is, where it is a
task's. What an agent is asked for has the same form.
"""

import json
import socket
from typing import Any

from toolkit.errors import JobStopped, TaskFailed, ToolkitError

Event = dict[str, Any]

# For each kind: where it goes ("record": events.jsonl; "agent": from an agent to the supervisor; "asked": the other
# way; "rendezvous": before the job begins), its fields, and its meaning.
KINDS: dict[str, tuple[str, str, str]] = {
    "job": ("record", "id", "a job begins"),
    "attempt": ("record", "number, tasks", "its tasks are started"),
    "started": ("record, agent", "task, pid; host, attempt", "a task's process has been started"),
    "ended": ("record, agent", "task, pid, code; host, dismissed", "a task's process has ended; code as Popen has it"),
    "note": ("record, agent", "text", "something that a person should know"),
    "restart": ("record", "text, used, in_vain, reached", "the job failed, and is started again"),
    "requeue": ("record", "", "the queue is asked to take the job again"),
    "stacks": ("record, agent", "text; tasks, or task", "where tasks are"),
    "waits": ("record", "task, pid, share", "the other tasks wait for this one, for that share of their time"),
    "spent": ("record", "attempt, seconds", "what an attempt has spent its time on so far, in seconds by kind"),
    "end": ("record", "code, text, stopped; asked, found, remedy", "the job has ended, with this exit code"),
    "ready": ("agent", "version, host, ports, shared, scratch", "an agent can start tasks"),
    "refused": ("agent, rendezvous", "asked, found, remedy", "what was asked for can't be done"),
    "output": ("agent", "task, text", 'what a task wrote, bytes as `text` makes them; "" at its end'),
    "report": ("agent", "task, facts, ago", "what a task said of itself so many seconds ago: state, step ..."),
    "sample": ("agent", "task, cpu, memory, computes, stopped, dying, phase", "a task's process, looked at"),
    "looked": ("agent", "number", "the answer to `look`: all that was before has been told"),
    "result": ("agent", "task, data", 'the next piece of what a function returned, base64 of a pickle; "" at its end'),
    "open": ("agent", "ports, addresses", "ports of the job that other machines reach"),
    "preempted": ("agent", "", "the machine is about to be taken away, as `--preempt_when` says"),
    "unheard": ("agent", "seconds", "nothing was heard of the supervisor for so long, so the tasks are ended"),
    "signal": ("agent, asked", "number; task", "an agent has received a signal; tasks are to get one"),
    "nccl": ("agent, asked", "text", 'NCCL\'s own report on its ranks; "" where nobody answers'),
    "prepare": ("asked", "number, command, given, mark, first ...", "hold ports for so many tasks"),
    "start": ("asked", "cluster, tasks, command, environment, options ...", "start these tasks"),
    "again": ("asked", "task", "start one task in the place of one that has ended"),
    "kill": ("asked", "task", "end a task at once"),
    "look": ("asked", "number", "tell how the tasks are"),
    "finish": ("asked", "", "end whatever still runs"),
    "beat": ("asked", "", "the supervisor lives"),
    "knock": ("rendezvous", "", "a launcher has come"),
    "challenge": ("rendezvous", "nonce", "who listens asks for a proof of the token"),
    "hello": ("rendezvous", "nonce, proof, version, nodes, program, host, room", "who has come, and its proof"),
    "welcome": ("rendezvous", "proof", "the listener's own proof"),
    "over": ("rendezvous", "code, text, stopped", "how the job has ended, or why a launcher leaves it"),
}

WAITS = "A thread waits for the file "  # A line in a file of stacks that introduces a path.
BEAT = 1.0  # Seconds between two heartbeats.
_LONGEST = 256 << 20  # The most bytes of an event.


def event(kind: str, **facts: Any) -> Event:
    """Returns an event of a known kind."""
    if kind not in KINDS:
        raise ValueError(f"{kind} is no kind of event")
    return {"event": kind, **facts}


def line(found: Event) -> bytes:
    """Returns an event as a line of JSON."""
    return json.dumps(found).encode() + b"\n"


def text(written: bytes) -> str:
    """Encodes bytes for JSON, whether or not they are UTF-8."""
    return written.decode("utf-8", errors="surrogateescape")


def data(held: str) -> bytes:
    """Returns the bytes that `text` encoded."""
    return held.encode("utf-8", errors="surrogateescape")


def as_failure(error: BaseException) -> ToolkitError:
    """Returns the error that a job fails with where this ends it: the same, or that the launcher broke, and of what."""
    if isinstance(error, ToolkitError):
        return error
    cause = f"{type(error).__name__}: {error}".rstrip(": ")
    return TaskFailed(f"The launcher on {socket.gethostname()} broke, and the tasks were ended: {cause}", code=1)


def ending(error: BaseException | None, words: str = "") -> dict[str, Any]:
    """Returns the facts of a job's end.

    Args:
        error: What has ended it; None where it is done.
        words: The last message about a job that is done.
    """
    if error is None:
        return {"code": 0, "text": words, "stopped": False}
    error = as_failure(error)
    return {"code": error.exit_code, "text": str(error), "stopped": isinstance(error, JobStopped)}


def raise_ending(end: Event) -> None:
    """Raises what a job has ended with; nothing where it is done."""
    if end["stopped"]:
        raise JobStopped(end["code"] - 128)
    if end["code"]:
        raise TaskFailed(end["text"], code=end["code"])


class Reader:
    """Splits a stream of bytes into events.

    Attributes:
        strange: The last lines that were none, such as a shell's greeting.
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # The beginning of an incomplete line.
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
