"""`Dense` and `Conv2D` whose weights are sharded over the replicas of the strategy under which they are built.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv 1404.5997: layers with many weights
and little arithmetic are sharded over devices, which then exchange activations instead of gradients.

They are built as the plain layers are, with the same initial values for the same seed at any number of replicas, and
are saved and loaded whole. On one replica they are the plain layers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.parallel import activations
from toolkit.parallel.regularizers import ShardedConstraint, ShardedRegularizer
from toolkit.strategies import collectives
from toolkit.strategies.collectives import replicas
from toolkit.strategies.exchange import DTYPES
from toolkit.strategies.exporting import adapt_exports
from toolkit.strategies.gradients import adapt_optimizers
from toolkit.strategies.replica_shards import ReplicaShardedVariable

__all__ = ["ELEMENTWISE", "ShardedConv2D", "ShardedDense"]

# Activation functions that can be computed from a shard of the features.
ELEMENTWISE = frozenset(
    """linear relu relu6 leaky_relu elu selu gelu silu sigmoid hard_sigmoid tanh softplus softsign exponential
    mish""".split()  # noqa: SIM905 - A list of words.
)


class _Sharded:
    """What both layers have in common: sharded weights, and the dtype in which activations are exchanged."""

    # A mixin before a Keras layer, from which the rest comes.
    name: str
    bias: Any
    activation: Callable | None
    compute_dtype: str
    variable_dtype: str
    _kernel: Any
    _track_variable: Callable

    def _set_exchange_dtype(self, exchange_dtype: str | None) -> None:
        if exchange_dtype not in (None, *DTYPES):
            remedy = "Choose " + ", ".join(DTYPES)
            _refuse(f"exchange_dtype={exchange_dtype!r}", "activations can't be exchanged in it", remedy)
        self.exchange_dtype = exchange_dtype

    def _shard_axis(self, name: str) -> int | None:
        """Returns the axis along which a weight is sharded; None where each replica has all of it."""
        raise NotImplementedError

    def add_weight(self, *args: Any, **kwargs: Any) -> Any:
        axis = self._shard_axis(kwargs.get("name", "")) if replicas() > 1 else None
        if axis is None:
            return super().add_weight(*args, **kwargs)  # type: ignore[misc]
        self._check_size(kwargs["shape"][axis])
        adapt_optimizers()
        adapt_exports()
        with keras.name_scope(self.name, caller=self):
            variable = ReplicaShardedVariable(
                kwargs["initializer"], kwargs["shape"], axis=axis, dtype=self.variable_dtype, name=kwargs["name"]
            )
        regularizer, constraint = kwargs.get("regularizer"), kwargs.get("constraint")
        variable.regularizer = regularizer and ShardedRegularizer(regularizer)
        variable.constraint = constraint and ShardedConstraint(constraint)
        self._track_variable(variable)
        return variable

    def _check_size(self, size: int) -> None:
        asked = f"layer {self.name} is split over {replicas()} replicas"
        if replicas() > size:
            _refuse(asked, f"it has {size} to split", "Leave it replicated, or use fewer replicas")
        if getattr(self, "lora_rank", None) or getattr(self, "quantization_mode", None):
            _refuse(asked, "it is quantized, or has LoRA weights", "Leave it replicated")
        if (groups := getattr(self, "groups", 1)) > 1:
            _refuse(asked, f"it has {groups} groups, each with channels of its own", "Leave it replicated")

    def _call_outside_steps(self, inputs: Any, operation: Callable) -> tf.Tensor:
        """Computes what the plain layer does, with weights gathered from all replicas."""
        whole = [None if weight is None else self._whole(weight) for weight in (self._kernel, self.bias)]
        return self._finished(operation(inputs, whole[0]), whole[1])

    def _outputs_of_all(self, x: tf.Tensor, counts: activations.Counts, operation: Callable) -> tf.Tensor:
        """Returns this replica's outputs for all examples, before the activation function."""
        y = operation(activations.gather(x, counts, dtype=self._communication_dtype), self._shard(self._kernel))
        return y if self.bias is None else y + self._aligned(self._shard(self.bias))

    def _finished(self, y: tf.Tensor, bias: tf.Tensor | None = None) -> tf.Tensor:
        y = y if bias is None else y + self._aligned(bias)
        return y if self.activation is None else self.activation(y)

    def _aligned(self, bias: tf.Tensor) -> tf.Tensor:
        """Returns a bias in a shape that can be added to outputs."""
        return bias

    @property
    def _communication_dtype(self) -> tf.DType | None:
        return None if self.exchange_dtype in (None, "float32") else tf.as_dtype(self.exchange_dtype)

    def _whole(self, weight: Any) -> tf.Tensor:
        """Returns all of a weight, outside of steps, in the dtype in which the layer computes."""
        return self._shard(weight.whole() if isinstance(weight, ReplicaShardedVariable) else weight)

    def _shard(self, weight: Any) -> tf.Tensor:
        """Returns what this replica has of a weight, in the dtype in which the layer computes."""
        return tf.cast(keras.ops.convert_to_tensor(weight), self.compute_dtype)

    @classmethod
    def from_config(cls, config: dict) -> Any:
        # Files written by earlier versions name one of three ways to gather examples, with the same results.
        return super().from_config({name: value for name, value in config.items() if name != "scheme"})  # type: ignore[misc]


