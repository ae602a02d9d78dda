"""Decides what follows from an event, by one table. The manual shows the same table."""

import enum
from collections.abc import Mapping
from typing import Any

from toolkit.errors import JobStopped, RequestError, ToolkitError
from toolkit.support.words import counted

_LONGEST = 60.0  # Seconds before a restart.


class What(enum.Enum):
    """An event, in the manual's words."""

    DONE = "all tasks that train have ended well"
    FAILED = "a task failed, was killed or hangs, or a host is lost"
    REFUSED = "a task or the launcher ended with exit code 2: the request itself is wrong"
    STOPPED = "this launcher, or the launcher on another host, was told to stop, or `--preempt_when` gave notice"
    OUT = "in a queue: notice of the time limit's end or by `--preempt_when`, or a node no longer runs programs"
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
    REQUEUE = "the queue takes the job again; it continues from its newest checkpoint"
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
    """Counts restarts: those in a row without progress up to a limit, and all of them up to another.

    Args:
        most: Restarts in a row without progress.
        in_all: Restarts in all; None for any number.
        used: Restarts of before.
        in_vain: Those of them since the last progress.
        reached: How far the job had come by then.
    """

    def __init__(
        self,
        most: int,
        *,
        in_all: int | None = None,
        used: int = 0,
        in_vain: int = 0,
        reached: Mapping[str, float] | None = None,
    ) -> None:
        self.most, self.in_all = most, in_all
        self.used, self.in_vain = used, in_vain
        self._reached = dict(reached or {})

    @property
    def facts(self) -> dict[str, Any]:
        """What another process needs to count on: arguments of the same names."""
        return {"used": self.used, "in_vain": self.in_vain, "reached": self._reached}

    @property
    def left(self) -> bool:
        """Whether the job may start again."""
        return self.in_vain < self.most and (self.in_all is None or self.used < self.in_all)

    @property
    def delay(self) -> float:
        """Seconds to wait before the last restart: none, and without progress 1, 2, 4 and so on, up to a minute."""
        return 0.0 if self.in_vain < 2 else min(_LONGEST, 2.0 ** (self.in_vain - 2))

    @property
    def words(self) -> str:
        """How many restarts are used up, such as "restart 1 of 3"."""
        if self.used == self.in_vain:
            return f"restart {self.used} of {self.most}"
        return f"restart {self.used}, {self.in_vain} of {self.most} since the last progress"

    @property
    def why_none(self) -> str:
        """Why the job doesn't start again, as a sentence; "" if it may, or was never to."""
        if self.left or not self.most:
            return ""
        if self.in_vain < self.most:
            return f"--max_total_restarts={self.in_all} allows no more."
        step = self._reached.get("step")
        beyond = f" beyond the last reported step, {step:,.0f}" if step else ""
        return f"{counted(self.in_vain, 'restart')} in a row brought no progress{beyond} (--max_restarts={self.most})."

    def advance(self, reached: Mapping[str, float]) -> None:
        """Takes how far the job has come. If that is further than ever, the restarts before no longer count.

        Args:
            reached: Numbers that grow with the job, by their names: the step, the epoch, the newest checkpoint's step.
        """
        further = {name: number for name, number in reached.items() if number > self._reached.get(name, 0)}
        if further:
            self._reached.update(further)
            self.in_vain = 0


def decide(what: What, budget: Budget) -> Next:
    """Returns what follows from an event, and counts it if it is a restart."""
    left, none = TABLE[what]
    found = left if budget.left else none
    counts = found in (Next.RESTART, Next.REPLACE)
    budget.used += counts
    budget.in_vain += counts
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
