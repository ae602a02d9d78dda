"""Makes work outside of steps and of a strategy's scope what works there on one device.

A model is compiled again after its scope, with an optimizer that was made there; a callback prints a learning rate.
Variables of several replicas are TensorFlow's, which are no Python numbers, and can't be mixed with plain ones.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import values

from toolkit.errors import StrategyError
from toolkit.strategies.processes.agreement import processes
from toolkit.support.wrapping import add

__all__ = ["adapt_calls", "quantize"]


def adapt_calls() -> None:
    """Lets variables of several replicas be used as numbers, as one device's can. Later calls do nothing.

    Keras's `float(variable)` is that of what it holds, and TensorFlow's class of it has none.
    """
    add(values.DistributedVariable, "__float__", lambda variable: float(tf.convert_to_tensor(variable).numpy()))
    add(values.DistributedVariable, "__int__", lambda variable: int(tf.convert_to_tensor(variable).numpy()))


def quantize(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuses what several workers can't do."""
    if processes(model.distribute_strategy) > 1:
        raise StrategyError(
            asked="model.quantize on several workers",
            found="TensorFlow sends no variables of 8 bits from one worker to the others",
            remedy="Save the model, load it in a process that trains alone, and quantize it there",
        )
    return original(model, *args, **kwargs)
