"""A step made both ways, on replicas and on one device, and what has come of it.

The script's own step is made with all rows, in any case. If one device can't hold so many, both make another one, of
the batch's first rows: half of them, then half of those, until one device holds them.
"""

import dataclasses
import functools
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from toolkit.strategies.check.comparing import TIMES, Compared, compare, leaves_of
from toolkit.strategies.check.fewer_rows import Rows, halved, is_too_large, tried_again
from toolkit.strategies.check.plain import PlainStep
from toolkit.strategies.check.state import Of, Saved
from toolkit.strategies.check.watching import Step
from toolkit.strategies.mesh import replica_count
from toolkit.strategies.processes.agreement import gather

_LOG = logging.getLogger(__name__)
_AGAIN = 4  # How often a step that seems to differ is moved by a rounding.
_ORDER = {each: number for number, each in enumerate(Of)}


class BothWays(NamedTuple):
    """A step, on one device and on replicas.

    Attributes:
        plain: One device's step, not traced yet.
        call: Makes replicas'.
        first: Is given what the variables held before; returns the first difference in order of computing, or "".
    """

    plain: PlainStep
    call: Callable[[], Any]
    first: Callable[[Sequence[np.ndarray], Saved], str] = lambda *_: ""


def compared(
    strategy: tf.distribute.Strategy,
    step: Step,
    both: BothWays,
    *,
    known: Callable[[PlainStep], str],
    logs: Callable[[Any], Any] = lambda found: found,
    shares: int | None = None,
    rows: Rows | None = None,
) -> Any:
    """Makes a script's own call, and returns what that returns. With several processes it is a collective.

    Args:
        strategy: On whose replicas a step is made.
        step: Is given what comes of it.
        both: The script's call, and the same on one device.
        known: Returns a known reason for differences, or "".
        logs: Makes of what the call has returned what one device would return.
        shares: Into how many parts a batch is divided; None for one for each replica.
        rows: How the step is made with fewer rows, where one device can't hold all of them; None if it can't be.
    """
    return _Comparison(strategy, step, known, logs, shares or replica_count(strategy)).of(both, rows)


@dataclasses.dataclass
class _Comparison:
    """One of a step. The attributes are the arguments of `compared`; too_large: whether one device holds too little."""

    strategy: tf.distribute.Strategy
    step: Step
    known: Callable[[PlainStep], str]
    logs: Callable[[Any], Any]
    shares: int
    too_large: bool = False

    def of(self, both: BothWays, rows: Rows | None) -> Any:
        """Makes the script's call, compares it, and returns what it returns."""
        began = time.monotonic()
        if self._failed(both.plain.trace):
            return both.call()
        before, saved = [each.copies()[0] for each in both.plain.held], Saved(both.plain.held)
        spent = time.monotonic() - began
        found = both.call()
        began = time.monotonic()
        judged = Judged(both.plain, before, self.logs(found), self.shares)
        if not self._failed(judged.compute):
            self._take(both, judged, saved)
        elif self.too_large and rows is not None:
            with tried_again(saved, Saved(both.plain.held)):
                self._of_fewer(rows, saved)
        self.step.seconds = spent + time.monotonic() - began
        return found

    def _of_fewer(self, rows: Rows, saved: Saved) -> None:
        """Compares the step with as many of a batch's first rows as one device holds, from what variables held."""
        count = halved(rows.number, self.shares)
        made: list[Any] = []

        def begin() -> None:
            both = rows.taking(count)
            saved.put_back()
            both.plain.trace()
            made[:] = [both]

        def make() -> None:
            (both,) = made
            before = [each.copies()[0] for each in both.plain.held]
            judged = Judged(both.plain, before, self.logs(both.call()), self.shares)
            judged.compute()
            made.append(judged)

        while self.too_large and count >= rows.least:
            # All processes have begun, or none makes the step: they would wait for one that has failed.
            if not self._failed(begin) and not self._failed(make):
                self.step.rows, self.step.of_rows = count, rows.number
                self._take(made[0], made[1], saved)
            count = halved(count, self.shares)

    def _take(self, both: BothWays, judged: "Judged", saved: Saved) -> None:
        """Notes what was found, of all processes."""
        step = self.step
        step.tensors, step.dtypes, step.runs = len(judged.tensors), judged.dtypes, judged.runs
        mine = [each.describe() for each in judged.differs]
        every = map(json.loads, _of_all(self.strategy, json.dumps(mine)))
        step.differs = next((tuple(each) for each in every if each), ())
        if both.plain.draws:  # By a state of TensorFlow's. Whether the rest seems to be apart is chance, too.
            step.first = f"what {', '.join(both.plain.draws)} draws differs by chance"
            step.differs, step.known = (step.first,), self.known(both.plain)
        elif step.differs:
            step.known = self.known(both.plain)
            step.first = both.first(judged.before, saved) or step.differs[0]

    def _failed(self, function: Callable[[], Any]) -> bool:
        """Calls a function that computes on one device; returns whether it failed in a process. The step says why."""
        why, too_large = "", False
        try:
            function()
        except Exception as error:  # The user's own code may raise anything, and a device may be too small.
            _LOG.debug("On one device", exc_info=True)
            lines = [each for each in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if each.strip()]
            why, too_large = f"{type(error).__name__}: {' '.join(lines[:2])}", is_too_large(error)
        every = map(json.loads, _of_all(self.strategy, json.dumps([why, too_large])))
        failures = [(why, too_large) for why, too_large in every if why]
        self.too_large = bool(failures) and all(too_large for _, too_large in failures)
        cannot = "hold the batch" if self.too_large else "make it"
        self.step.skipped = f"one device can't {cannot}: {failures[0][0]}" if failures else ""
        return bool(failures)


