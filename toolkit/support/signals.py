"""Signals that ask a program to stop: noted instead of obeyed at once, or obeyed with a word."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from toolkit.errors import JobStopped

__all__ = ["SIGNALS", "noted", "obeyed", "sleep"]

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


@contextlib.contextmanager
def obeyed(doing: str) -> Iterator[None]:
    """Ends the program with 128 + the signal's number and one line, where Python or the system would end it.

    A handler of the program's own is left alone.

    Args:
        doing: What the program does meanwhile, as the line ends: "waiting for worker:1".
    """

    def end(number: int, _: FrameType | None) -> None:
        sys.stderr.write(f"Stopped by {signal.Signals(number).name} while {doing}.\n")
        sys.stderr.flush()
        raise SystemExit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():  # Elsewhere Python allows no handlers.
        plain = (signal.SIG_DFL, signal.default_int_handler)
        before = {number: signal.signal(number, end) for number in SIGNALS if signal.getsignal(number) in plain}
    try:
        yield
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
