"""Whether a task without output is computing, judged by its processor time."""

import time
from collections.abc import Callable

__all__ = ["Activity"]

# A hung task's other threads (TensorFlow's and gRPC's, which keep connections alive) use 2.5 s of processor time in
# 1,800 s: far less than this share of a core. What computes uses most of one.
_SHARE = 0.05
_WINDOW = 1.0  # Seconds of processor time to judge by.


class Activity:
    """Distinguishes a task that computes from one with idle threads.

    Args:
        clock: Returns the time, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._used = 0.0

    def computes(self, used: float) -> bool:
        """Returns whether the task has computed since the last call.

        Args:
            used: Processor time of the task so far, of all its threads, in seconds.
        """
        if used - self._used < _WINDOW:
            return False
        now = self._clock()
        busy = used - self._used > _SHARE * (now - self._since)
        self._since, self._used = now, used
        return busy
