"""What tasks tell their launcher, and the variables that launchers set for their tasks.

A report is a JSON message on a connection to a Unix socket; datagrams were lost where a launcher has sixty tasks. Where
no launcher listens, nothing is sent, and a report costs a dictionary look-up.

The phase that a task is in its agent can read at any moment, also while the task can't answer: from a small file in
memory. A report would come too late, or not at all: steps are reported once in a while, and a task that hangs in native
code may hold Python's interpreter lock. To enter a phase costs some microseconds.
"""

import contextlib
import json
import mmap
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

SOCKET = "TOOLKIT_STATUS"  # "worker:1@/path/of/socket".
JOB_ID = "TOOLKIT_JOB_ID"  # Run directories are named after it: it is the same in all tasks and all attempts.
PARTIAL = "TOOLKIT_PARTIAL"  # "1" if launchers of other hosts start the other tasks, each with its own job id.
LOGS = "TOOLKIT_LOGS"  # The directory of the launcher's record of the job.
START_TIMEOUT = "TOOLKIT_START_TIMEOUT"  # Seconds.
HEARTBEAT_TIMEOUT = "TOOLKIT_HEARTBEAT_TIMEOUT"  # Seconds.
GRACE = "TOOLKIT_GRACE"  # Seconds.
SPENT = "TOOLKIT_SPENT"  # What the job's earlier attempts have spent their time on, as JSON.
ATTEMPT = "TOOLKIT_ATTEMPT"  # "2" after the first restart.
CALL = "TOOLKIT_CALL"  # The file of a function that is called instead of a script.
RESUME = "TOOLKIT_RESUME"  # "1" if the program that starts tasks doesn't know whether it is a restart.
# Labels that a script numbers in the order of a set are the same in all tasks, and in a new job that resumes a run.
HASH_SEED = {"PYTHONHASHSEED": "0"}

SECONDS_OF_SILENCE = 15.0  # The default after which a worker or a suspended task counts as lost.

_PATIENCE = 2.0  # Seconds.

_failed = _importing = False
_state = ""  # The last report.
_channel: tuple[int, socket.socket] | None = None  # And the process that sent it.


def job_id() -> str | None:
    """Returns the id of this process's job, such as "20260719-140512-3fa9"; None without a launcher."""
    return os.environ.get(JOB_ID)


def attempt_id() -> str | None:
    """Returns a text that all tasks of this attempt of a job share and no other tasks do; None if there is none.

    Where each host has its own launcher, each gives the job another id: tasks that compared them would refuse one
    another.
    """
    job = job_id()
    return None if job is None or os.environ.get(PARTIAL) == "1" else f"{job}, attempt {attempt()}"


def logs() -> str | None:
    """Returns the directory of the launcher's record of this job; None without a launcher."""
    return os.environ.get(LOGS)


def waited() -> dict[str, float]:
    """Returns "waited", the seconds for which this process's steps have waited for others, if they are counted."""
    module = sys.modules.get("toolkit.strategies.step.collectives")  # Not imported: a script may not use it.
    return {} if module is None else {"waited": round(module.waited(), 3)}


def attempt() -> int:
    """Returns which attempt of its job this process belongs to, counted from 1."""
    return int(os.environ.get(ATTEMPT, "1"))


def heartbeat_timeout() -> float:
    """Returns the seconds of silence after which a worker counts as lost: set by the launcher, or 15."""
    return float(os.environ.get(HEARTBEAT_TIMEOUT, str(SECONDS_OF_SILENCE)))


def restarted() -> bool:
    """Returns whether this job may be a restart, so that a run resumes from its checkpoint if it has one."""
    return attempt() > 1 or os.environ.get(RESUME) == "1"


def start_timeout() -> float:
    """Returns the seconds that tasks wait for one another at the start: set by the launcher, or 300."""
    return float(os.environ.get(START_TIMEOUT, "300"))


def grace() -> float:
    """Returns the seconds between a signal to end and a kill: set by the launcher, or 15."""
    return float(os.environ.get(GRACE, "15"))


def task_name() -> str:
    """Returns the name of this task, such as "worker:1"; "" without a launcher."""
    return os.environ.get(SOCKET, "").partition("@")[0]