@keras.saving.register_keras_serializable("toolkit")
class ShardedDense(_Sharded, keras.layers.Dense):
    """A `keras.layers.Dense` whose kernel is sharded over the replicas.

    Split by outputs, each replica has all rows of some columns of the kernel: everybody's inputs are gathered, and
    outputs go back to the replica whose examples they belong to. Split by inputs, each replica has some rows of the
    kernel: everybody's inputs of those go there, and the sums come back. With `keep_split` a layer that is split by
    outputs leaves its output sharded by features, for elementwise layers and then for one that is split by inputs, as
    Shoeybi et al., arXiv 1909.08053, section 3, pair them.

    Elements that a replica receives, forward and again backward, for n examples on each of R replicas: by outputs
    (R-1) n inputs + (R-1)/R n units; by inputs (R-1)/R n inputs + (R-1) n units; as a pair (R-1) n (inputs of the
    first + units of the second).

    Args:
        units: As for `Dense`.
        split: "outputs" or "inputs".
        keep_split: Leave the output sharded by features; for split="outputs".
        exchange_dtype: "float16" or "bfloat16", in which activations and their gradients are exchanged; None for the
            dtype that they have.
        args: As for `Dense`.
        kwargs: As for `Dense`.

    Input and output have the shapes and dtypes of `Dense`'s: [n, ..., inputs] to [n, ..., units].

    Raises:
        StrategyError: An argument has an unknown value; or, when the layer is built, the replicas outnumber the units,
            or the inputs.
    """

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
        if split not in ("outputs", "inputs"):
            _refuse(f"split={split!r}", "there is no such split", "Choose outputs or inputs")
        if keep_split and (split != "outputs" or keras.activations.serialize(self.activation) not in ELEMENTWISE):
            _refuse(
                f"layer {self.name} is to keep its output split",
                f"it is split by {split}, with activation {keras.activations.serialize(self.activation)}",
                "Split it by outputs, with an elementwise activation such as relu",
            )
        self._set_exchange_dtype(exchange_dtype)
        self.split = split
        self.keep_split = keep_split

    def _shard_axis(self, name: str) -> int | None:
        if self.split == "inputs":
            return 0 if name == "kernel" else None
        return {"kernel": 1, "bias": 0}.get(name)

    def build(self, input_shape: Sequence[int | None]) -> None:
        super().build(input_shape)
        if self.split == "inputs":
            self.input_spec = keras.layers.InputSpec(min_ndim=2)  # Its last axis may be a shard already.

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if not isinstance(self._kernel, ReplicaShardedVariable):
            return super().call(inputs, training=training)
        if collectives.replica_id_and_count()[1] == 1:
            return self._call_outside_steps(inputs, keras.ops.matmul)
        x = tf.convert_to_tensor(inputs)
        flat = tf.reshape(x, [-1, x.shape[-1]])  # All axes but that of the features count as examples.
        y = self._call_by_outputs(flat) if self.split == "outputs" else self._call_by_inputs(flat)
        if len(x.shape) == 2:
            return y
        shaped = tf.reshape(y, tf.concat([[-1], tf.shape(x)[1:-1], [y.shape[-1]]], 0))
        shaped.set_shape([None, *x.shape[1:-1], y.shape[-1]])
        return shaped

    def _call_by_outputs(self, x: tf.Tensor) -> tf.Tensor:
        if x.shape[-1] != self._kernel.shape[0]:
            _refuse(
                f"layer {self.name} is split by outputs",
                f"its input is split already: {x.shape[-1]} of {self._kernel.shape[0]} features",
                "Have it split by inputs, or the layer before not keep its output split",
            )
        counts = activations.count(x)
        y = self._outputs_of_all(x, counts, tf.matmul)
        if not self.keep_split:
            dtype = self._communication_dtype
            return self._finished(activations.features_to_examples(y, counts, self.units, dtype=dtype))
        y = self._finished(y)
        replica_id, count = collectives.replica_id_and_count()
        size = self._kernel.shard_shape[1]
        real = min(max(self.units - replica_id * size, 0), size)
        # Beyond the last unit nothing may reach the next layer: an activation of 0 need not be 0.
        y = y if size * count == self.units else y * tf.cast(tf.range(size) < real, y.dtype)
        return activations.keep_split(y, counts)

    def _call_by_inputs(self, x: tf.Tensor) -> tf.Tensor:
        dtype = self._communication_dtype
        size = self._kernel.shard_shape[0]
        if x.shape[-1] == size:
            counts = activations.counts_of(x)
        else:
            counts = activations.count(x)
            x = activations.examples_to_features(x, counts, size, dtype=dtype)
        y = activations.sum_to_examples(tf.matmul(x, self._shard(self._kernel)), counts, dtype=dtype)
        return self._finished(y, None if self.bias is None else self._shard(self.bias))

    def get_config(self) -> dict:
        own = {name: getattr(self, name) for name in ("split", "keep_split", "exchange_dtype")}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable("toolkit")
class ShardedConv2D(_Sharded, keras.layers.Conv2D):
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
        if collectives.replica_id_and_count()[1] == 1:
            return self._call_outside_steps(inputs, self.convolution_op)
        x = tf.convert_to_tensor(inputs)
        counts = activations.count(x)
        y = self._outputs_of_all(x, counts, self.convolution_op)
        axis, dtype = self._channels, self._communication_dtype
        return self._finished(activations.features_to_examples(y, counts, self.filters, axis=axis, dtype=dtype))

    @property
    def _channels(self) -> int:
        return 3 if self.data_format == "channels_last" else 1

    def _aligned(self, bias: tf.Tensor) -> tf.Tensor:
        return bias if self._channels == 3 else tf.reshape(bias, [1, -1, 1, 1])

    def get_config(self) -> dict:
        return {**super().get_config(), "exchange_dtype": self.exchange_dtype}


def _refuse(asked: str, found: str, remedy: str) -> None:
    raise StrategyError(asked=asked, found=found, remedy=remedy)