def _of_all(strategy: tf.distribute.Strategy, text: str) -> list[str]:
    """Returns all processes' texts."""
    return [each.decode() for each in gather(strategy, text.encode())]


class Judged:
    """What has come of a step, on replicas and on one device.

    Args:
        plain: One device's step, traced.
        before: What the variables held before the step.
        logs: What the script's own step has returned.
        replicas: How many there are.

    Attributes:
        tensors: All of them, the nearest to the cause first.
    """

    def __init__(self, plain: PlainStep, before: Sequence[np.ndarray], logs: Any, replicas: int) -> None:
        self.plain, self.before, self.replicas = plain, before, replicas
        self._ours = [each.copies() for each in plain.held]
        self._logs = tf.nest.map_structure(lambda each: None if each is None else np.asarray(each), logs)
        self._one: Any = None
        self._moved: list[Any] = []
        self._far: list[Any] = []
        self.tensors: list[Compared] = []

    def compute(self) -> None:
        """Makes the step on one device, and compares."""
        plain, before = self.plain, self.before
        self._one, self._moved = plain.run(before), [plain.run(before, draw=1)]
        self.tensors = self._compared()
        if self.differs:
            other = plain.in_other_orders()
            other.trace()
            self._moved += [other.run(before, draw=draw) for draw in range(2, 1 + _AGAIN)]
            self._far = [other.run(before, draw=1 + _AGAIN, times=TIMES)]
            self.tensors = self._compared()

    @property
    def runs(self) -> int:
        """How often one device has made the step."""
        return 1 + len(self._moved) + len(self._far)

    @property
    def differs(self) -> list[Compared]:
        """Those that rounding doesn't explain."""
        return [each for each in self.tensors if each.differs]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The floating ones of the tensors."""
        return tuple(sorted({each.dtype for each in self.tensors if each.dtype.startswith(("float", "bfloat"))}))

    def _compared(self) -> list[Compared]:
        found = []
        for number, (held, copies) in enumerate(zip(self.plain.held, self._ours, strict=True)):
            judge = self._judge(held.name, held.of, functools.partial(_held, number))
            apart = max(map(judge, copies), key=lambda each: each.apart)
            if apart.differs and held.of_mean:
                again = judge(copies[0] / copies[0].dtype.type(self.replicas))
                apart = apart if again.differs else again
            found.append(apart)
        ours = dict(leaves_of(self._logs))
        for name, value in leaves_of(self._one[0]):
            there = ours.get(name, np.zeros([0]))
            if there is None or value is None:  # Each replica has returned its own.
                continue
            judge = self._judge(f"the log {name}", Of.LOG, functools.partial(_log, name))
            found.append(judge(there))
        return sorted(found, key=lambda each: _ORDER[each.of])

    def _judge(self, name: str, of: Of, pick: Callable[[Any], np.ndarray]) -> Callable[[np.ndarray], Compared]:
        """Returns what compares a tensor of replicas' with those that `pick` takes of one device's runs."""
        one, moved, far = pick(self._one), [*map(pick, self._moved)], [*map(pick, self._far)]
        return lambda ours: compare(name, of, ours, one, moved, self.plain.eps, far)


def _held(number: int, run: Any) -> np.ndarray:
    return run[1][number]


def _log(name: str, run: Any) -> Any:
    return dict(leaves_of(run[0]))[name]
