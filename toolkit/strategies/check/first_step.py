"""The first step of a function of a model, compared with one device's.

The script's own step is made by the function that Keras has made, with what it would have been given: its numbers are
the same to the bit. Before it the step is traced as plain Keras makes it, and after it that is run, from the same
variables: once as it is, and once moved by a rounding. Where something differs, it is moved a few times more.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.batches import dealt
from toolkit.strategies.check import watching
from toolkit.strategies.check.both_ways import BothWays, compared
from toolkit.strategies.check.diagnosis import first_apart
from toolkit.strategies.check.fewer_rows import (
    Rows,
    by_example,
    counted,
    first_rows,
)
from toolkit.strategies.check.plain import PlainStep, step_of
from toolkit.strategies.check.state import Saved
from toolkit.strategies.check.watching import Step
from toolkit.strategies.check.whole_batches import unsized, whole_batch
from toolkit.strategies.context import this_step
from toolkit.strategies.options import Options, options_of
from toolkit.strategies.step.moments import normalisations, normalises_batch
from toolkit.strategies.step.train_step import has_one_size
from toolkit.strategies.upstream.train_function import Around, StepFunction
from toolkit.support.frames import line_of, users_frame

_LOG = logging.getLogger(__name__)
REMEDY = "Look at what the script computes there of the whole batch; where all of it is Keras's, please report it"
_CALLS = {"train": "fit", "test": "evaluate", "predict": "predict"}


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
    """Stands around a function of a script that is only compared: each call of Keras's ends after its first step.

    A script's own calls with single batches go on. If they return numbers, those of the first step stand for the next.
    """

    def __init__(self, kind: str, model: Any, made: Made) -> None:
        self._kind, self._model, self._made = kind, model, made
        self._compared = False
        self._logs: Any = None  # Of the step that was compared, if others can do with them.

    def __call__(self, within: Callable, batches: Any) -> Any:
        """Makes a step."""
        session = watching.session()
        if not self._compared:
            logs, step = self._made(self._kind, self._model, within, batches)
            if step is not None and session is not None:
                session.steps.append(step)
            self._compared = step is not None
            self._logs = logs if are_numbers(logs) else None
        else:
            stands = self._logs is not None and this_step.on_batch == self._kind
            if session is not None:
                line = line_of(users_frame(sys._getframe(1)))
                session.again(_call_of(self._kind), line, made=not stands)
            logs = self._logs if stands else within(batches)
        if session is not None:
            watching.end_call(self._model, self._kind)
        return logs


def are_numbers(logs: Any) -> bool:
    """Whether all that a step returns are single numbers, which no script tells from those of another step."""
    leaves = [each for each in tf.nest.flatten(logs) if each is not None]
    return all(not isinstance(each, tf.distribute.DistributedValues) and np.ndim(each) == 0 for each in leaves)


def made_and_compared(kind: str, model: Any, within: Callable, batches: Any) -> tuple[Any, Step | None]:
    """Makes the script's own step, and returns what that returns, and what came of comparing it; None without data."""
    taken, spec = _taken(batches, None if kind == "predict" else model.steps_per_execution)
    if not taken:
        return within(batches), None  # Which says that there is no more.
    strategy = model.distribute_strategy
    step = begun(kind, model)
    whole = [whole_batch(strategy, each) for each in taken]
    divided = by_example(whole[0], taken[0])

    def both(given: list, spec: Any, whole: list) -> BothWays:
        def first(before: Sequence[np.ndarray], saved: Saved) -> str:
            apart = first_apart(kind, model, given[0], spec, whole[0], before, saved)
            return apart[0].describe() if apart else ""

        return BothWays(step_of(model, kind, whole, unsized(spec)), lambda: _made(within, given, spec), first)

    def fewer(rows: int) -> BothWays:
        cut = [first_rows(each, divided, rows) for each in whole]
        return both([dealt(strategy, each, divided) for each in cut], None, cut)

    rows = 0 if has_one_size(model) else counted(strategy, whole, divided)
    known = lambda plain: known_case(model, plain)  # noqa: E731
    return compared(strategy, step, both(taken, spec, whole), known=known, rows=Rows(rows, 1, fewer)), step


def _call_of(kind: str) -> str:
    return f"{kind}_on_batch" if this_step.on_batch == kind else _CALLS[kind]


def begun(kind: str, model: Any) -> Step:
    """Returns the step that a script's call makes, before anything has come of it."""
    return Step(_call_of(kind), model.name, line_of(users_frame(sys._getframe(1))))


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


def of_first_rows(step: Step) -> str:
    """Returns in words how many of a batch's rows were compared; "" for all."""
    words = f", of the first {step.rows} of {step.of_rows} rows: one device can't hold all of them"
    return words if step.rows else ""


def conclude(step: Step) -> None:
    """Says what was found.

    Raises:
        StrategyError: The step isn't one device's, on all processes alike.
    """
    if step.skipped:
        _LOG.warning("The first step of %s isn't compared with one device's: %s", step.call, step.skipped)
    elif not step.differs:
        _LOG.info(
            "The first step of %s is one device's: %d tensors are the same in %s, but for rounding%s (%.1f s: a trace "
            "and %d steps on one device)",
            step.call,
            step.tensors,
            " and ".join(step.dtypes),
            of_first_rows(step),
            step.seconds,
            step.runs,
        )
    elif step.known:
        _LOG.warning(
            "The first step of %s isn't one device's: %s%s. That is so because %s",
            step.call,
            step.first,
            of_first_rows(step),
            step.known,
        )
    else:
        raise StrategyError(
            asked=f'create(check="first_step") compares the first step of {step.call} with the same on one device',
            found=f"{step.first}{of_first_rows(step)}. {len(step.differs)} of {step.tensors} tensors differ",
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
