"""Where a step that differs from one device's begins to differ: the first output of a layer, or gradient, in order.

Both ways are traced once more with notes, and run from what the variables held before the step; they are put back.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from toolkit.strategies.check.comparing import Compared, compare
from toolkit.strategies.check.notes import Notes
from toolkit.strategies.check.plain import step_of
from toolkit.strategies.check.state import Saved, of_model
from toolkit.strategies.check.whole_batches import joined, rows_of, unsized
from toolkit.strategies.processes.agreement import gather
from toolkit.strategies.step import xla
from toolkit.strategies.step.train_step import ReplicaStep

_LOG = logging.getLogger(__name__)
_DRAWS = 3  # How often one device's step is moved by a rounding.


def first_apart(
    kind: str, model: Any, given: Any, spec: Any, whole: Any, before: Sequence[np.ndarray], saved: Saved
) -> list[Compared]:
    """Returns the outputs and gradients of a step that aren't one device's, in order; [] if none is, or none is known.

    With several processes it is a collective.

    Args:
        kind: "train", "test" or "predict".
        model: Of a strategy of several replicas; built and compiled.
        given: What replicas were given of the batch.
        spec: By which a function of Keras's sees it; None for its own.
        whole: The whole batch.
        before: What the variables held before the step, in the order of `PlainStep.held`.
        saved: The same, by replica.
    """
    if model.run_eagerly or xla.meant_alone(model):  # XLA's random numbers are others, and it has one graph.
        return []
    try:
        found = _both(kind, model, given, spec, whole, before, saved)
    except Exception:  # The user's own code may raise anything, when it is traced once more.
        _LOG.debug("The step can't be followed", exc_info=True)
        found = None
    if not all(gather(model.distribute_strategy, b"" if found is None else b"known")):
        return []
    return _compared(model, given, *found)  # type: ignore[misc]


def _both(
    kind: str, model: Any, given: Any, spec: Any, whole: Any, before: Sequence[np.ndarray], saved: Saved
) -> tuple:
    """Returns what one device's step and replicas' compute on their way."""
    one, ours = Notes(), Notes()
    plain = step_of(model, kind, [whole], unsized(spec), one).in_other_orders()
    plain.trace()
    made = [plain.run(before, draw=draw)[0][1].get(0, []) for draw in range(1 + _DRAWS)]
    after = Saved(plain.held)
    saved.put_back()
    try:
        parts = _on_replicas(kind, model, given, spec, ours)
    finally:
        after.put_back()
    return plain.eps, one, made, ours, parts


def _on_replicas(kind: str, model: Any, given: Any, spec: Any, notes: Notes) -> dict[int, list]:
    strategy = model.distribute_strategy
    step: Callable = model.predict_step if kind == "predict" else ReplicaStep(model, f"{kind}_step")

    def all_replicas(batch: Any) -> Any:
        strategy.run(step, args=(batch,))

    noted = notes.noted(of_model(model).optimizers, all_replicas)
    if spec is not None:
        traced = tf.function(noted, input_signature=[spec], autograph=False).get_concrete_function()
    else:
        traced = tf.function(noted, autograph=False).get_concrete_function(given)
    return traced(given)[1]


def _compared(
    model: Any, given: Any, eps: float, one: Notes, made: list[list], ours: Notes, parts: dict[int, list]
) -> list[Compared]:
    strategy = model.distribute_strategy
    replicas = sorted(parts)
    names = [{note.name: number for number, note in enumerate(ours.by_replica[each])} for each in replicas]
    known = [
        (place, note)
        for place, note in enumerate(one.by_replica.get(0, []))
        if all(note.name in each for each in names)
    ]
    mine = [
        [parts[replica][numbers[note.name]] for _, note in known]
        for replica, numbers in zip(replicas, names, strict=True)
    ]
    found = []
    for (place, note), (every, rows) in zip(known, joined(strategy, mine, rows_of(strategy, given)), strict=True):
        values = [np.asarray(each[place]) for each in made]
        there = next((each for each in (rows, every[0]) if each is not None and each.shape == values[0].shape), None)
        if there is not None:
            name = note.name + (f" ({note.line})" if note.line else "")
            found.append(compare(name, note.of, there.numpy(), values[0], values[1:], eps))
    return [each for each in found if each.differs]
