"""The first step of a function of a model, compared with one device's.

The script's own step is made by the function that Keras has made, with what it would have been given: its numbers are
the same to the bit. Before it the step is traced as plain Keras makes it, and after it that is run, from the same
variables: once as it is, and once moved by a rounding. Where something differs, it is moved a few times more.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.check import watching
from toolkit.strategies.check.comparing import Compared, compare, leaves_of
from toolkit.strategies.check.diagnosis import first_apart
from toolkit.strategies.check.plain import PlainStep, step_of
from toolkit.strategies.check.state import Of, Saved
from toolkit.strategies.check.watching import Step
from toolkit.strategies.check.whole_batches import unsized, whole_batch
from toolkit.strategies.mesh import replica_count
from toolkit.strategies.options import Options, options_of
from toolkit.strategies.processes.agreement import gather
from toolkit.strategies.step.moments import normalisations, normalises_batch
from toolkit.strategies.upstream.train_function import Around, StepFunction
from toolkit.support.frames import line_of, users_frame

_LOG = logging.getLogger(__name__)
REMEDY = "Look at what the script computes there of the whole batch; where all of it is Keras's, please report it"
_DRAWS = "it draws by a state of TensorFlow's (%s), and never twice the same. keras.random draws what one device draws"
_CALLS = {"train": "fit", "test": "evaluate", "predict": "predict"}
_AGAIN = 4  # How often a step that seems to differ is moved by a rounding.
_ORDER = {each: number for number, each in enumerate(Of)}


# Makes a call of a script's own: takes the kind, the model, the function within, and its batches. Returns what that
# returns, and what came of comparing it; None without data.
Made = Callable[[str, Any, Callable, Any], tuple[Any, Step | None]]


def check_first(kind: str, model: Any, function: StepFunction, made: Made | None = None) -> None:
    """Has a function compare its first step with one device's, if the strategy's options ask for it.

    Args:
        kind: "train", "test" or "predict".
        model: Built and compiled.
        function: Just made.
        made: Makes and compares the step; None for `made_and_compared`, that of several replicas.
    """
    made = made or made_and_compared
    if watching.session() is not None:
        function.put(Around.CHECKING, _Watched(kind, model, made))
        return
    asked = options_of(model.distribute_strategy).check == "first_step"

    def first(within: Callable, batches: Any) -> Any:
        function.put(Around.CHECKING, None)
        logs, step = made(kind, model, within, batches)
        if step is not None:
            conclude(step)
        return logs

    function.put(Around.CHECKING, first if asked else None)


class _Watched:
    """Stands around a function of a script that is only compared: each call of Keras's ends after its first step."""

    def __init__(self, kind: str, model: Any, made: Made) -> None:
        self._kind, self._model, self._made, self._compared = kind, model, made, False

    def __call__(self, within: Callable, batches: Any) -> Any:
        """Makes a step."""
        if self._compared:
            logs = within(batches)
        else:
            logs, step = self._made(self._kind, self._model, within, batches)
            self._compared = step is not None
            session = watching.session()
            if step is not None and session is not None:
                session.steps.append(step)
        if watching.session() is not None:
            watching.end_call(self._model, self._kind)
        return logs


def made_and_compared(kind: str, model: Any, within: Callable, batches: Any) -> tuple[Any, Step | None]:
    """Makes the script's own step, and returns what that returns, and what came of comparing it; None without data."""
    taken, spec = _taken(batches, None if kind == "predict" else model.steps_per_execution)
    if not taken:
        return within(batches), None  # Which says that there is no more.
    strategy = model.distribute_strategy
    step = begun(kind, model)
    whole = [whole_batch(strategy, each) for each in taken]

    def first(before: Sequence[np.ndarray], saved: Saved) -> str:
        apart = first_apart(kind, model, taken[0], spec, whole[0], before, saved)
        return apart[0].describe() if apart else ""

    plain = step_of(model, kind, whole, unsized(spec))
    call = lambda: _made(within, taken, spec)  # noqa: E731
    return compared(strategy, step, plain, call, known=lambda: known_case(model, plain), first=first), step


def begun(kind: str, model: Any) -> Step:
    """Returns the step that a script's call makes, before anything has come of it."""
    return Step(_CALLS[kind], model.name, line_of(users_frame(sys._getframe(1))))


def compared(
    strategy: tf.distribute.Strategy,
    step: Step,
    plain: PlainStep,
    call: Callable[[], Any],
    *,
    known: Callable[[], str],
    first: Callable[[Sequence[np.ndarray], Saved], str] = lambda *_: "",
    logs: Callable[[Any], Any] = lambda found: found,
    shares: int | None = None,
) -> Any:
    """Makes a script's own call, and returns what that returns. With several processes it is a collective.

    Args:
        strategy: On whose replicas a step is made.
        step: Is given what comes of it.
        plain: One device's step, not traced yet.
        call: Makes the script's call.
        known: Returns a known reason for differences, or "".
        first: Is given what the variables held before; returns the first difference in order of computing, or "".
        logs: Makes of what the call has returned what one device would return.
        shares: Into how many parts a batch is divided; None for one for each replica.
    """
    began = time.monotonic()
    if _failed(strategy, step, plain.trace):
        return call()
    before, saved = [each.copies()[0] for each in plain.held], Saved(plain.held)
    spent = time.monotonic() - began
    found = call()
    began = time.monotonic()
    judged = Judged(plain, before, logs(found), shares or replica_count(strategy))
    if _failed(strategy, step, judged.compute):
        return found
    step.tensors, step.dtypes, step.runs = len(judged.tensors), judged.dtypes, judged.runs
    mine = [each.describe() for each in judged.differs]
    step.differs = next((tuple(each) for each in map(json.loads, _of_all(strategy, json.dumps(mine))) if each), ())
    if step.differs:
        step.known = known()
        step.first = first(before, saved) or step.differs[0]
    elif plain.draws:
        step.skipped = _DRAWS % ", ".join(plain.draws)
    step.seconds = spent + time.monotonic() - began
    return found


