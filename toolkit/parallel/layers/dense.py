"""`Dense`, `EinsumDense` and `Conv2D` whose weights are sharded over the replicas of a group.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv 1404.5997: layers with many weights
and little arithmetic are sharded over devices, which then exchange activations instead of gradients.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.parallel.layers.base import Sharded, in_a_step, refuse
from toolkit.strategies.step.sharded_variable import ReplicaShardedVariable


@keras.saving.register_keras_serializable("toolkit")
class ShardedDense(Sharded, keras.layers.Dense):
    """A `keras.layers.Dense` whose kernel is sharded over the replicas.

    Elements that a replica receives, forward and again backward, for n examples on each of R replicas: by outputs
    (R-1) n inputs + (R-1)/R n units; by inputs (R-1)/R n inputs + (R-1) n units; as a pair (R-1) n (inputs of the
    first + units of the second).

    Args:
        units: As for `Dense`.
        split: "outputs" or "inputs".
        keep_split: Leave the output sharded by features, for elementwise layers and then for one that is split by
            inputs; for split="outputs".
        exchange_dtype: "float16" or "bfloat16", in which activations and their gradients are exchanged; None for the
            dtype that they have.
        args: As for `Dense`.
        kwargs: As for `Dense`.

    Input and output have the shapes and dtypes of `Dense`'s: [n, ..., inputs] to [n, ..., units].

    Raises:
        StrategyError: An argument has an unknown value; or, when the layer is built, the replicas outnumber the units,
            or the inputs.
    """

    settings = ("split", "keep_split", "exchange_dtype")

    def __init__(
        self,
        units: int,
        *args: Any,
        split: str = "outputs",
        keep_split: bool = False,
        exchange_dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, *args, **kwargs)
        self._set_split(split, keep_split=keep_split)
        self._set_exchange_dtype(exchange_dtype)

    def _shard_axis(self, name: str) -> int | None:
        if self.split == "inputs":
            return 0 if name == "kernel" else None
        return {"kernel": 1, "bias": 0}.get(name)

    def build(self, input_shape: Sequence[int | None]) -> None:
        super().build(input_shape)
        if self.split == "inputs":
            self.input_spec = keras.layers.InputSpec(min_ndim=2)  # Its last axis may already be a shard.

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if not isinstance(self._kernel, ReplicaShardedVariable):
            return super().call(inputs, training=training)
        if not in_a_step():
            return self._call_outside_steps(inputs, keras.ops.matmul)
        x = tf.convert_to_tensor(inputs)
        if self.split == "inputs":
            return self._call_by_inputs(x, keras.ops.matmul, self._kernel.shard_shape[0])
        _check_whole(self, x.shape[-1], self._kernel.shape[0])
        return self._call_by_outputs(x, keras.ops.matmul, self.units)


@keras.saving.register_keras_serializable("toolkit")
class ShardedEinsumDense(Sharded, keras.layers.EinsumDense):
    """A `keras.layers.EinsumDense` whose kernel is sharded over the replicas, along one axis of the equation.

    Split by outputs, that is the first of the kernel's axes which the output has and the input hasn't, such as the
    heads of "abc,cde->abde"; split by inputs, the first that the input has and the output hasn't, such as the heads of
    "abcd,cde->abe". The first axis of input and output has the examples.

    Args:
        equation: As for `EinsumDense`.
        output_shape: As for `EinsumDense`.
        split: "outputs" or "inputs".
        keep_split: As for `ShardedDense`.
        exchange_dtype: As for `ShardedDense`.
        args: As for `EinsumDense`.
        kwargs: As for `EinsumDense`.

    Raises:
        StrategyError: An argument has an unknown value, or the equation no axis for such a split; or, when the layer
            is built, the replicas outnumber what is to be split.
    """

    settings = ("split", "keep_split", "exchange_dtype")

    def __init__(
        self,
        equation: str,
        output_shape: Any,
        *args: Any,
        split: str = "outputs",
        keep_split: bool = False,
        exchange_dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(equation, output_shape, *args, **kwargs)
        self._set_split(split, keep_split=keep_split)
        self._set_exchange_dtype(exchange_dtype)
        self._inputs, self._weights, self._outputs = equation_parts(equation)
        letter = split_letter(equation, self.split)
        if letter is None:
            refuse(
                f"layer {self.name}, {equation!r}, is split by {self.split}",
                "its kernel has no axis to split that way, or its first axis isn't the batch",
                "Leave it replicated, or split it the other way",
            )
        self._letter = str(letter)

    def _shard_axis(self, name: str) -> int | None:
        if name == "kernel":
            return self._weights.index(self._letter)
        if self.split == "inputs" or self._letter not in self.bias_axes:
            return None
        # The first output axis along which the bias varies, and all after it.
        first = min(self._outputs.index(letter) for letter in self.bias_axes)
        return self._outputs[first:].index(self._letter)

    def build(self, input_shape: Sequence[int | None]) -> None:
        super().build(input_shape)
        if self.split == "inputs":
            self.input_spec = keras.layers.InputSpec(ndim=len(input_shape))

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if not isinstance(self._kernel, ReplicaShardedVariable):
            return super().call(inputs, training=training)
        if not in_a_step():
            return self._call_outside_steps(inputs, self._einsum)
        x = tf.convert_to_tensor(inputs)
        size = self._kernel.shape[self._weights.index(self._letter)]
        if self.split == "inputs":
            shard = self._kernel.shard_shape[self._kernel.laid_out.axis or 0]
            return self._call_by_inputs(x, self._einsum, shard, _place(self._inputs, self._letter))
        for letter in self._weights:
            if letter in self._inputs:
                whole = self._kernel.shape[self._weights.index(letter)]
                _check_whole(self, x.shape[_place(self._inputs, letter)], whole)
        return self._call_by_outputs(x, self._einsum, size, _place(self._outputs, self._letter))

    def _einsum(self, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        return keras.ops.einsum(self.equation, x, kernel)


@keras.saving.register_keras_serializable("toolkit")
class ShardedConv2D(Sharded, keras.layers.Conv2D):
    """A `keras.layers.Conv2D` whose filters are sharded over the replicas.

    Everybody's pictures are gathered, each replica computes some channels of all of them, and the channels go back to
    the replica whose pictures they are. That moves many more bytes than the gradients of a convolution's few weights
    would: it is here to be compared, and for networks with little data and many filters.

    Args:
        filters: As for `Conv2D`.
        exchange_dtype: As for `ShardedDense`.
        args: As for `Conv2D`.
        kwargs: As for `Conv2D`; `groups` can only be 1 on several replicas.

    Raises:
        StrategyError: An argument has an unknown value; or, when the layer is built, the replicas outnumber the
            filters, or there are groups.
    """

    def __init__(self, filters: int, *args: Any, exchange_dtype: str | None = None, **kwargs: Any) -> None:
        super().__init__(filters, *args, **kwargs)
        self._set_exchange_dtype(exchange_dtype)

    def _shard_axis(self, name: str) -> int | None:
        return {"kernel": 3, "bias": 0}.get(name)

    def call(self, inputs: Any) -> Any:
        if not isinstance(self._kernel, ReplicaShardedVariable):
            return super().call(inputs)
        if not in_a_step():
            return self._call_outside_steps(inputs, self.convolution_op)
        return self._call_by_outputs(tf.convert_to_tensor(inputs), self.convolution_op, self.filters, self._channels)

    @property
    def _channels(self) -> int:
        return 3 if self.data_format == "channels_last" else 1

    def _aligned(self, bias: tf.Tensor) -> tf.Tensor:
        return bias if self._channels == 3 else tf.reshape(bias, [1, -1, 1, 1])


def split_letter(equation: str, split: str) -> str | None:
    """Returns the axis along which an `EinsumDense` is split by "outputs" or "inputs"; None if it can't be."""
    inputs, weights, outputs = equation_parts(equation)
    if inputs[0] != outputs[0] or inputs[0] in weights:
        return None
    there, other = (outputs, inputs) if split == "outputs" else (inputs, outputs)
    return next((letter for letter in weights if letter in there and letter not in other), None)


def equation_parts(equation: str) -> tuple[str, str, str]:
    """Returns the letters of an equation's inputs, kernel and outputs."""
    inputs, rest = equation.replace(" ", "").split(",")
    weights, outputs = rest.split("->")
    return inputs, weights, outputs


def _place(letters: str, letter: str) -> int:
    """Returns a tensor's axis by its letter in an equation; counted from the end after an ellipsis."""
    return letters.index(letter) - (len(letters) if "..." in letters[: letters.index(letter)] else 0)


def _check_whole(layer: Any, found: int | None, size: int) -> None:
    if found != size:
        refuse(
            f"layer {layer.name} is split by outputs",
            f"its input is split already: {found} of {size} features",
            "Split it by inputs, or leave keep_split out in the layer before",
        )
