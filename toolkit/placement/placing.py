"""Layers of a model on devices of their own, outside of any strategy: layer-wise model parallelism."""

import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import ModelError, StrategyError
from toolkit.parallel.cost import is_graph
from toolkit.placement.names import device

__all__ = ["place"]

Rule = Mapping[str, str] | Callable[[keras.layers.Layer], str | None]


def place(model: keras.Model, rule: Rule) -> keras.Model:
    """Returns the model with its layers' variables and operations on the devices that a rule gives them.

    Weights are those of `model`, which stays as it is. What goes from a layer to one on another device is copied there
    by TensorFlow. The layers run one after another, as their inputs allow; it is memory that is shared out, not time.

    Args:
        model: Built; functional or Sequential. A model in it is placed as one layer.
        rule: A layer's name to a device, such as {"fc1": "GPU:1"}, or a function from a layer to a device; None, or no
            entry, leaves a layer to TensorFlow.

    Raises:
        DeviceError: The rule names a device that isn't there; the message lists those that are.
        ModelError: The rule names a layer that isn't there, or the model can't be taken apart.
        StrategyError: Called in a strategy's scope, where the strategy places variables.
    """
    if tf.distribute.has_strategy():
        raise StrategyError(
            asked="place() puts layers on devices by a rule",
            found="a strategy's scope is active, and it puts each variable on all its replicas",
            remedy="Call it outside of the scope, or use toolkit.parallel.parallelize() under a strategy",
        )
    if not model.built or not is_graph(model):
        raise ModelError(
            asked=f"place() takes {model.name!r} apart into layers",
            found="it isn't built" if not model.built else "it is neither functional nor Sequential",
            remedy="Give it an Input" if not model.built else "Build it from layers, or use tf.device in its call()",
        )
    devices = _devices(model, rule)

    def placed(layer: keras.layers.Layer) -> keras.layers.Layer:
        where = devices.get(layer.name)
        with tf.device(where):  # A model within makes its weights at once.
            copy = layer.__class__.from_config(layer.get_config())
        if where is not None:
            _run_on(copy, where)
        return copy

    made = keras.models.clone_model(model, clone_function=placed)
    made.set_weights(model.get_weights())
    _keep_slots_beside(made)
    return made


def _devices(model: keras.Model, rule: Rule) -> dict[str, str]:
    """Layers by name, each with the full name of its device."""
    layers = [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
    if isinstance(rule, Mapping):
        names = [layer.name for layer in layers]
        for name in rule:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                raise ModelError(
                    asked=f"the rule places the layer {name!r}",
                    found=f"the layers of {model.name!r} are {', '.join(names[:30])}",
                    remedy=(f"Did you mean {near[0]!r}? " if near else "") + "Give one of those names",
                )
        given = {name: where for name, where in rule.items() if where}
    else:
        given = {layer.name: where for layer in layers if (where := rule(layer))}
    return {name: device(where) for name, where in given.items()}


def _run_on(layer: Any, where: str) -> None:
    """Has a layer make its variables, and run, on a device."""

    def there(method: Callable) -> Callable:
        @functools.wraps(method)  # Keras looks at the names of its arguments.
        def on_device(*args: Any, **kwargs: Any) -> Any:
            with tf.device(where):
                return method(*args, **kwargs)

        return on_device

    layer.build, layer.call = there(layer.build), there(layer.call)


def _keep_slots_beside(model: Any) -> None:
    """Has the optimizer that the model is compiled with keep what belongs to a weight on the weight's device."""
    compiled = model.compile

    @functools.wraps(compiled)
    def compiling(*args: Any, **kwargs: Any) -> None:
        compiled(*args, **kwargs)
        add = model.optimizer.add_variable_from_reference

        @functools.wraps(add)
        def beside(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
            with tf.device(reference_variable.value.device):
                return add(reference_variable, *args, **kwargs)

        model.optimizer.add_variable_from_reference = beside

    model.compile = compiling
