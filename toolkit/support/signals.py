"""Signals that ask a program to stop: recorded instead of obeyed at once, or obeyed with a message.

Every handler in the house is set by `handle`, so that all are right about nohup and about threads.
"""

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType

from toolkit.errors import JobStopped, StoppedBySignal

_DEATH_SIGNAL, _SUBREAPER = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of <linux/prctl.h>.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOG = logging.getLogger(__name__)
_MARGIN = 1.0  # Seconds that a process gets to end.
SAME = 5.0  # Two SIGTERMs within so many seconds count as one.


@contextlib.contextmanager
def handle(numbers: Collection[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Calls `handler` for these signals until the end of the block, which restores the earlier handlers.

    A signal that is ignored stays ignored: nohup ignores SIGHUP, and a shell ignores SIGINT in its background jobs.
    Outside the main thread nothing is changed: Python allows no handlers there.

    Args:
        numbers: The signals.
        handler: Takes the signal's number and the frame, as for `signal.signal`.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def recorded(numbers: Collection[int] = SIGNALS) -> Iterator[list[int]]:
    """Yields a list to which the number of each such signal is appended until the end of the block."""
    received: list[int] = []
    with handle(numbers, lambda number, _: received.append(number)):
        yield received


class StopSignals:
    """While entered, a signal ends the program with `StoppedBySignal`; while `held`, it is only recorded.

    A second signal ends the program at once even then; but a second SIGTERM of the same seconds is the first one, told
    twice: by a cluster's scheduler to all processes, and by the launcher, which it has told, too.

    Attributes:
        held: Set it while a training loop looks at `received` after every step.
        received: The number of the signal that came, None if none did.
    """

    def __init__(self) -> None:
        self.held = False
        self.received: int | None = None
        self._at = 0.0
        self._handlers = contextlib.ExitStack()

    def __enter__(self) -> "StopSignals":
        self._handlers.enter_context(handle(SIGNALS, self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()
        self.held = False

    def left(self, grace: float) -> float:
        """Returns how many seconds of a grace are left: all of them, unless a signal has come.

        Args:
            grace: Seconds between the signal and the moment at which the process is killed.
        """
        return grace if self.received is None else max(grace - _MARGIN - (time.monotonic() - self._at), 0.0)

    def _handle(self, number: int, _: FrameType | None) -> None:
        told_twice = number == self.received == signal.SIGTERM and time.monotonic() - self._at < SAME
        if told_twice:
            return
        if not self.held or self.received is not None:
            raise StoppedBySignal(number, step=None)
        self.received, self._at = number, time.monotonic()
        _LOG.warning(
            "%s received: the run stops after this step, with a checkpoint. A second signal stops it at once",
            signal.Signals(number).name,
        )


@contextlib.contextmanager
def waiting_for_children() -> Iterator[None]:
    """Allows waiting for child processes if the parent process had ignored SIGCHLD."""
    ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    if ignored and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            yield
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    else:
        yield


@contextlib.contextmanager
def exiting(doing: str) -> Iterator[None]:
    """Ends the program with 128 + the signal's number and one line of output instead of a traceback.

    A handler of the program's own is left alone.

    Args:
        doing: What the program does meanwhile, as the line ends: "waiting for worker:1".
    """

    def end(number: int, _: FrameType | None) -> None:
        sys.stderr.write(f"Stopped by {signal.Signals(number).name} while {doing}.\n")
        sys.stderr.flush()
        raise SystemExit(128 + number)

    plain = (signal.SIG_DFL, signal.default_int_handler)
    with handle([number for number in SIGNALS if signal.getsignal(number) in plain], end):
        yield


def name(number: int) -> str:
    """Returns a signal's name: "SIGKILL" for 9; "signal 99" if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_in(pid: int, number: int, *masks: str) -> bool:
    """Returns whether a process has a signal in one of proc(5)'s masks: "SigCgt", "SigPnd". Linux only."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            found = [line.split()[1] for line in file if line.startswith(masks)]
    except OSError:
        return False
    return any(int(mask, 16) >> (number - 1) & 1 for mask in found)


def sleep(seconds: float, received: Sequence[int]) -> None:
    """Waits for this long, or until such a signal arrives.

    Args:
        seconds: How long.
        received: What `recorded` yields.

    Raises:
        JobStopped: A signal has come.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not received:
        time.sleep(0.05)
    if received:
        raise JobStopped(received[0])


def adopt_orphans() -> None:
    """Makes this process the parent of all processes below it whose own parents end. Linux only."""
    _prctl(_SUBREAPER, 1)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Has the system send this process a signal when its parent ends in any way. Linux only."""
    _prctl(_DEATH_SIGNAL, number)


def _prctl(option: int, value: int) -> None:
    """Sets an attribute of the calling process with prctl(2)."""
    import ctypes

    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
