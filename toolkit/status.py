"""What a task tells the launcher that started it: JSON messages to a Unix socket.

Where no launcher listens, nothing is sent, and a report costs a dictionary look-up.
"""

import json
import os
import socket
from typing import Any

__all__ = ["VARIABLE", "failed", "report"]

VARIABLE = "TOOLKIT_STATUS"  # "worker:1@/path/of/socket", in the environment that the launcher gives its children.

_failed = False


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
