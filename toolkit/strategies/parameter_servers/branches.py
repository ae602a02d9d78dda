"""Branches in a step: what Keras's `cond` assigns to the step's own copies is carried out of the branch.

In a step, assignments change a dictionary of tensors, and a tensor that is made in a branch is of no use outside of it.
LossScaleOptimizer has such branches, and a `train_step` of the user's own may have them.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.parameter_servers import private
from toolkit.strategies.parameter_servers.tables import LocalTable, LocalValue, UpdatedValue
from toolkit.strategies.parameter_servers.variables import innermost

__all__ = ["adapt_branches"]


def adapt_branches() -> None:
    """Has Keras's `cond` ask for the step's own copies, where it is used in a step; called again, it does nothing."""
    private.around_branches(_cond)


def _cond(original: Callable, pred: Any, true_fn: Callable, false_fn: Callable) -> Any:
    scope = innermost()
    if scope is None:
        return original(pred, true_fn=true_fn, false_fn=false_fn)
    before, counts = dict(scope.values), dict(scope.assigned)
    carried = [key for key, value in before.items() if _can_be_carried(value)]
    touched: dict[int, Any] = {}

    def branch(function: Callable) -> Callable:
        def run() -> tuple:
            scope.values, scope.assigned = dict(before), dict(counts)
            result = function()
            touched.update({key: value for key, value in scope.values.items() if value is not before[key]})
            return result, [tf.convert_to_tensor(scope.values[key]) for key in carried]

        return run

    try:
        result, after = original(pred, true_fn=branch(true_fn), false_fn=branch(false_fn))
    finally:
        scope.values, scope.assigned = before, counts
    for key, value in zip(carried, after, strict=True):
        if key in touched:
            old = before[key]
            scope.values[key] = LocalValue(value, trainable=False) if isinstance(old, LocalValue) else value
            scope.assigned[key] = scope.assigned.get(key, 0) + 1
            scope.conditional.add(key)
    for key in touched.keys() - set(carried):  # Updated on the ps, where whoever asks reads it again.
        if not isinstance(touched[key], (LocalTable, UpdatedValue)):
            raise StrategyError(
                asked="a trainable variable is assigned in a branch of a train_step",
                found="under parameter servers a step can't return that assignment",
                remedy="Assign keras.ops.where(condition, new, variable) outside of the branch",
            )
        scope.values[key] = touched[key].anew()
    return result


def _can_be_carried(value: Any) -> bool:
    """Whether a value in a step is a tensor, and not a variable's on the ps, which is read there again."""
    return not isinstance(value, LocalValue) or not value.trainable