def _failed(strategy: tf.distribute.Strategy, step: Step, function: Callable[[], Any]) -> bool:
    """Calls a function that computes on one device; whether it has failed in a process, which the step then says."""
    why = ""
    try:
        function()
    except Exception as error:  # The user's own code may raise anything, and a device may be too small.
        _LOG.debug("On one device", exc_info=True)
        lines = [each for each in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines() if each.strip()]
        why = f"one device can't make it: {type(error).__name__}: {' '.join(lines[:2])}"
    step.skipped = next((each for each in _of_all(strategy, why) if each), "")
    return bool(step.skipped)


def _taken(batches: Any, count: int | None) -> tuple[list, Any]:
    """Returns the next batches, and the spec by which a function of Keras's sees each; None for that of the batch."""
    if count is None:
        return list(batches), None
    reader: Any = iter(batches)
    taken: list = []
    while len(taken) < count:
        try:
            taken.append(next(reader))
        except (StopIteration, tf.errors.OutOfRangeError):
            break
    distributed = isinstance(batches, (tf.data.Iterator, tf.distribute.DistributedIterator))
    return taken, batches.element_spec if distributed else None


def _made(within: Callable, taken: list, spec: Any) -> Any:
    """Makes the script's own step, traced as for an iterator: sizes that aren't known there aren't known here."""
    if spec is None or tf.config.functions_run_eagerly():
        return within(taken)
    made = tf.function(lambda *each: within(list(each)), input_signature=[spec] * len(taken), autograph=False)
    return made.get_concrete_function()(*taken)  # TensorFlow counts how often functions of one place are traced.


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
        self.tensors: list[Compared] = []

    def compute(self) -> None:
        """Makes the step on one device, and compares."""
        plain, before = self.plain, self.before
        self._one, self._moved = plain.run(before), [plain.run(before, draw=1)]
        self.tensors = self._compared()
        if self.differs:
            self._moved += [plain.run(before, draw=draw) for draw in range(2, 1 + _AGAIN)]
            self.tensors = self._compared()

    @property
    def runs(self) -> int:
        """How often one device has made the step."""
        return 1 + len(self._moved)

    @property
    def differs(self) -> list[Compared]:
        """Those that rounding doesn't explain."""
        return [each for each in self.tensors if each.differs]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The floating ones of the tensors."""
        return tuple(sorted({each.dtype for each in self.tensors if each.dtype.startswith(("float", "bfloat"))}))

    def _compared(self) -> list[Compared]:
        eps, found = self.plain.eps, []
        for number, (held, copies) in enumerate(zip(self.plain.held, self._ours, strict=True)):
            moved = [each[1][number] for each in self._moved]
            every = [compare(held.name, held.of, copy, self._one[1][number], moved, eps) for copy in copies]
            apart = max(every, key=lambda each: each.apart)
            if apart.differs and held.of_mean:
                counted = copies[0] / copies[0].dtype.type(self.replicas)
                again = compare(held.name, held.of, counted, self._one[1][number], moved, eps)
                apart = apart if again.differs else again
            found.append(apart)
        ours, one = dict(leaves_of(self._logs)), dict(leaves_of(self._one[0]))
        others = [dict(leaves_of(each[0])) for each in self._moved]
        for name, value in one.items():
            there = ours.get(name, np.zeros([0]))
            if there is None or value is None:  # Each replica has returned its own.
                continue
            found.append(compare(f"the log {name}", Of.LOG, there, value, [each[name] for each in others], eps))
        return sorted(found, key=lambda each: _ORDER[each.of])


def conclude(step: Step) -> None:
    """Says what was found.

    Raises:
        StrategyError: The step isn't one device's, on all processes alike.
    """
    if step.skipped:
        _LOG.warning("The first step of %s isn't compared with one device's: %s", step.call, step.skipped)
    elif not step.differs:
        _LOG.info(
            "The first step of %s is one device's: %d tensors are the same in %s, but for rounding (%.1f s: a trace "
            "and %d steps on one device)",
            step.call,
            step.tensors,
            " and ".join(step.dtypes),
            step.seconds,
            step.runs,
        )
    elif step.known:
        _LOG.warning(
            "The first step of %s isn't one device's: %s. That is so because %s",
            step.call,
            step.first,
            step.known,
        )
    else:
        raise StrategyError(
            asked=f'create(check="first_step") compares the first step of {step.call} with the same on one device',
            found=f"{step.first}. {len(step.differs)} of {step.tensors} variables and logs differ",
            remedy=REMEDY + ". Without check the script trains with these numbers",
        )


def known_case(model: Any, plain: PlainStep) -> str:
    """Returns for which known reason a step differs from one device's; "" if there is none."""
    options: Options = options_of(model.distribute_strategy)
    if options.local is not None:
        return "replicas train by themselves (LocalSteps)"
    if options.gradients.compression != "none":
        return f"gradients are compressed ({options.gradients.compression})"
    if options.gradients.dtype != "float32":
        return f"gradients are exchanged in {options.gradients.dtype}"
    if any(each.trainable and not normalises_batch(each, options) for each in normalisations(model)):
        return 'each replica normalises its own share of a batch (batch_statistics="replica")'
    if plain.draws:
        return (
            f"it draws by a state of TensorFlow's ({', '.join(plain.draws)}). keras.random draws what one device draws"
        )
    return ""
