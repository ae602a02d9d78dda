"""Signals that ask a program to stop, noted instead of obeyed at once."""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence

from toolkit.errors import JobStopped

__all__ = ["SIGNALS", "noted", "sleep"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def noted() -> Iterator[list[int]]:
    """Yields a list to which the number of each such signal is appended, from now to the end of the block."""
    received: list[int] = []
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def sleep(seconds: float, received: Sequence[int]) -> None:
    """Waits, or less where such a signal comes.

    Args:
        seconds: How long.
        received: What `noted` yields.

    Raises:
        JobStopped: A signal has come.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not received:
        time.sleep(0.05)
    if received:
        raise JobStopped(received[0])
