"""Counts the steps that a model makes.

With `steps_per_execution` Keras makes several steps in one call, and tells callbacks the last one that the call may
have made. Where its data ends, and where `steps_per_epoch` isn't a multiple, the call has made another number of steps.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from toolkit.support.wrapping import attach

__all__ = ["count_dispatched", "count_steps"]

_COUNT = "_toolkit_step_count"


class _Count:
    """Holds the variable, so that Keras and TensorFlow don't save it with the model."""

    def __init__(self) -> None:
        self.variable = tf.Variable(
            0,
            dtype=tf.int64,
            trainable=False,
            name="step_count",
            # As of metrics, so that a replica adds without the others.
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )


def count_steps(model: Any) -> Callable[[], int]:
    """Makes a compiled model count its steps from now on, where a call makes more than one.

    Returns:
        A function that returns how many steps it has made so far.
    """
    strategy = model.distribute_strategy
    if hasattr(strategy, "replace_functions"):  # Workers make the steps, and `count_dispatched` counts them.
        return lambda: vars(model).get(_COUNT, 0)
    count = vars(model).get(_COUNT)
    if count is None:
        with strategy.scope():
            count = vars(model)[_COUNT] = _Count()
        of_keras = getattr(model.train_step, "__func__", None)
        attach(model, "train_step", _counted)
        vars(model)["train_step"].__func__ = of_keras  # By which Keras's own step is told from the user's.
        model.train_function = None  # An earlier one doesn't count.
    return lambda: int(strategy.experimental_local_results(count.variable)[0])


def count_dispatched(model: Any, steps: int) -> None:
    """Adds steps that were sent to workers."""
    vars(model)[_COUNT] = vars(model).get(_COUNT, 0) + steps


def _counted(original: Callable, model: Any, data: Any) -> Any:
    vars(model)[_COUNT].variable.assign_add(1)
    return original(model, data)
