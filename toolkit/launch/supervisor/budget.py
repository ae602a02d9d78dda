"""How often what has failed is started again, and after how long."""

import itertools
from collections.abc import Callable

from toolkit.errors import RequestError, TaskFailed

__all__ = ["Budget", "attempts"]

_LONGEST = 60.0  # Seconds before a restart.


class Budget:
    """How often what has failed may be started again.

    Args:
        most: Restarts in all.
        used: Restarts of before.
    """

    def __init__(self, most: int, *, used: int = 0) -> None:
        self.most, self.used = most, used

    def take(self) -> bool:
        """Counts one more restart, and returns whether it is within the budget; where it isn't, nothing is counted."""
        if self.used >= self.most:
            return False
        self.used += 1
        return True

    @property
    def delay(self) -> float:
        """Seconds to wait before the restart that was taken last: none, then 1, 2, 4 and so on, up to a minute."""
        return 0.0 if self.used < 2 else min(_LONGEST, 2.0 ** (self.used - 2))

    @property
    def words(self) -> str:
        """How much is used up, such as "restart 1 of 3"."""
        return f"restart {self.used} of {self.most}"


def attempts(
    attempt: Callable[[int], bool],
    *,
    first: int = 1,
    budget: Budget,
    say: Callable[[str], None],
    wait: Callable[[float], None],
    retries: Callable[[TaskFailed], bool] = lambda _: True,
) -> None:
    """Makes attempts at a job until one says that it is done, or fails and the budget is used up.

    Args:
        attempt: Takes the attempt's number; returns False where the job is to be started again at once.
        first: The first attempt's number.
        budget: Restarts after failures.
        say: Shows a message.
        wait: Waits for so many seconds; raises JobStopped where a signal comes.
        retries: Returns whether a failure may be mended by another attempt.

    Raises:
        TaskFailed: The last attempt failed, or one with the exit code of what can't be done the second time either.
        JobStopped: A signal came between two attempts.
    """
    for number in itertools.count(first):
        try:
            if attempt(number):
                return
        except TaskFailed as error:
            if error.exit_code == RequestError.exit_code or not retries(error) or not budget.take():
                raise
            later = f" in {budget.delay:.0f} s" if budget.delay else ""
            say(f"{error}\nlaunch: starting the job again{later}, {budget.words}")
            wait(budget.delay)
