"""Refuses data whose first axis isn't the batch, such as anchors and positives stacked along it.

A step that takes rows 0 and 1 of a component apart, and does nothing else with it, means no examples by them. Replicas
share axis 0, so a row may be another replica's: TensorFlow would say that an index is out of bounds.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.context import here

__all__ = ["takes_no_rows"]

_SHAPES = ("Shape", "ShapeN", "Size", "Rank")
_MISSING = re.compile(r"slice index -?\d+ of dimension 0 out of bounds|not enough values to unpack")


@contextlib.contextmanager
def takes_no_rows(data: Any) -> Iterator[None]:
    """A context in which a step is traced.

    Args:
        data: The replica's share of a batch.

    Raises:
        StrategyError: The step takes single rows of a component.
    """
    try:
        yield
    except ValueError as error:
        if _MISSING.search(str(error)) and (names := _taken_apart(data, once=True)):
            raise _refusal(names) from error
        raise
    if names := _taken_apart(data, once=False):
        raise _refusal(names)


def _refusal(names: list[str]) -> StrategyError:
    return StrategyError(
        asked=f"the step takes single rows of {' and '.join(names)}",
        found="axis 0 of each component of a batch is the batch, which replicas share",
        remedy="Give what was stacked there as components of their own, such as (anchors, positives), or stack along "
        "axis 1",
    )


def _taken_apart(data: Any, *, once: bool) -> list[str]:
    """Returns the names of components of which only single rows are used, several of them unless `once`."""
    if tf.executing_eagerly():
        return []
    found = []
    for number, (path, leaf) in enumerate(keras.tree.flatten_with_path(data)):
        if not isinstance(leaf, tf.Tensor) or number in here.whole:
            continue
        users = [op for op in leaf.consumers() if op.type not in _SHAPES]
        rows = {_row(op) for op in users}
        if users and None not in rows and (once or len(rows) > 1):
            found.append(f"the batch's component {'.'.join(map(str, path)) or 0}")
    return found


def _row(op: tf.Operation) -> int | None:
    """Returns the index of the row that an operation takes; -1 for all, one by one, and None for another operation."""
    if op.type == "Unpack":
        return -1 if op.get_attr("axis") == 0 else None
    first = tf.get_static_value(op.inputs[1]) if op.type == "StridedSlice" else None
    if first is None or not op.get_attr("shrink_axis_mask") & 1 or op.get_attr("begin_mask") & 1:
        return None
    return int(first[0])
