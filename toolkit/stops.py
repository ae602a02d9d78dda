"""Signals that ask a program to stop, noted instead of obeyed at once."""

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["SIGNALS", "noted"]

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
