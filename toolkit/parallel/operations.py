"""Operations forward of Keras's own layers, for one example, by formula.

A multiplication and an addition are two. `tests/parallel/test_cost.py` holds them against TensorFlow's profiler.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["forward", "numbers"]


def forward(layer: Any, inputs: Sequence, outputs: Sequence) -> int | None:
    """Returns them; None for a layer that isn't Keras's or this toolkit's own, or whose formula isn't here.

    Args:
        layer: A built `keras.layers.Layer`.
        inputs: Its symbolic inputs.
        outputs: Its symbolic outputs.
    """
    module = type(layer).__module__
    count = _FORWARD.get(type(layer).__name__) if module.startswith(("keras.", "toolkit.parallel.")) else None
    return None if count is None else int(count(layer, inputs, outputs))


def numbers(tensor: Any) -> int:
    """Returns how many numbers one example has in a symbolic tensor."""
    return math.prod(tensor.shape[1:])


def _kernel(layer: Any, _: Sequence, outputs: Sequence) -> int:
    positions = math.prod(outputs[0].shape[1:]) // _channels(layer, outputs[0])
    # [*window, channels of a group, filters]
    return 2 * positions * math.prod(layer.kernel.shape) + _bias(layer, outputs)


def _transposed(layer: Any, inputs: Sequence, outputs: Sequence) -> int:
    positions = math.prod(inputs[0].shape[1:]) // _channels(layer, inputs[0])
    return 2 * positions * math.prod(layer.kernel.shape) + _bias(layer, outputs)


def _depthwise(layer: Any, _: Sequence, outputs: Sequence) -> int:
    return 2 * math.prod(layer.kernel_size) * numbers(outputs[0]) + _bias(layer, outputs)


def _separable(layer: Any, _: Sequence, outputs: Sequence) -> int:
    positions = numbers(outputs[0]) // _channels(layer, outputs[0])
    weights = math.prod(layer.depthwise_kernel.shape) + math.prod(layer.pointwise_kernel.shape)
    return 2 * positions * weights + _bias(layer, outputs)


def _dense(layer: Any, inputs: Sequence, outputs: Sequence) -> int:
    return 2 * numbers(inputs[0]) * layer.units + _bias(layer, outputs)


def _recurrent(gates: int) -> Callable:
    def count(layer: Any, inputs: Sequence, _: Sequence) -> int:
        steps, features = inputs[0].shape[1:]
        return 2 * steps * gates * layer.units * (features + layer.units)

    return count


def _pooled(layer: Any, _: Sequence, outputs: Sequence) -> int:
    return math.prod(layer.pool_size) * numbers(outputs[0])


def _per_number(operations: int) -> Callable:
    return lambda _, inputs, __: operations * sum(map(numbers, inputs))


def _bias(layer: Any, outputs: Sequence) -> int:
    return numbers(outputs[0]) if layer.use_bias else 0


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
    **{f"Global{kind}Pooling{n}D": _per_number(1) for kind in ("Max", "Average") for n in (1, 2, 3)},
    **dict.fromkeys(("Activation", "ReLU", "LeakyReLU", "PReLU", "ELU", "Add", "Subtract", "Multiply"), _per_number(1)),
    **dict.fromkeys(("Average", "Maximum", "Minimum"), _per_number(1)),
    **dict.fromkeys(("Dropout", "SpatialDropout1D", "SpatialDropout2D", "GaussianNoise"), _per_number(2)),
    **dict.fromkeys(("Rescaling", "Normalization"), _per_number(2)),
    **dict.fromkeys(("Softmax",), _per_number(5)),  # Largest, difference, exponential, sum, quotient.
    # Mean, difference, square, mean, scaled, shifted; the same of a group's or an example's numbers.
    **dict.fromkeys(("BatchNormalization", "LayerNormalization", "GroupNormalization"), _per_number(8)),
    **dict.fromkeys(("Flatten", "Reshape", "Permute", "RepeatVector", "Concatenate", "Identity"), _per_number(0)),
    **dict.fromkeys(("ZeroPadding1D", "ZeroPadding2D", "Cropping2D", "UpSampling2D", "Embedding"), _per_number(0)),
}
