"""How the time of a training was spent: the share that made progress, called goodput, and where the rest went.

A process keeps its own `Account` and reports it. Its launcher knows more: what a failure cost, and how long the job
took to be at the same place again. It tells the next attempt of what was before.
"""

import json
import os
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from toolkit.support import status

# In seconds, by what they were spent on; and how that is said.
KINDS = {
    "progress": "made progress",
    "starting": "starting",
    "first_step": "the first step",
    "restarting": "restarting",
    "done_twice": "steps done twice",
    "saving": "saving",
    "waiting_for_data": "waiting for data",
    "validating": "validating",
    "other": "other things",
}
_TRAINED = {"progress", "first_step", "done_twice"}
_SHOWN = 0.005  # A smaller share isn't named.


class Account:
    """The seconds of this process by what they were spent on, and those of the processes before it.

    Attributes:
        made: How many steps this process has made.
        input: The share of a step in which its data are waited for; 0 while that isn't known.
        listened: Whether a launcher reads what this process reports of it.
    """

    def __init__(self) -> None:
        self.made, self.input = 0, 0.0
        self._own: dict[str, float] = {}
        self._earlier: dict[str, float] = {}  # Before this job.
        self._attempts = _told()  # Of this job, before this process.
        self._last = time.monotonic()
        self._inside = False
        # A notebook may have been open for hours; a task was started to train.
        self.listened = status.listened()
        self._own["starting"] = _age() if self.listened else 0.0

    def mark(self, kind: str, *, steps: int = 0) -> None:
        """Notes what the time since the last mark was spent on: one of `KINDS`; and how many steps that were."""
        now = time.monotonic()
        self._own[kind] = self._own.get(kind, 0.0) + now - self._last
        self._last = now
        self.made += steps

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Notes what the time of a block is spent on; within another such block, that one's kind counts."""
        if self._inside:
            yield
            return
        self.mark("progress" if self.made else "starting")
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self.mark(kind)

    @property
    def own(self) -> dict[str, float]:
        """The seconds of this process."""
        steps = self._own.get("progress", 0.0)
        waited = steps * min(1.0, self.input)
        return _rounded({**self._own, "progress": steps - waited, "waiting_for_data": waited})

    @property
    def whole(self) -> dict[str, float]:
        """The seconds of this process and of those before it."""
        return summed(self._earlier, self._attempts, self.own)

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it, for `resume`."""
        so_far = summed(self._attempts, self.own)
        return {"job": status.job_id(), "earlier": self._earlier, "job_so_far": so_far}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Adds what was before the checkpoint that this process goes on from.

        Args:
            state: What it holds; {} for one without.
        """
        if not state:
            return
        # Of its own job, the launcher tells more: also what came after the checkpoint.
        same = self._attempts and state["job"] == status.job_id()
        self._earlier = summed(state["earlier"], {} if same else state["job_so_far"])


def share(seconds: Mapping[str, float]) -> float | None:
    """Returns the share of these seconds that made progress; None for no time at all."""
    every = sum(seconds.values())
    return seconds.get("progress", 0.0) / every if every else None


def summary(seconds: Mapping[str, float]) -> dict[str, Any] | None:
    """Returns the share that made progress and the seconds of each kind, for files; None if nothing has trained."""
    found = share(seconds) if seconds.keys() & _TRAINED else None
    return None if found is None else {"share": round(found, 4), "seconds": summed(seconds)}


def in_words(seconds: Mapping[str, float]) -> str:
    """Returns a sentence without its full stop: "83% of 124 min made progress; 9% starting, 5% steps done twice"."""
    if not seconds.keys() & _TRAINED:
        return ""
    every = sum(seconds.values())
    parts = sorted(((seconds.get(kind, 0.0) / every, words) for kind, words in KINDS.items()), reverse=True)
    rest = [f"{part:.0%} {words}" for part, words in parts if part >= _SHOWN and words != KINDS["progress"]]
    length = f"{every / 3600:.1f} h" if every >= 7200 else f"{every / 60:.0f} min" if every >= 120 else f"{every:.0f} s"
    return f"{share(seconds):.0%} of {length} {KINDS['progress']}{'; ' if rest else ''}{', '.join(rest)}"


def summed(*several: Mapping[str, float]) -> dict[str, float]:
    """Returns the sums of seconds by kind, without kinds that took no time."""
    return _rounded({kind: sum(each.get(kind, 0.0) for each in several) for kind in KINDS})


def of_attempt(facts: Mapping[str, Any], *, seconds: float, first: bool, done: bool) -> dict[str, float]:
    """Returns the seconds of one attempt of a job by what they were spent on.

    Args:
        facts: What the task reported last whose time it is: `spent` and `made`, its step and checkpoint.
        seconds: From the end of the attempt before, or the job's begin, to now.
        first: Whether none was before.
        done: Whether all steps count. Otherwise those after its newest checkpoint have to be done again: all, if
            it has reported none.
    """
    found = {kind: float(spent) for kind, spent in facts.get("spent", {}).items() if kind in KINDS}
    steps, made = found.get("progress", 0.0), facts.get("made", 0)
    after = made if "checkpoint" not in facts else max(0, facts.get("step", 0) - facts["checkpoint"])
    lost = 0.0 if done or not made else steps * min(1.0, after / made)
    found = {**found, "progress": steps - lost, "done_twice": lost}
    # Before the process was there, and after its last report: a failure is noticed, and the others are ended.
    begin = "starting" if first else "restarting"
    rest = "other" if done else "restarting" if found.get("first_step") else begin
    found[begin] = found.pop("starting", 0.0) + found.get(begin, 0.0)
    found[rest] = found.get(rest, 0.0) + max(0.0, seconds - sum(found.values()))
    return _rounded(found)


def of_events(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the seconds of a job, from the events in its record."""
    by_attempt = {event["attempt"]: event["seconds"] for event in events if event["event"] == "spent"}
    return summed(*by_attempt.values())


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {kind: round(spent, 3) for kind, spent in seconds.items() if spent}


def _told() -> dict[str, float]:
    """Returns what the launcher says of earlier attempts."""
    return summed(json.loads(os.environ.get(status.SPENT, "{}")))


def _age() -> float:
    """Returns for how many seconds this process has been running."""
    # psutil has it from the boot's time, which Linux gives in whole seconds.
    with suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0
