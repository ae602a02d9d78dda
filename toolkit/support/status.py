"""What tasks report to their launcher, and the variables that launchers set for their tasks.

A report is a JSON message on a connection to a Unix socket; datagrams were lost where a launcher has sixty tasks. Where
no launcher listens, nothing is sent, and a report costs a dictionary look-up.
"""

import contextlib
import json
import os
import select
import socket
import sys
from collections.abc import Iterator
from typing import Any

__all__ = [
    "ATTEMPT",
    "CALL",
    "HASH_SEED",
    "HEARTBEAT_TIMEOUT",
    "JOB_ID",
    "LOGS",
    "PARTIAL",
    "RESUME",
    "SECONDS_OF_SILENCE",
    "SOCKET",
    "SPENT",
    "START_TIMEOUT",
    "attempt",
    "attempt_id",
    "failed",
    "heartbeat_timeout",
    "importing",
    "imports",
    "job_id",
    "listened",
    "logs",
    "report",
    "restarted",
    "start_timeout",
    "task_name",
]

SOCKET = "TOOLKIT_STATUS"  # "worker:1@/path/of/socket".
JOB_ID = "TOOLKIT_JOB_ID"  # Run directories are named after it: it is the same in all tasks and all attempts.
PARTIAL = "TOOLKIT_PARTIAL"  # "1" if launchers of other hosts start the other tasks, each with its own job id.
LOGS = "TOOLKIT_LOGS"  # The directory of the launcher's record of the job.
START_TIMEOUT = "TOOLKIT_START_TIMEOUT"  # Seconds.
HEARTBEAT_TIMEOUT = "TOOLKIT_HEARTBEAT_TIMEOUT"  # Seconds.
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
    module = sys.modules.get(
        "toolkit.strategies.step.collectives"
    )  # Not imported here, because a script may not use it.
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
