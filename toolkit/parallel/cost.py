"""What each layer of a model costs: operations, weights, activations. Nothing is run for it.

A multiplication and an addition are two operations. Backward, a layer with weights computes the gradients of its
weights and of its inputs, as many operations each as forward; no gradient of inputs where nothing before it is trained.
`tests/parallel/test_cost.py` holds the formulas against TensorFlow's profiler.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.parallel.graph import Graph

if TYPE_CHECKING:
    import keras

__all__ = ["LayerCost", "costs"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCost:
    """A layer's costs; activations and operations are those of one example.

    Attributes:
        name: The layer's name, such as "head/fc1".
        kind: Its class.
        forward: Operations forward; None where they aren't known.
        backward: Operations backward; None where they aren't known.
        parameters: Elements of its trained weights.
        state: Elements of its other weights.
        inputs: Elements of its inputs.
        outputs: Elements of its outputs.
        units: What a split by outputs divides: units or filters. 0 where it can't be split.
        features: What a split by inputs divides: input features of a `Dense`. 0 where it can't be.
        bias: Elements of its bias.
        passes_gradient: Something before it is trained, so that gradients go on through it.
        statistics: Elements that it sums over replicas, forward and again backward.
        activation_bytes: Bytes of an element of its activations.
        weight_bytes: Bytes of an element of its weights.
        elementwise: Its output can be left sharded by features.
        takes_split_from: The layer whose output comes here through nothing but elementwise layers.
        note: Why it can't be split, or counted; "" where it can.
    """

    name: str
    kind: str
    forward: int | None
    backward: int | None
    parameters: int
    state: int
    inputs: int = 0
    outputs: int = 0
    units: int = 0
    features: int = 0
    bias: int = 0
    passes_gradient: bool = True
    statistics: int = 0
    activation_bytes: int = 4
    weight_bytes: int = 4
    elementwise: bool = False
    takes_split_from: str | None = None
    note: str = ""

    @property
    def operations(self) -> int | None:
        """Operations of a training step for one example, both ways."""
        return None if self.forward is None or self.backward is None else self.forward + self.backward


def costs(model: "keras.Model") -> tuple[LayerCost, ...]:
    """Returns the costs of each layer, in order.

    Args:
        model: A built functional or Sequential model. Models within it are taken apart.

    Raises:
        ModelError: The model isn't built, or its layers aren't joined in a way that can be read.
    """
    graph = Graph(model)
    found: dict[str, LayerCost] = {}
    after_weights: set[int] = set()  # Tensors with something trained before them.
    for name, layer in graph.layers:
        inputs, outputs = graph.inputs(layer), graph.outputs(layer)
        passes = any(id(tensor) in after_weights for tensor in inputs)
        found[name] = _cost(name, layer, inputs, outputs, passes_gradient=passes)
        if passes or found[name].parameters:
            after_weights.update(map(id, outputs))
    before = graph.single_readers()

    def source(name: str) -> str | None:
        """The `Dense` whose output comes to a layer through elementwise layers only, each with no other reader."""
        while (name := before.get(name, "")) and found[name].elementwise:
            if found[name].features:
                return name
        return None

    return tuple(
        dataclasses.replace(cost, takes_split_from=source(name)) if cost.features else cost
        for name, cost in found.items()
    )


def _cost(name: str, layer: Any, inputs: Sequence, outputs: Sequence, *, passes_gradient: bool) -> LayerCost:
    kind = type(layer).__name__
    parameters = _elements_of_weights(layer.trainable_variables)
    cost = LayerCost(
        name=name,
        kind=kind,
        forward=None,
        backward=None,
        parameters=parameters,
        state=_elements_of_weights(layer.non_trainable_variables),
        passes_gradient=passes_gradient,
        activation_bytes=_bytes(layer.compute_dtype),
        weight_bytes=_bytes(layer.variable_dtype),
    )
    if not inputs or not outputs:
        return dataclasses.replace(cost, note="it is called several times")
    if any(size is None for tensor in (*inputs, *outputs) for size in tensor.shape[1:]):
        return dataclasses.replace(cost, note="the sizes of its activations aren't known before it runs")
    cost = dataclasses.replace(cost, inputs=sum(map(_elements, inputs)), outputs=sum(map(_elements, outputs)))
    # A class of one's own may compute anything, whatever its name is.
    known = type(layer).__module__.startswith(("keras.", "toolkit.parallel."))
    formula = _FORWARD.get(kind) if known else None
    if formula is None:
        return dataclasses.replace(cost, note=f"what {kind} computes isn't known")
    forward = int(formula(layer, inputs, outputs))
    return dataclasses.replace(
        cost,
        forward=forward,
        backward=forward * (bool(parameters) + passes_gradient),
        elementwise=_is_elementwise(layer, kind),
        statistics=_statistics(layer, kind),
        **_division(layer, kind, inputs[0].shape),
    )


def _elements_of_weights(variables: Sequence) -> int:
    return sum(math.prod(each.shape) for each in variables if "seed" not in each.name)  # A seed's counter is no weight.


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
    """Returns what can be divided among replicas, or why nothing can."""
    if kind in ("Dense", "ShardedDense"):
        if getattr(layer, "lora_rank", None) or getattr(layer, "quantization_mode", None):
            return {"note": "it is quantized, or has LoRA weights"}
        return {"units": layer.units, "features": shape[-1], "bias": layer.units if layer.use_bias else 0}
    if kind in ("Conv2D", "ShardedConv2D"):
        if layer.groups > 1 or getattr(layer, "lora_rank", None):
            return {"note": "it has groups, or LoRA weights"}
        return {"units": layer.filters, "bias": layer.filters if layer.use_bias else 0}
    return {"note": f"{kind} can't be split" if layer.weights else ""}


# Operations forward of Keras's own layers for one example, by formula, from (layer, inputs, outputs).


def _elements(tensor: Any) -> int:
    """How many elements one example has in a symbolic tensor."""
    return math.prod(tensor.shape[1:])


def _kernel(layer: Any, _: Sequence, outputs: Sequence) -> int:
    positions = _elements(outputs[0]) // _channels(layer, outputs[0])
    # [*window, channels of a group, filters]
    return 2 * positions * math.prod(layer.kernel.shape) + _bias(layer, outputs)


def _transposed(layer: Any, inputs: Sequence, outputs: Sequence) -> int:
    positions = _elements(inputs[0]) // _channels(layer, inputs[0])
    return 2 * positions * math.prod(layer.kernel.shape) + _bias(layer, outputs)


def _depthwise(layer: Any, _: Sequence, outputs: Sequence) -> int:
    return 2 * math.prod(layer.kernel_size) * _elements(outputs[0]) + _bias(layer, outputs)


def _separable(layer: Any, _: Sequence, outputs: Sequence) -> int:
    positions = _elements(outputs[0]) // _channels(layer, outputs[0])
    weights = math.prod(layer.depthwise_kernel.shape) + math.prod(layer.pointwise_kernel.shape)
    return 2 * positions * weights + _bias(layer, outputs)


def _dense(layer: Any, inputs: Sequence, outputs: Sequence) -> int:
    return 2 * _elements(inputs[0]) * layer.units + _bias(layer, outputs)


def _recurrent(gates: int) -> Callable:
    def count(layer: Any, inputs: Sequence, _: Sequence) -> int:
        steps, features = inputs[0].shape[1:]
        return 2 * steps * gates * layer.units * (features + layer.units)

    return count


def _pooled(layer: Any, _: Sequence, outputs: Sequence) -> int:
    return math.prod(layer.pool_size) * _elements(outputs[0])


def _per_element(operations: int) -> Callable:
    return lambda _, inputs, __: operations * sum(map(_elements, inputs))


def _bias(layer: Any, outputs: Sequence) -> int:
    return _elements(outputs[0]) if layer.use_bias else 0


def _channels(layer: Any, tensor: Any) -> int:
    return tensor.shape[-1] if layer.data_format == "channels_last" else tensor.shape[1]


_FORWARD: dict[str, Callable] = {
    **dict.fromkeys(("Dense", "ShardedDense"), _dense),
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D", "ShardedConv2D"), _kernel),
    **dict.fromkeys(("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"), _transposed),
    **dict.fromkeys(("DepthwiseConv1D", "DepthwiseConv2D"), _depthwise),
    **dict.fromkeys(("SeparableConv1D", "SeparableConv2D"), _separable),
    **{name: _recurrent(gates) for name, gates in (("SimpleRNN", 1), ("GRU", 3), ("LSTM", 4))},
    **{f"{kind}Pooling{n}D": _pooled for kind in ("Max", "Average") for n in (1, 2, 3)},
    **{f"Global{kind}Pooling{n}D": _per_element(1) for kind in ("Max", "Average") for n in (1, 2, 3)},
    **dict.fromkeys(
        ("Activation", "ReLU", "LeakyReLU", "PReLU", "ELU", "Add", "Subtract", "Multiply"), _per_element(1)
    ),
    **dict.fromkeys(("Average", "Maximum", "Minimum"), _per_element(1)),
    **dict.fromkeys(("Dropout", "SpatialDropout1D", "SpatialDropout2D", "GaussianNoise"), _per_element(2)),
    **dict.fromkeys(("Rescaling", "Normalization"), _per_element(2)),
    "Softmax": _per_element(5),  # Largest, difference, exponential, sum, quotient.
    # Mean, difference, square, mean, scaled, shifted; the same of a group's or an example's elements.
    **dict.fromkeys(("BatchNormalization", "LayerNormalization", "GroupNormalization"), _per_element(8)),
    **dict.fromkeys(("Flatten", "Reshape", "Permute", "RepeatVector", "Concatenate", "Identity"), _per_element(0)),
    **dict.fromkeys(("ZeroPadding1D", "ZeroPadding2D", "Cropping2D", "UpSampling2D", "Embedding"), _per_element(0)),
}
