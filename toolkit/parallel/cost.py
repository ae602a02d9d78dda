"""What each layer of a model costs: operations, weights, activations. Nothing is run for it.

A multiplication and an addition are two operations. Backward, a layer with weights computes the gradients of its
weights and of its inputs, as many operations each as forward; no gradient of inputs where nothing before it is trained.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.errors import ModelError
from toolkit.parallel import operations

if TYPE_CHECKING:
    import keras

__all__ = ["LayerCost", "costs", "is_graph", "leaves"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCost:
    """A layer's costs; of activations and operations for one example.

    Attributes:
        name: Where it is, such as "head/fc1".
        kind: Its class.
        forward: Operations forward; None where they aren't known.
        backward: Operations backward; None where they aren't known.
        parameters: Numbers among its weights that are trained.
        state: Numbers among its weights that are not.
        rows: Rows that its kernel is applied to: 1 for [n, features], t for [n, t, features].
        inputs: Numbers that come in.
        outputs: Numbers that go out.
        units: What a split by outputs divides: units or filters. 0 where it can't be split.
        features: What a split by inputs divides: input features of a `Dense`. 0 where it can't be.
        bias: Numbers of its bias.
        passes_gradient: Something before it is trained, so that gradients go on through it.
        statistics: Numbers that it sums over replicas, forward and again backward.
        number_bytes: Of a number among activations.
        weight_bytes: Of a number among weights.
        elementwise: Its output can be left split by features.
        takes_split_from: The layer whose output comes here through nothing but elementwise layers.
        note: Why it can't be split, or counted; "" where it can.
    """

    name: str
    kind: str
    forward: int | None
    backward: int | None
    parameters: int
    state: int
    rows: int = 1
    inputs: int = 0
    outputs: int = 0
    units: int = 0
    features: int = 0
    bias: int = 0
    passes_gradient: bool = True
    statistics: int = 0
    number_bytes: int = 4
    weight_bytes: int = 4
    elementwise: bool = False
    takes_split_from: str | None = None
    note: str = ""

    @property
    def operations(self) -> int | None:
        """Operations of a training step for one example, both ways."""
        return None if self.forward is None or self.backward is None else self.forward + self.backward


def is_graph(model: Any) -> bool:
    """Says whether a model's layers are joined where that can be read: functional and Sequential ones."""
    import keras
    from keras.src.models import Functional  # Public as what keras.Model(inputs, outputs) returns only.

    return isinstance(model, (keras.Sequential, Functional))


def leaves(model: "keras.Model", prefix: str = "") -> "Iterator[tuple[str, keras.layers.Layer]]":
    """Yields (name, layer) of a functional or Sequential model, in order, also of the models within it."""
    import keras

    for layer in model.layers:
        name = prefix + layer.name
        if is_graph(layer):
            yield from leaves(layer, f"{name}/")
        elif not isinstance(layer, keras.layers.InputLayer):
            yield name, layer


def costs(model: "keras.Model") -> tuple[LayerCost, ...]:
    """Returns the costs of each layer, in order.

    Args:
        model: A built functional or Sequential model. Models within it are taken apart.

    Raises:
        ModelError: The model isn't built, or its layers aren't joined in a way that can be read.
    """
    _check(model)
    found: list[LayerCost] = []
    trained: set[int] = set()  # Tensors with something trained before them.
    sources = _sources(model)
    shared = _shared(model)
    for name, layer in leaves(model):
        inputs = _tensors(layer, "input", sources) if id(layer) not in shared else []
        passes = any(id(tensor) in trained for tensor in inputs)
        cost = _cost(name, layer, inputs, passes_gradient=passes)
        if passes or cost.parameters:
            trained.update(id(tensor) for tensor in _tensors(layer, "output", sources))
        found.append(cost)
    return _joined(model, found, sources)


def _check(model: Any) -> None:
    import keras

    if not isinstance(model, keras.Model):
        raise ModelError(
            asked="a plan is made for a Keras model",
            found=f"this is a {type(model).__name__}",
            remedy="Give a keras.Model, functional or Sequential",
        )
    if not model.built:
        raise ModelError(
            asked=f"model {model.name!r} is to be planned",
            found="it isn't built, so its layers have no shapes yet",
            remedy="Begin it with keras.Input(shape), or call model.build(shape)",
        )
    if not is_graph(model):
        raise ModelError(
            asked=f"model {model.name!r} is to be planned",
            found=f"it is of class {type(model).__name__}, and how its layers are joined stands in its code only",
            remedy="Make it a functional or Sequential model, or use ShardedDense in it by hand",
        )


def _sources(model: Any) -> dict[int, Any]:
    """From a tensor at the edge of a model within to the one outside that it is."""
    same: dict[int, Any] = {}
    for layer in model.layers:
        if is_graph(layer):
            for inner, outer in zip(layer.inputs, _listed(_read(layer, "input")), strict=False):
                same[id(inner)] = outer
            for inner, outer in zip(layer.outputs, _listed(_read(layer, "output")), strict=False):
                same[id(outer)] = inner
            same.update(_sources(layer))
    return same


def _read(layer: Any, what: str) -> Any:
    try:
        return getattr(layer, what)
    except (AttributeError, ValueError):  # It was never called.
        return ()


