"""Places layers of a model on different devices, without a strategy: layer-wise model parallelism."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import ModelError, StrategyError
from toolkit.observe.placement.names import device
from toolkit.parallel.graph import copy_model, is_graph, layers_of
from toolkit.parallel.layers.kinds import plain_layer
from toolkit.support.words import did_you_mean, nearest

__all__ = ["place"]

Rule = Mapping[str, str] | Callable[[keras.layers.Layer], str | None]


def place(model: keras.Model, rule: Rule) -> keras.Model:
    """Returns a model whose layers' variables and operations are on the devices that a rule names.

    Weights are those of `model`, which stays as it is. What goes from a layer to one on another device is copied there
    by TensorFlow. The layers run one after another, as their inputs allow: the devices share the memory that the model
    needs, and save no time.

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
        copy = plain_layer(layer)
        if id(layer) in devices:
            _run_on(copy, devices[id(layer)])
        return copy

    made = copy_model(model, placed)
    _compiles_as_placed(made)
    return made


def _devices(model: keras.Model, rule: Rule) -> dict[int, str]:
    """Returns each layer's device by the layer's id; layers of a model within have that model's device."""
    layers = [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
    if isinstance(rule, Mapping):
        names = [layer.name for layer in layers]
        for name in rule:
            if name not in names:
                raise ModelError(
                    asked=f"the rule places the layer {name!r}",
                    found=f"the layers of {model.name!r} are {', '.join(names[:30])}",
                    remedy=did_you_mean(nearest(str(name), names)) + "Give one of those names",
                )
        given = {layer.name: rule.get(layer.name) for layer in layers}
    elif callable(rule):
        given = {layer.name: rule(layer) for layer in layers}
    else:
        raise ModelError(
            asked=f"the rule is {rule!r}",
            found="it gives a device for no layer",
            remedy='Give a mapping such as {"fc1": "GPU:1"}, or a function from a layer to a device',
        )
    found = {}
    for layer in layers:
        where = given[layer.name]
        if where is not None:
            inner = [inner for _, inner in layers_of(layer)] if is_graph(layer) else [layer]
            found.update(dict.fromkeys(map(id, inner), device(where)))
    return found


def _run_on(layer: Any, where: str) -> None:
    """Makes a layer create its variables and run on a device."""

    def there(method: Callable) -> Callable:
        @functools.wraps(method)  # Keras inspects the names of its arguments.
        def on_device(*args: Any, **kwargs: Any) -> Any:
            with tf.device(where):
                return method(*args, **kwargs)

        return on_device

    layer.build, layer.call = there(layer.build), there(layer.call)


def _compiles_as_placed(model: Any) -> None:
    """Makes `compile` turn XLA off, which compiles for one device, and puts slots beside their weights."""
    compiled = model.compile

    @functools.wraps(compiled)
    def compiling(*args: Any, jit_compile: Any = "auto", **kwargs: Any) -> None:
        if jit_compile is True:
            raise ModelError(
                asked="compile(jit_compile=True)",
                found="XLA compiles for one device, and this model's layers are placed on several",
                remedy="Leave jit_compile out",
            )
        compiled(*args, jit_compile=False, **kwargs)
        # LossScaleOptimizer contains an optimizer.
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        if optimizer is None:
            return
        add = optimizer.add_variable_from_reference

        @functools.wraps(add)
        def beside(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
            with tf.device(reference_variable.value.device):
                return add(reference_variable, *args, **kwargs)

        optimizer.add_variable_from_reference = beside

    model.compile = compiling
