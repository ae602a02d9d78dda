"""Makes work outside of steps and of a strategy's scope what works there on one device.

A model is compiled again after its scope, with an optimizer that was made there; a callback prints a learning rate; a
single batch is predicted. Variables of several replicas are TensorFlow's, which are no Python numbers, can't be mixed
with plain ones, and give each replica the whole of a batch that no data set brings.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import values

from toolkit.errors import StrategyError
from toolkit.strategies.exchange import mesh
from toolkit.strategies.processes.agreement import processes
from toolkit.support.wrapping import add

__all__ = ["adapt_calls", "predict_once", "quantize"]


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


def predict_once(original: Callable, model: Any, x: Any) -> Any:
    """Returns the first replica's predictions, since all replicas get the whole batch."""
    outputs = original(model, x)
    count = mesh.replicas(model.distribute_strategy)
    return outputs if count == 1 else keras.tree.map_structure(lambda each: each[: len(each) // count], outputs)
