"""What a task reports to the launcher that started it, and what launchers set in the environment of their tasks.

A report is a JSON message to a Unix socket. Where no launcher listens, nothing is sent, and a report costs a dictionary
look-up.
"""

import json
import os
import socket
from typing import Any

__all__ = [
    "ATTEMPT",
    "HEARTBEAT_TIMEOUT",
    "JOB_ID",
    "LOGS",
    "PARTIAL",
    "RESUME",
    "SECONDS_OF_SILENCE",
    "SOCKET",
    "START_TIMEOUT",
    "attempt",
    "attempt_id",
    "failed",
    "heartbeat_timeout",
    "job_id",
    "listened",
    "logs",
    "report",
    "restarted",
    "start_timeout",
]

SOCKET = "TOOLKIT_STATUS"  # "worker:1@/path/of/socket".
JOB_ID = "TOOLKIT_JOB_ID"  # Run directories are named by it: the same in all tasks and all attempts.
PARTIAL = "TOOLKIT_PARTIAL"  # "1" where launchers of other hosts start the other tasks, each with a job id of its own.
LOGS = "TOOLKIT_LOGS"  # The directory of the job's logs.
START_TIMEOUT = "TOOLKIT_START_TIMEOUT"  # Seconds.
HEARTBEAT_TIMEOUT = "TOOLKIT_HEARTBEAT_TIMEOUT"  # Seconds.
ATTEMPT = "TOOLKIT_ATTEMPT"  # "2" where the job was started again once.
RESUME = "TOOLKIT_RESUME"  # "1" where whoever starts tasks doesn't know whether it is again.

SECONDS_OF_SILENCE = 15.0  # After which a worker, or a task that is stopped, counts as gone unless it is said.

_failed = False


def job_id() -> str | None:
    """Returns the id of this process's job, such as "20260719-140512-3fa9"; None without a launcher."""
    return os.environ.get(JOB_ID)


def attempt_id() -> str | None:
    """Returns what all tasks of this attempt of a job share and no others do; None where nothing says it.

    Where each host has a launcher of its own, each gives the job another id: tasks that compared them would refuse one
    another.
    """
    job = job_id()
    return None if job is None or os.environ.get(PARTIAL) == "1" else f"{job}, attempt {attempt()}"


def logs() -> str | None:
    """Returns the directory of the job's logs and of its launcher's record; None without a launcher."""
    return os.environ.get(LOGS)


def attempt() -> int:
    """Returns which attempt of its job this process belongs to, counted from 1."""
    return int(os.environ.get(ATTEMPT, "1"))


def heartbeat_timeout() -> float:
    """Returns the seconds of silence after which a worker counts as gone: what the launcher set, or 15 s."""
    return float(os.environ.get(HEARTBEAT_TIMEOUT, str(SECONDS_OF_SILENCE)))


def restarted() -> bool:
    """Returns whether this job may have been started before: a run then resumes from its checkpoint, if it has one."""
    return attempt() > 1 or os.environ.get(RESUME) == "1"


def start_timeout() -> float:
    """Returns the seconds that tasks wait for one another: what the launcher set, or 300."""
    return float(os.environ.get(START_TIMEOUT, "300"))


def listened() -> bool:
    """Returns whether a launcher of ours has started this process, which is told what it reports."""
    return bool(os.environ.get(SOCKET))


def failed() -> bool:
    """Returns whether this process has reported that it fails."""
    return _failed


def report(**facts: Any) -> None:
    """Sends facts such as state="training", step=12 or images_per_second=2400.0.

    A launcher that is busy misses reports; training never waits for it.

    Args:
        facts: Values that JSON can hold, a few hundred bytes together.
    """
    global _failed
    _failed = _failed or facts.get("state") == "failed"
    task, _, path = os.environ.get(SOCKET, "").partition("@")
    if not path:
        return
    message = json.dumps({"task": task, "pid": os.getpid(), **facts}).encode()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.sendto(message, path)
    except OSError:  # The launcher is gone or busy.
        pass
