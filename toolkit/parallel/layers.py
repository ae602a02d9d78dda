"""`Dense` and `Conv2D` whose weights are split over the replicas of the strategy that they are built under.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv 1404.5997: layers with many weights
and little arithmetic are split over devices, which then exchange activations instead of gradients.

They are built as the plain layers are, with the same initial values for the same seed at any number of replicas, and
are saved and loaded whole. On one replica they are the plain layers.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.parallel import parts, rows
from toolkit.strategies import collectives
from toolkit.strategies.collectives import replicas
from toolkit.strategies.exchange import DTYPES
from toolkit.strategies.gradients import adapt_optimizers
from toolkit.strategies.sharded import ShardedVariable

__all__ = ["ELEMENTWISE", "ShardedConv2D", "ShardedDense"]

# Activations that can be computed of a part of the features.
ELEMENTWISE = frozenset(
    """linear relu relu6 leaky_relu elu selu gelu silu sigmoid hard_sigmoid tanh softplus softsign exponential
    mish""".split()  # noqa: SIM905 - A list of words.
)


class _Split:
    """What both have in common: weights that are parts, and how activations travel."""

    def _settle(self, *, scheme: str, exchange_dtype: str | None) -> None:
        if scheme not in rows.SCHEMES:
            _refuse(f"scheme={scheme!r}", "there is no such scheme", "Choose one of " + ", ".join(rows.SCHEMES))
        if exchange_dtype not in (None, *DTYPES):
            _refuse(f"exchange_dtype={exchange_dtype!r}", "numbers can't travel as that", "Choose " + ", ".join(DTYPES))
        self.scheme = scheme
        self.exchange_dtype = exchange_dtype

    def _cut_at(self, name: str) -> int | None:
        """The axis along which a weight is split, None where each replica has all of it."""
        raise NotImplementedError

    def add_weight(self, *args: Any, **kwargs: Any) -> Any:
        axis = self._cut_at(kwargs.get("name", "")) if replicas() > 1 else None
        if axis is None:
            return super().add_weight(*args, **kwargs)  # type: ignore[misc]
        self._check(kwargs["shape"][axis])
        adapt_optimizers()
        with keras.name_scope(self.name, caller=self):  # type: ignore[attr-defined]
            variable = ShardedVariable(
                kwargs["initializer"],
                kwargs["shape"],
                axis=axis,
                dtype=self.variable_dtype,  # type: ignore[attr-defined]
                name=kwargs["name"],
            )
        regularizer, constraint = kwargs.get("regularizer"), kwargs.get("constraint")
        variable.regularizer = regularizer and parts.Regularizer(regularizer)
        variable.constraint = constraint and parts.Constraint(constraint)
        self._track_variable(variable)  # type: ignore[attr-defined]
        return variable

    def _check(self, size: int) -> None:
        count = replicas()
        if count > size:
            _refuse(
                f"layer {self.name} is split over {count} replicas",  # type: ignore[attr-defined]
                f"it has {size} to split",
                "Leave it replicated, or use fewer replicas",
            )
        if getattr(self, "lora_rank", None) or getattr(self, "quantization_mode", None):
            _refuse(
                f"layer {self.name} is split over {count} replicas",  # type: ignore[attr-defined]
                "it is quantized, or has LoRA weights",
                "Leave it replicated",
            )

    @property
    def _travels(self) -> tf.DType | None:
        return None if self.exchange_dtype in (None, "float32") else tf.as_dtype(self.exchange_dtype)

    def _whole(self, variable: Any) -> tf.Tensor:
        """A weight outside of steps, of which the parts are gathered, as layers compute with it."""
        return self._part(variable.whole() if isinstance(variable, ShardedVariable) else variable)

    def _part(self, variable: Any) -> tf.Tensor:
        """What this replica has of a weight, as layers compute with it."""
        return tf.cast(keras.ops.convert_to_tensor(variable), self.compute_dtype)  # type: ignore[attr-defined]


@keras.saving.register_keras_serializable("toolkit")
class ShardedDense(_Split, keras.layers.Dense):
    """A `keras.layers.Dense` whose kernel is split over the replicas.

    Split by outputs, each replica has all rows of some columns of the kernel: everybody's inputs are
    gathered, and outputs go back to whose examples they are. Split by inputs, each has some rows of
    it: everybody's inputs of those go there, and the sums come back. With `keep_split` a layer that is
    split by outputs hands its part of the features on as it is, to elementwise layers and then to one
    that is split by inputs, as Shoeybi et al., arXiv 1909.08053, section 3, pair them.

    Bytes that a replica receives, forward and again backward, for n examples on each of R replicas:
    by outputs (R-1) n inputs + (R-1)/R n units; by inputs (R-1)/R n inputs + (R-1) n units; as a
    pair (R-1) n (inputs of the first + units of the second); times the bytes of a number.

    Args:
        units: As for `Dense`.
        split: "outputs" or "inputs".
        keep_split: Leave the output split by features; for split="outputs".
        scheme: "a", "b" or "c" of arXiv 1404.5997, section 4, for split="outputs"; see
            `toolkit.parallel.rows.computed`. All give the same numbers: "a" brings everybody's
            examples at once, "b" and "c" in turns, with 1/R of the memory and 1.5 times the bytes.
        exchange_dtype: "float16" or "bfloat16" for activations and their gradients to travel so;
            None for as they are.
        args: As for `Dense`.
        kwargs: As for `Dense`.

    Input and output have the shapes and dtypes of `Dense`'s: [n, ..., inputs] to [n, ..., units].

    Raises:
        StrategyError: An argument is none that it can be; the replicas outnumber the units, or the
            inputs, when it is built.
    """

    def __init__(
        self,
        units: int,
        *args: Any,
        split: str = "outputs",
        keep_split: bool = False,
        scheme: str = "a",
        exchange_dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, *args, **kwargs)
        if split not in ("outputs", "inputs"):
            _refuse(f"split={split!r}", "there is no such split", "Choose outputs or inputs")
        if keep_split and (split != "outputs" or keras.activations.serialize(self.activation) not in ELEMENTWISE):
            _refuse(
                f"layer {self.name} is to keep its output split",
                f"it is split by {split}, with activation {keras.activations.serialize(self.activation)}",
                "Split it by outputs, with an elementwise activation such as relu",
            )
        self._settle(scheme=scheme, exchange_dtype=exchange_dtype)
        self.split = split
        self.keep_split = keep_split

    def _cut_at(self, name: str) -> int | None:
        if self.split == "inputs":
            return 0 if name == "kernel" else None
        return {"kernel": 1, "bias": 0}.get(name)

    def build(self, input_shape: Sequence[int | None]) -> None:
        super().build(input_shape)
        if self.split == "inputs":
            self.input_spec = keras.layers.InputSpec(min_ndim=2)  # It may be split already.

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if not isinstance(self._kernel, ShardedVariable):
            return super().call(inputs, training=training)
        if collectives.place()[1] == 1:
            y = keras.ops.matmul(inputs, self._whole(self._kernel))
            return self._finished(y, None if self.bias is None else self._whole(self.bias))
        x = tf.convert_to_tensor(inputs)
        # Everything but the features is rows.
        flat = tf.reshape(x, [-1, x.shape[-1]])
        y = self._by_outputs(flat) if self.split == "outputs" else self._by_inputs(flat)
        if len(x.shape) == 2:
            return y
        middle = tf.shape(x)[1:-1]
        whole = tf.reshape(y, tf.concat([[-1], middle, [y.shape[-1]]], 0))
        whole.set_shape([None, *x.shape[1:-1], y.shape[-1]])
        return whole

    def _by_outputs(self, x: tf.Tensor) -> tf.Tensor:
        if x.shape[-1] != self._kernel.shape[0]:
            _refuse(
                f"layer {self.name} is split by outputs",
                f"its input is split already: {x.shape[-1]} of {self._kernel.shape[0]} features",
                "Have it split by inputs, or the layer before not keep its output split",
            )
        kernel = self._part(self._kernel)
        counted = rows.rows_of(x)
        y = rows.computed(x, kernel, tf.matmul, counted, scheme=self.scheme, dtype=self._travels)
        bias = None if self.bias is None else self._part(self.bias)
        if self.keep_split:
            y = self._finished(y, bias)
            number, count = collectives.place()
            size = self._kernel.part_shape[1]
            real = min(max(self.units - number * size, 0), size)
            # Beyond the last unit nothing may reach the next layer: an activation of 0 need not be 0.
            return y if size * count == self.units else y * tf.cast(tf.range(size) < real, y.dtype)
        y = y if bias is None else y + bias
        return self._finished(rows.columns_to_rows(y, counted, self.units, dtype=self._travels), None)

    def _by_inputs(self, x: tf.Tensor) -> tf.Tensor:
        size = self._kernel.part_shape[0]
        if x.shape[-1] == size:
            counted = rows.last()
        else:
            counted = rows.rows_of(x)
            x = rows.rows_to_columns(x, counted, size, dtype=self._travels)
        y = tf.matmul(x, self._part(self._kernel))
        bias = None if self.bias is None else self._part(self.bias)
        return self._finished(rows.partial_to_rows(y, counted, dtype=self._travels), bias)

    def _finished(self, y: tf.Tensor, bias: tf.Tensor | None) -> tf.Tensor:
        y = y if bias is None else y + bias
        return y if self.activation is None else self.activation(y)

    def get_config(self) -> dict:
        mine = {name: getattr(self, name) for name in ("split", "keep_split", "scheme", "exchange_dtype")}
        return {**super().get_config(), **mine}


@keras.saving.register_keras_serializable("toolkit")
class ShardedConv2D(_Split, keras.layers.Conv2D):
    """A `keras.layers.Conv2D` whose filters are split over the replicas.

    Everybody's pictures are gathered, each replica computes some channels of all of them, and the
    channels go back to whose pictures they are. That moves many more bytes than the gradients of a
    convolution's few weights would: it is here to be compared, and for networks with little data
    and many filters.

    Args:
        filters: As for `Conv2D`.
        scheme: As for `ShardedDense`.
        exchange_dtype: As for `ShardedDense`.
        args: As for `Conv2D`.
        kwargs: As for `Conv2D`; `groups` can only be 1 on several replicas.

    Raises:
        StrategyError: An argument is none that it can be; the replicas outnumber the filters, or there
            are groups, when it is built.
    """

    def __init__(
        self, filters: int, *args: Any, scheme: str = "a", exchange_dtype: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(filters, *args, **kwargs)
        self._settle(scheme=scheme, exchange_dtype=exchange_dtype)

    def _cut_at(self, name: str) -> int | None:
        return {"kernel": 3, "bias": 0}.get(name)

    def _check(self, size: int) -> None:
        super()._check(size)
        if self.groups > 1:
            _refuse(
                f"layer {self.name} is split over {replicas()} replicas",
                f"it has {self.groups} groups, each with channels of its own",
                "Leave it replicated",
            )

    def call(self, inputs: Any) -> Any:
        if not isinstance(self._kernel, ShardedVariable):
            return super().call(inputs)
        bias = self.bias
        if collectives.place()[1] == 1:
            y = self.convolution_op(inputs, self._whole(self._kernel))
            return self._finished(y, None if bias is None else self._whole(bias))
        x = tf.convert_to_tensor(inputs)
        counted = rows.rows_of(x)
        kernel = self._part(self._kernel)
        y = rows.computed(x, kernel, self.convolution_op, counted, scheme=self.scheme, dtype=self._travels)
        y = y if bias is None else y + self._shaped(self._part(bias))
        axis = self._channels
        return self._finished(rows.columns_to_rows(y, counted, self.filters, axis=axis, dtype=self._travels), None)

    @property
    def _channels(self) -> int:
        return 3 if self.data_format == "channels_last" else 1

    def _shaped(self, bias: tf.Tensor) -> tf.Tensor:
        return bias if self._channels == 3 else tf.reshape(bias, [1, -1, 1, 1])

    def _finished(self, y: tf.Tensor, bias: tf.Tensor | None) -> tf.Tensor:
        y = y if bias is None else y + self._shaped(bias)
        return y if self.activation is None else self.activation(y)

    def get_config(self) -> dict:
        return {**super().get_config(), "scheme": self.scheme, "exchange_dtype": self.exchange_dtype}


def _refuse(asked: str, found: str, remedy: str) -> None:
    raise StrategyError(asked=asked, found=found, remedy=remedy)
