"""What users do outside of steps and of a strategy's scope, and what works there on one device.

A model is compiled again after its scope, with an optimizer that was made there; a callback prints a learning rate; a
single batch is predicted. Variables of several replicas are TensorFlow's, which are no Python numbers, can't be mixed
with plain ones, and give each replica the whole of a batch that no data set brings.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import variables as keras_variables

from toolkit.errors import StrategyError
from toolkit.strategies.exchange import mesh
from toolkit.strategies.processes.agreement import processes
from toolkit.strategies.variables.outside import holds_variables, take_in
from toolkit.support.wrapping import wrap

__all__ = ["adapt_calls"]


def adapt_calls() -> None:
    """Has these calls give one device's answers under strategies made here; called again, it does nothing."""
    # Where it is defined: Keras looks whether a model's class has another `compile` than that.
    wrap(next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind)), "compile", _compile_in_scope)
    wrap(keras.Model, "predict_on_batch", _predict_once)
    wrap(keras.Model, "quantize", _quantize)
    for name in ("__float__", "__int__"):
        wrap(keras_variables.Variable, name, _number)


def _compile_in_scope(original: Callable, model: Any, *args: Any, **kwargs: Any) -> None:
    """Has each replica sum its own metrics, and have its own optimizer, where a model is compiled outside its scope."""
    strategy = model.distribute_strategy
    if not holds_variables(strategy):
        original(model, *args, **kwargs)
        return
    with strategy.scope():
        original(model, *args, **kwargs)
        take_in(model)


def _quantize(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    if processes(model.distribute_strategy) > 1:
        raise StrategyError(
            asked="model.quantize on several workers",
            found="TensorFlow sends no variables of 8 bits from one worker to the others",
            remedy="Save the model, load it in a process that trains alone, and quantize it there",
        )
    return original(model, *args, **kwargs)


def _predict_once(original: Callable, model: Any, x: Any) -> Any:
    """Returns what the first replica has predicted: all of them are given the whole batch."""
    outputs = original(model, x)
    count = mesh.replicas(model.distribute_strategy)
    return outputs if count == 1 else keras.tree.map_structure(lambda each: each[: len(each) // count], outputs)


def _number(original: Callable, variable: Any) -> Any:
    if isinstance(variable.value, tf.distribute.DistributedValues):
        kind = float if original.__name__ == "__float__" else int
        return kind(keras.ops.convert_to_numpy(variable))
    return original(variable)
