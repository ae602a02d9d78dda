"""What a task tells the launcher that started it, by JSON messages to a Unix socket, and what that told it.

Where no launcher listens, nothing is sent, and a report costs a dictionary look-up.
"""

import json
import os
import socket
from typing import Any

__all__ = [
    "ATTEMPT",
    "BEGAN",
    "HEARTBEAT_TIMEOUT",
    "LOGS",
    "PART",
    "RESUME",
    "START_TIMEOUT",
    "VARIABLE",
    "attempt",
    "began",
    "failed",
    "heartbeat_timeout",
    "job",
    "logs",
    "report",
    "restarted",
    "start_timeout",
]

# In the environment that the launcher gives its children:
VARIABLE = "TOOLKIT_STATUS"  # "worker:1@/path/of/socket".
BEGAN = "TOOLKIT_BEGAN"  # What a job's files are named by, the same in all tasks and after a restart.
PART = "TOOLKIT_PART"  # "1" where a launcher on another host starts other tasks, with a BEGAN of its own.
LOGS = "TOOLKIT_LOGS"  # The directory of the job's logs.
START_TIMEOUT = "TOOLKIT_START_TIMEOUT"  # Seconds.
HEARTBEAT_TIMEOUT = "TOOLKIT_HEARTBEAT_TIMEOUT"  # Seconds.
ATTEMPT = "TOOLKIT_ATTEMPT"  # "2" where the job was started again once.
RESUME = "TOOLKIT_RESUME"  # "1" where whoever starts tasks doesn't know whether it is again.

_failed = False


def began() -> str | None:
    """Returns what the launcher names this job's files by, such as "20260719-140512"; None without one."""
    return os.environ.get(BEGAN)


def job() -> str | None:
    """Returns what all tasks of this start of a job have and no others; None where nothing says it."""
    name = began()
    return None if name is None or os.environ.get(PART) == "1" else f"{name}, start {attempt()}"


def logs() -> str | None:
    """Returns the directory of the job's logs, and of its launcher's record; None without a launcher."""
    return os.environ.get(LOGS)


def attempt() -> int:
    """Returns the how many-th start of its job this is, from 1."""
    return int(os.environ.get(ATTEMPT, "1"))


def heartbeat_timeout() -> float:
    """Returns after how many seconds a worker that isn't heard of counts as gone: what the launcher says, or 15."""
    return float(os.environ.get(HEARTBEAT_TIMEOUT, "15"))


def restarted() -> bool:
    """Whether this job may have been started before: a run then goes on from its checkpoint, if there is one."""
    return attempt() > 1 or os.environ.get(RESUME) == "1"


def start_timeout() -> float:
    """Returns how many seconds tasks wait for one another: what the launcher says, or 300."""
    return float(os.environ.get(START_TIMEOUT, "300"))


def failed() -> bool:
    """Whether this process has reported that it fails."""
    return _failed


def report(**facts: Any) -> None:
    """Sends facts such as state="training", step=12 or images_per_second=2400.0.

    A launcher that is busy misses reports; training never waits for it.

    Args:
        facts: Values that JSON can hold, a few hundred bytes together.
    """
    global _failed
    _failed = _failed or facts.get("state") == "failed"
    task, _, path = os.environ.get(VARIABLE, "").partition("@")
    if not path:
        return
    message = json.dumps({"task": task, "pid": os.getpid(), **facts}).encode()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.sendto(message, path)
    except OSError:  # The launcher is gone or busy.
        pass