def listened() -> bool:
    """Returns whether our launcher has started this process and reads its reports."""
    return bool(os.environ.get(SOCKET))


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Marks a block in which this task imports the function that it is to call."""
    global _importing
    _importing = True
    try:
        yield
    finally:
        _importing = False


def imports() -> bool:
    """Returns whether this task is importing the function that it is to call."""
    return _importing


def failed() -> bool:
    """Returns whether this process has reported that it fails."""
    return _failed


def report(**facts: Any) -> None:
    """Sends facts such as state="training", step=12 or images_per_second=2400.0.

    If the launcher is too busy to read, steps are dropped; a change of state waits for it a moment.

    Args:
        facts: Values that JSON can hold, a few hundred bytes together.
    """
    global _failed, _state
    _failed = _failed or facts.get("state") == "failed"
    task, _, path = os.environ.get(SOCKET, "").partition("@")
    if not path:
        return
    message = json.dumps({"task": task, "pid": os.getpid(), **facts}).encode()
    news = facts.get("state", _state) != _state
    try:
        channel = _connected(path)
        if news:
            select.select([], [channel], [], _PATIENCE)
        channel.send(message)
        _state = facts.get("state", _state)
    except BlockingIOError:
        pass
    except OSError:  # The launcher is gone.
        _close()


def _connected(path: str) -> socket.socket:
    """The connection to the launcher. A forked process opens a new one."""
    global _channel
    if _channel is None or _channel[0] != os.getpid():
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            made.settimeout(_PATIENCE)
            made.connect(path)
            made.setblocking(False)
        except OSError:
            made.close()
            raise
        _close()
        _channel = os.getpid(), made
    return _channel[1]


def _close() -> None:
    global _channel
    if _channel is not None:
        _channel[1].close()
    _channel = None


WAITING = "waiting"  # The phase of a process that waits for the others outside of a step.
# Methods of callbacks. Each is another phase: what one of them took says little about another.
HOOKS = (
    "on_epoch_begin",
    "on_epoch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_end",
    "on_test_batch_begin",
    "on_test_batch_end",
)
# What ends by itself, so that the next of its kind can be expected to. "" is everything else.
PHASES = (
    "",
    "first step of an epoch",
    "step",
    "first step of a validation",
    "validation step",
    "saving",
    WAITING,
    *HOOKS,
)
# The process, the phase, since when, and the longest of each kind so far.
_LAYOUT = struct.Struct(f"<IBd{len(PHASES)}d")


class _PhaseWriter:
    """The file of this task. A process that isn't the first to open it writes nothing."""

    def __init__(self, file: str) -> None:
        self._process = os.getpid()
        self._kind, self._since = 0, time.monotonic()
        self._longest = [0.0] * len(PHASES)
        with open(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as made:
            made.truncate(_LAYOUT.size)
            self._memory = mmap.mmap(made.fileno(), _LAYOUT.size)

    def enter(self, kind: str) -> str:
        before = PHASES[self._kind]
        if os.getpid() != self._process:  # A fork.
            return before
        now = time.monotonic()
        self._longest[self._kind] = max(self._longest[self._kind], now - self._since)
        self._kind, self._since = PHASES.index(kind), now
        _LAYOUT.pack_into(self._memory, 0, self._process, self._kind, self._since, *self._longest)
        return before

    def forget(self) -> None:
        self._kind, self._longest = 0, [0.0] * len(PHASES)
        self.enter("")


_phases: _PhaseWriter | None = None
_phases_tried = False


def _own_phases() -> _PhaseWriter | None:
    global _phases, _phases_tried
    if not _phases_tried:
        _phases_tried = True
        task, _, path = os.environ.get(SOCKET, "").partition("@")
        with contextlib.suppress(OSError):  # No launcher listens, or another process of this task was first.
            _phases = _PhaseWriter(phase_file(path, task)) if path else None
    return _phases


def phase_file(path: str, task: str) -> str:
    """Returns the path of a task's file, beside the socket that tasks report to."""
    return f"{path}.{task}.phase"


def enter_phase(kind: str) -> str:
    """Notes that this process is in a phase from now on: one of `PHASES`; returns the phase before."""
    writer = _own_phases()
    return "" if writer is None else writer.enter(kind)


def forget_phases() -> None:
    """Forgets how long phases took: another training begins, whose steps may take longer."""
    if (writer := _own_phases()) is not None:
        writer.forget()


@contextlib.contextmanager
def in_phase(kind: str) -> Iterator[None]:
    """Marks a block as a phase, after which the phase around it goes on."""
    around = enter_phase(kind)
    try:
        yield
    finally:
        enter_phase(around)


def read_phase(file: str) -> dict[str, Any] | None:
    """Returns what a task has written: its process, its phase, for how many seconds, and the longest of each kind.

    Args:
        file: Its path.

    Returns:
        None if the task has no phases.
    """
    try:
        with open(file, "rb") as found:
            process, kind, since, *longest = _LAYOUT.unpack(found.read(_LAYOUT.size))
    except (OSError, struct.error):
        return None
    known = {name: seconds for name, seconds in zip(PHASES, longest, strict=True) if name and seconds}
    return {"pid": process, "kind": PHASES[kind], "seconds": max(0.0, time.monotonic() - since), "longest": known}
