"""Decides what follows from an event, by one table. The manual shows the same table."""

import enum

from toolkit.errors import JobStopped, RequestError, ToolkitError

__all__ = ["Budget", "Next", "What", "decide", "what_ended"]

_LONGEST = 60.0  # Seconds before a restart.


class What(enum.Enum):
    """An event, in the manual's words."""

    DONE = "all tasks that train have ended well"
    FAILED = "a task failed, was killed or hangs, or a host is lost"
    REFUSED = "a task or the launcher ended with exit code 2: the request itself is wrong"
    STOPPED = "this launcher, or the launcher on another host, was told to stop"
    OUT = "Slurm announced the end of the time limit, or can no longer run programs on a node"
    BACK = "a lost host is back, after the job went on without it"
    SERVING = "in a job with parameter servers, a worker was killed, or suspended for longer than `--heartbeat_timeout`"
    LAST = "the same, and no other worker is left"


class Next(enum.Enum):
    """What follows from an event, in the manual's words."""

    END = "the job is done"
    FAIL = "the job has failed"
    STOP = "the job is stopped"
    AGAIN = "the job starts again, from its newest checkpoint"
    RESTART = "the job starts again, from its newest checkpoint; that counts"
    REQUEUE = "Slurm queues the job again; it continues from its newest checkpoint"
    REPLACE = "that worker starts again while the job goes on; that counts"
    WITHOUT = "the job goes on without it"


# What follows while restarts are left, and when none is left.
TABLE = {
    What.DONE: (Next.END, Next.END),
    What.FAILED: (Next.RESTART, Next.FAIL),
    What.REFUSED: (Next.FAIL, Next.FAIL),
    What.STOPPED: (Next.STOP, Next.STOP),
    What.OUT: (Next.REQUEUE, Next.REQUEUE),
    What.BACK: (Next.AGAIN, Next.AGAIN),
    What.SERVING: (Next.REPLACE, Next.WITHOUT),
    What.LAST: (Next.REPLACE, Next.FAIL),
}


class Budget:
    """Counts restarts, up to a limit.

    Args:
        most: Restarts in all.
        used: Restarts of before.
    """

    def __init__(self, most: int, *, used: int = 0) -> None:
        self.most, self.used = most, used

    @property
    def delay(self) -> float:
        """Seconds to wait before the last counted restart: none, then 1, 2, 4 and so on, up to a minute."""
        return 0.0 if self.used < 2 else min(_LONGEST, 2.0 ** (self.used - 2))

    @property
    def words(self) -> str:
        """How many restarts are used up, such as "restart 1 of 3"."""
        return f"restart {self.used} of {self.most}"


def decide(what: What, budget: Budget) -> Next:
    """Returns what follows from an event, and counts it if it is a restart."""
    left, none = TABLE[what]
    found = left if budget.used < budget.most else none
    budget.used += found in (Next.RESTART, Next.REPLACE)
    return found


def what_ended(error: ToolkitError | None, *, out: bool) -> What:
    """Returns which event has ended an attempt.

    Args:
        error: The error that it ended with; None where it is done.
        out: Whether the job can't stay where it is, whatever else has happened since that is known.
    """
    if error is None:
        return What.DONE
    if out:
        return What.OUT
    if isinstance(error, JobStopped):
        return What.STOPPED
    return What.REFUSED if error.exit_code == RequestError.exit_code else What.FAILED