def _shared(model: Any) -> set[int]:
    """Layers that the model calls several times, also in models within it. Their nodes are Keras's to know."""
    calls: dict[int, int] = {}
    for nodes in getattr(model, "_nodes_by_depth", {}).values():
        for node in nodes:
            calls[id(node.operation)] = calls.get(id(node.operation), 0) + 1
    found = {layer for layer, count in calls.items() if count > 1}
    for layer in model.layers:
        if is_graph(layer):
            found |= _shared(layer) if id(layer) not in found else {id(inner) for _, inner in leaves(layer)}
    return found


def _listed(value: Any) -> list:
    import keras

    return [tensor for tensor in keras.tree.flatten(value) if hasattr(tensor, "shape")]


def _tensors(layer: Any, what: str, sources: dict[int, Any]) -> list:
    return [_outermost(tensor, sources) for tensor in _listed(_read(layer, what))]


def _outermost(tensor: Any, sources: dict[int, Any]) -> Any:
    while id(tensor) in sources and sources[id(tensor)] is not tensor:
        tensor = sources[id(tensor)]
    return tensor


def _cost(name: str, layer: Any, inputs: Sequence, *, passes_gradient: bool) -> LayerCost:
    outputs = _listed(_read(layer, "output"))
    kind = type(layer).__name__
    parameters = sum(math.prod(v.shape) for v in layer.trainable_variables if _is_weight(v))
    state = sum(math.prod(v.shape) for v in layer.non_trainable_variables if _is_weight(v))
    known = {
        "name": name,
        "kind": kind,
        "parameters": parameters,
        "state": state,
        "passes_gradient": passes_gradient,
        "number_bytes": _bytes(layer.compute_dtype),
        "weight_bytes": _bytes(layer.variable_dtype),
    }
    unknown = {**known, "forward": None, "backward": None}
    if not inputs or not outputs:
        return LayerCost(**unknown, note="it is called several times")
    if any(size is None for tensor in (*inputs, *outputs) for size in tensor.shape[1:]):
        return LayerCost(**unknown, note="the sizes of its activations aren't known before it runs")
    known |= {"inputs": sum(map(operations.numbers, inputs)), "outputs": sum(map(operations.numbers, outputs))}
    unknown |= {"inputs": known["inputs"], "outputs": known["outputs"]}
    forward = operations.forward(layer, inputs, outputs)
    if forward is None:
        return LayerCost(**unknown, note=f"what {kind} computes isn't known")
    gradients = bool(parameters) + passes_gradient
    return LayerCost(
        **known,
        forward=forward,
        backward=forward * gradients,
        elementwise=_is_elementwise(layer, kind),
        statistics=_statistics(layer, kind),
        **_division(layer, kind, inputs[0].shape),
    )


def _is_weight(variable: Any) -> bool:
    return "seed" not in variable.name  # A seed generator's counter is no weight.


def _bytes(dtype: str) -> int:
    import tensorflow as tf

    return tf.as_dtype(dtype).size


def _is_elementwise(layer: Any, kind: str) -> bool:
    import keras

    from toolkit.parallel.layers import ELEMENTWISE

    if kind in ("Dropout", "ReLU", "LeakyReLU", "ELU", "Identity"):
        return getattr(layer, "noise_shape", None) is None
    if kind not in ("Activation", "Dense", "ShardedDense"):
        return False
    return keras.activations.serialize(layer.activation) in ELEMENTWISE


def _statistics(layer: Any, kind: str) -> int:
    if kind == "BatchNormalization" and getattr(layer, "synchronized", False):
        return 2 * math.prod(layer.moving_mean.shape) + 1  # Sums, sums of squares, and of how many.
    return 0


def _division(layer: Any, kind: str, shape: Sequence[int]) -> dict[str, Any]:
    """What can be divided among replicas, or why nothing can."""
    if kind in ("Dense", "ShardedDense"):
        if getattr(layer, "lora_rank", None) or getattr(layer, "quantization_mode", None):
            return {"note": "it is quantized, or has LoRA weights"}
        bias = layer.units if layer.use_bias else 0
        return {"units": layer.units, "features": shape[-1], "bias": bias, "rows": math.prod(shape[1:-1])}
    if kind in ("Conv2D", "ShardedConv2D"):
        if layer.groups > 1 or getattr(layer, "lora_rank", None):
            return {"note": "it has groups, or LoRA weights"}
        return {"units": layer.filters, "bias": layer.filters if layer.use_bias else 0}
    return {"note": f"{kind} can't be split" if layer.weights else ""}


def _joined(model: Any, found: list[LayerCost], sources: dict[int, Any]) -> tuple[LayerCost, ...]:
    """Says whose output comes to which `Dense` through elementwise layers only, each with no other reader."""
    makers: dict[int, str] = {}
    readers: dict[int, int] = {}
    came: dict[str, list] = {}
    for name, layer in leaves(model):
        came[name] = _tensors(layer, "input", sources)
        for tensor in came[name]:
            readers[id(tensor)] = readers.get(id(tensor), 0) + 1
        for tensor in _tensors(layer, "output", sources):
            makers[id(tensor)] = name
    for tensor in _listed(model.outputs):
        outermost = _outermost(tensor, sources)
        readers[id(outermost)] = readers.get(id(outermost), 0) + 1
    by_name = {cost.name: cost for cost in found}

    def source(name: str) -> str | None:
        while len(came[name]) == 1 and readers[id(came[name][0])] == 1:
            before = makers.get(id(came[name][0]))
            if before is None or not by_name[before].elementwise:
                return None
            if by_name[before].features:
                return before
            name = before
        return None

    return tuple(
        dataclasses.replace(cost, takes_split_from=source(cost.name)) if cost.features else cost for cost in found
    )
