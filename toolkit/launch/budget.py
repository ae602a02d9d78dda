"""How often what has failed is started again, and after how long."""

import collections
import time
from collections.abc import Callable

__all__ = ["Budget"]

_LONGEST = 60.0  # Seconds before a restart.


class Budget:
    """Restarts within a window of time: what failed long ago is forgiven.

    Args:
        most: Restarts within the window.
        window: Seconds.
        clock: Tells the time, in seconds.
    """

    def __init__(self, most: int, *, window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.window = window
        self._clock = clock
        self._taken: collections.deque[float] = collections.deque()

    def take(self) -> bool:
        """Says whether it may once more, and counts it."""
        while self._taken and self._clock() - self._taken[0] > self.window:
            self._taken.popleft()
        if len(self._taken) >= self.most:
            return False
        self._taken.append(self._clock())
        return True

    @property
    def delay(self) -> float:
        """Seconds to wait before the restart that was taken last: none, then 1, 2, 4 and so on, up to a minute."""
        number = len(self._taken)
        return 0.0 if number < 2 else min(_LONGEST, 2.0 ** (number - 2))

    @property
    def words(self) -> str:
        """What is used up, such as "restart 1 of 3"."""
        return f"restart {len(self._taken)} of {self.most}"
