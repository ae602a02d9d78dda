"""Counts the operations of a layer's calls in TensorFlow's graph of them.

What the graph doesn't show, such as loops over steps and what Keras compiles, has a formula; or it isn't known.
"""

import math
from collections.abc import Callable, Container, Sequence
from typing import Any

from toolkit.parallel.plan.trace import Call, size_of

__all__ = ["bytes_in_loops", "count"]

# TensorFlow's operations by type. Types that aren't listed here count one operation for each element of the result.

_MOVES = frozenset(
    """Assert BatchToSpaceND BroadcastTo Cast Concat ConcatV2 Const ExpandDims Fill Gather GatherNd GatherV2 Identity
    IdentityN MirrorPad NoOp OnesLike Pack Pad PadV2 Placeholder PreventGradient Range ReadVariableOp Reshape
    ResourceGather ReverseV2 Roll Shape ShapeN Size Rank Slice SpaceToBatchND Split SplitV Squeeze StopGradient
    StridedSlice Tile Transpose Unpack ZerosLike ResizeNearestNeighbor SpaceToDepth DepthToSpace""".split()  # noqa: SIM905
)
_HIDDEN = frozenset(
    """While StatelessWhile If StatelessIf Case StatelessCase PyFunc PyFuncStateless EagerPyFunc PartitionedCall
    StatefulPartitionedCall XlaLaunch MapDefun""".split()  # noqa: SIM905
)
_REDUCTIONS = frozenset(
    "Sum Mean Max Min Prod All Any ArgMax ArgMin EuclideanNorm L2Loss Cumsum Cumprod TopKV2".split()  # noqa: SIM905
)
_NORMALIZATIONS = {"FusedBatchNormV3": 8, "Softmax": 5, "LogSoftmax": 5}  # Operations per element.


def count(layer: Any, calls: Sequence[Call], trained: Container[int]) -> tuple[int, int, int] | None:
    """Returns operations forward and backward, and multiplications forward, for all examples; None if unknown.

    Args:
        layer: The layer that made them.
        calls: Its calls.
        trained: The ids of tensors that something trained was before.
    """
    if formula := _formula(layer):
        forward = sum(formula(layer, call.inputs, call.outputs) for call in calls)
        passes = any(id(tensor) in trained for call in calls for tensor in call.inputs)
        return forward, forward * (bool(layer.trainable_variables) + passes), forward // 2
    forward = backward = multiplied = 0
    for operation in (each for call in calls for each in call.operations):
        product = _product(operation)
        found = product if product is not None else _simple(operation)
        if found is None:
            return None
        needed = sum(id(tensor) in trained for tensor in operation.inputs)
        forward += found
        backward += found * (needed if product is not None else min(needed, 1))
        multiplied += (product or 0) // 2
    return forward, backward, multiplied


def _product(operation: Any) -> int | None:
    """Returns the operations of a matrix product or a convolution; None for anything else."""
    product = _PRODUCTS.get(operation.type)
    return None if product is None else 2 * product(operation, *operation.inputs)


def _contracted(operation: Any, *factors: Any) -> int:
    parts = operation.get_attr("equation").decode().split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for part, factor in zip(parts, factors, strict=True):
        before, _, after = part.partition("...")
        shape = factor.shape.as_list()
        middle = [f"-{n}" for n in range(len(shape) - len(before) - len(after), 0, -1)]
        sizes.update(zip([*before, *middle, *after], shape, strict=True))
    return math.prod(sizes.values())


def _result(operation: Any) -> int:
    return size_of(operation.outputs[0]) or 0


# Multiplications, from an operation and its inputs.
_PRODUCTS: dict[str, Callable] = {
    "MatMul": lambda op, x, _: _result(op) * x.shape[0 if op.get_attr("transpose_a") else 1],
    **dict.fromkeys(
        ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"),
        lambda op, x, _: _result(op) * x.shape[-2 if op.get_attr("adj_x") else -1],
    ),
    **dict.fromkeys(("Einsum", "XlaEinsum"), _contracted),
    **dict.fromkeys(("Conv2D", "Conv3D"), lambda op, _, kernel: _result(op) * math.prod(kernel.shape[:-1])),
    "DepthwiseConv2dNative": lambda op, _, kernel: _result(op) * math.prod(kernel.shape[:2]),
    # Transposed convolutions, forward.
    **dict.fromkeys(
        ("Conv2DBackpropInput", "Conv3DBackpropInputV2"),
        lambda _, __, kernel, x: (size_of(x) or 0) * math.prod(kernel.shape[:-1]),
    ),
}


def _simple(operation: Any) -> int | None:
    """Returns the operations of anything but a product; None if sizes aren't known."""
    kind = operation.type
    if kind in _HIDDEN:
        return None
    if kind in _MOVES or not any(tensor.dtype.is_floating for tensor in operation.outputs):
        return 0
    size = size_of(operation.outputs[0])
    if kind in _REDUCTIONS:
        return size_of(operation.inputs[0])
    if size is None:
        return None
    if kind in ("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D"):
        return size * math.prod(operation.get_attr("ksize"))
    return size * _NORMALIZATIONS.get(kind, 1)


# Formulas for what the graph doesn't show: loops over steps, and compiled or dilated convolutions. Each formula
# takes (layer, inputs, outputs) and counts for all examples.


def _convolved(layer: Any, _: Sequence, outputs: Sequence) -> int:
    channels = outputs[0].shape[-1 if layer.data_format == "channels_last" else 1]
    size = size_of(outputs[0]) or 0
    # The kernel is [*window, channels of a group, filters].
    return 2 * size // channels * math.prod(layer.kernel.shape) + (size if layer.use_bias else 0)


def _recurrent(gates: int) -> Callable:
    def counted(layer: Any, inputs: Sequence, _: Sequence) -> int:
        examples, steps, features = inputs[0].shape
        return 2 * examples * steps * gates * layer.units * (features + layer.units)

    return counted


_FORMULAS: dict[str, Callable] = {
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D"), _convolved),
    **{name: _recurrent(gates) for name, gates in (("SimpleRNN", 1), ("GRU", 3), ("LSTM", 4))},
}


# What a loop keeps of each step for its gradients, in elements per unit, measured (`benchmarks.predictions`).
_KEPT_OF_STEPS = {"SimpleRNN": 1, "GRU": 6, "LSTM": 7}


def bytes_in_loops(layer: Any, call: Call) -> int:
    """Returns the bytes that a recurrent layer's loop over steps keeps from the forward to the backward pass."""
    return sum(
        _KEPT_OF_STEPS[each.__class__.__name__] * math.prod(call.inputs[0].shape[:2]) * each.units * 4
        for each in _ways(layer)
        if each.__class__.__name__ in _KEPT_OF_STEPS
    )


def _ways(layer: Any) -> list:
    """Returns a Keras layer, or the two of a bidirectional one; None for a user's class."""
    kind = type(layer)
    if not kind.__module__.startswith("keras."):  # A user's class of that name may compute anything.
        return []
    return [layer.forward_layer, layer.backward_layer] if kind.__name__ == "Bidirectional" else [layer]


def _formula(layer: Any) -> Callable | None:
    ways = [(each, _FORMULAS.get(type(each).__name__)) for each in _ways(layer)]
    if not ways or any(formula is None for _, formula in ways):
        return None
    return lambda _, inputs, outputs: sum(formula(each, inputs, outputs) for each, formula in ways if formula)
