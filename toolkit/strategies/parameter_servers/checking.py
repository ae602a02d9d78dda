"""The first steps beside parameter servers, compared with one device's: rounds, and steps that are made in turn.

The chief takes a step's batches from the data, sends the step, waits for it, and makes it once more by itself. Steps
that workers make at the same time have no one device's numbers. What is evaluated and predicted has, in all modes.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from toolkit.strategies.check.both_ways import BothWays, compared
from toolkit.strategies.check.first_step import begun, known_case
from toolkit.strategies.check.plain import PlainStep, step_of
from toolkit.strategies.check.watching import Step
from toolkit.strategies.parameter_servers.session import Session
from toolkit.strategies.parameter_servers.sources import Again, Reader, reader_of

_AT_ONCE = (
    "workers train at the same time, and each step begins with the weights that its worker has read. Steps of "
    "ParameterServerOptions(synchronous=True) or (max_staleness=0) have one device's numbers, and are compared"
)
_OWN_DATA = "each worker reads its own data (distribute_datasets_from_function)"


def made_and_compared(kind: str, model: Any, within: Callable, given: Any) -> tuple[Any, Step | None]:
    """Makes a script's own call, and compares it.

    Args:
        kind: "train", "test" or "predict".
        model: Whose session sends the steps.
        within: Makes the call.
        given: What Keras gives it: a reader, or batches that are predicted.

    Returns:
        What the call returns, and what came of comparing it; None without data.
    """
    session = model.distribute_strategy.session(model)
    step = begun(kind, model)
    if kind == "predict":
        batches = list(given)
        return _compared(session, step, step_of(model, kind, batches, (True,)), lambda: within(batches), lambda x: x)
    reader = reader_of(given)
    stream = reader.stream
    step.skipped = _AT_ONCE if kind == "train" and not session.in_turn else ""
    step.skipped = step.skipped or (_OWN_DATA if stream.kind == "per worker" else "")
    if step.skipped:
        return within(reader), step
    items = _taken(reader, model.steps_per_execution)
    again = Again(stream, items)
    if not items:
        return within(again), None  # Which says that there is no more.
    session.wait_for_steps()
    if kind == "train":
        session.take(stream)

    unsized = () if stream.kind == "numbered" else (True,)
    plain = step_of(model, kind, [stream.whole(each) for each in items], unsized)
    # Which waits for the steps.
    return _compared(session, step, plain, lambda: within(again), lambda _: model.get_metrics_result())


def _taken(reader: Reader, count: int) -> list:
    items: list = []
    while len(items) < count:
        try:
            items.append(reader.take())
        except (StopIteration, tf.errors.OutOfRangeError):
            break
    return items


def _compared(
    session: Session, step: Step, plain: PlainStep, call: Callable[[], Any], logs: Callable[[Any], Any]
) -> tuple[Any, Step]:
    model = session.model

    def known(plain: PlainStep) -> str:
        if session.lazy:
            return f"rows of {session.lazy[0]} are updated only in the steps that look them up (min_lazy_bytes)"
        if session.shares > 1 and session.tables:
            return (
                f"in a round the gradients of a row of {session.tables[0]} are added before an optimizer squares them"
            )
        return known_case(model, plain)

    strategy = model.distribute_strategy
    return compared(strategy, step, BothWays(plain, call), known=known, logs=logs, shares=session.shares), step
