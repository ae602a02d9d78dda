"""What all layers with sharded weights share.

They are built as the plain layers are, with the same initial values for the same seed at any number of replicas, and
are saved and loaded whole. On one replica they are the plain layers.

Split by outputs, each replica has all rows of some columns of the kernel: everybody's inputs are gathered, and outputs
go back to the replica whose examples they belong to. Split by inputs, each has some rows: everybody's inputs of those
go there, and the sums come back. A layer that is split by outputs can leave its output so for one that is split by
inputs, with elementwise layers between them, as Shoeybi et al., arXiv 1909.08053, section 3, pair them.

Regularizers and constraints of a whole variable are given one shard of it in a step.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.parallel.layers import activations
from toolkit.strategies.context import here
from toolkit.strategies.fit.adapt import adapt_replicas
from toolkit.strategies.mesh import Among, mesh_of
from toolkit.strategies.options import DTYPES
from toolkit.strategies.step import collectives, share
from toolkit.strategies.step.sharded_variable import ReplicaShardedVariable

__all__ = ["Sharded", "in_a_step", "refuse"]

SPLITS = ("outputs", "inputs")


class Exchanging:
    """A mixin in front of a Keras layer that exchanges activations, in their own dtype or in 16 bits."""

    exchange_dtype: str | None = None
    planned: Mapping[str, Any] = {}  # Returns what comes before the arguments of a layer that other code creates.

    def _set_exchange_dtype(self, exchange_dtype: str | None) -> None:
        exchange_dtype = self.planned.get("exchange_dtype", exchange_dtype)
        if exchange_dtype not in (None, *DTYPES):
            remedy = "Choose " + ", ".join(DTYPES)
            refuse(f"exchange_dtype={exchange_dtype!r}", "activations can't be exchanged in that dtype", remedy)
        self.exchange_dtype = exchange_dtype

    @property
    def _communication_dtype(self) -> tf.DType | None:
        return None if self.exchange_dtype in (None, "float32") else tf.as_dtype(self.exchange_dtype)


class Sharded(Exchanging):
    """A mixin in front of a Keras layer, which does the rest."""

    name: str
    bias: Any
    activation: Callable | None
    compute_dtype: str
    variable_dtype: str
    split: str = "outputs"
    keep_split: bool = False
    _kernel: Any
    _track_variable: Callable

    def _set_split(self, split: str, *, keep_split: bool) -> None:
        split, keep_split = self.planned.get("split", split), self.planned.get("keep_split", keep_split)
        if split not in SPLITS:
            refuse(f"split={split!r}", "there is no such split", "Choose outputs or inputs")
        if keep_split and (split != "outputs" or not activations.acts_elementwise(self.activation)):
            refuse(
                f"layer {self.name} is to keep its output split",
                f"it is split by {split}, with activation {keras.activations.serialize(self.activation)}",
                "Split it by outputs, with an elementwise activation such as relu",
            )
        self.split, self.keep_split = split, keep_split

    def _shard_axis(self, name: str) -> int | None:
        """Returns the axis along which a weight is sharded; None if each replica has all of it."""
        raise NotImplementedError

    def add_weight(self, *args: Any, **kwargs: Any) -> Any:
        axis = self._shard_axis(kwargs.get("name", "")) if mesh_of().shards > 1 else None
        if axis is None:
            return super().add_weight(*args, **kwargs)  # type: ignore[misc]
        self._check_size(kwargs["shape"][axis])
        adapt_replicas()
        with keras.name_scope(self.name, caller=self):
            variable = ReplicaShardedVariable(
                kwargs["initializer"], kwargs["shape"], axis=axis, dtype=self.variable_dtype, name=kwargs["name"]
            )
        regularizer, constraint = kwargs.get("regularizer"), kwargs.get("constraint")
        variable.regularizer = regularizer and _ShardedRegularizer(regularizer)
        variable.constraint = constraint and _ShardedConstraint(constraint)
        self._track_variable(variable)
        return variable

    def _check_size(self, size: int) -> None:
        shards = mesh_of().shards
        asked = f"layer {self.name} is split over {shards} replicas"
        if shards > size:
            refuse(asked, f"its split axis has only {size} elements", "Leave it replicated, or use fewer replicas")
        if getattr(self, "lora_rank", None) or getattr(self, "quantization_mode", None):
            refuse(asked, "it is quantized, or has LoRA weights", "Leave it replicated")
        if (groups := getattr(self, "groups", 1)) > 1:
            refuse(asked, f"it has {groups} groups, each with its own channels", "Leave it replicated")

    def _call_outside_steps(self, inputs: Any, operation: Callable) -> tf.Tensor:
        """Computes as the plain layer does, with weights gathered from all replicas."""
        whole = [None if weight is None else self._whole(weight) for weight in (self._kernel, self.bias)]
        return self._finished(operation(inputs, whole[0]), whole[1])

    def _call_by_outputs(self, x: tf.Tensor, operation: Callable, units: int, axis: int = -1) -> tf.Tensor:
        """Returns the layer's output for own examples, or its shard of the features of all examples.

        Args:
            x: Own examples, [n, ...].
            operation: Takes examples and a kernel.
            units: How many features all replicas of the group make together.
            axis: The axis of the outputs that has them.
        """
        counts = activations.count(x)
        y = operation(activations.gather(x, counts, dtype=self._communication_dtype), self._shard(self._kernel))
        y = y if self.bias is None else y + self._aligned(self._shard(self.bias))
        if not self.keep_split:
            dtype = self._communication_dtype
            return self._finished(activations.features_to_examples(y, counts, units, axis=axis, dtype=dtype))
        y = self._finished(y)
        place, count = collectives.replica_id_and_count(Among.GROUP)
        size = y.shape[axis]
        real = min(max(units - place * size, 0), size)
        if size * count != units:
            # Padding after the last unit must not reach the next layer: an activation of 0 need not be 0.
            shape = [1] * len(y.shape)
            shape[axis] = size
            y = y * tf.cast(tf.reshape(tf.range(size) < real, shape), y.dtype)
        return activations.keep_split(y, counts)

    def _call_by_inputs(self, x: tf.Tensor, operation: Callable, size: int, axis: int = -1) -> tf.Tensor:
        """Returns the layer's output for own examples.

        Args:
            x: Own examples, [n, ...], or all examples with this replica's shard of the features.
            operation: Takes examples and a kernel.
            size: How many features each replica of the group takes.
            axis: The axis of the inputs that has them.
        """
        dtype = self._communication_dtype
        if x.shape[axis] == size:
            counts = activations.counts_of(x)
        else:
            counts = activations.count(x)
            x = activations.examples_to_features(x, counts, size, axis=axis, dtype=dtype)
        y = activations.sum_to_examples(operation(x, self._shard(self._kernel)), counts, dtype=dtype)
        return self._finished(y, None if self.bias is None else self._shard(self.bias))

    def _finished(self, y: tf.Tensor, bias: tf.Tensor | None = None) -> tf.Tensor:
        y = y if bias is None else y + self._aligned(bias)
        return y if self.activation is None else self.activation(y)

    def _aligned(self, bias: tf.Tensor) -> tf.Tensor:
        """Returns a bias in a shape that can be added to outputs."""
        return bias

    def _whole(self, weight: Any) -> tf.Tensor:
        """Returns the whole weight, outside of steps, in the layer's compute dtype."""
        return self._shard(weight.whole() if isinstance(weight, ReplicaShardedVariable) else weight)

    def _shard(self, weight: Any) -> tf.Tensor:
        """Returns this replica's shard of a weight, in the layer's compute dtype."""
        return tf.cast(keras.ops.convert_to_tensor(weight), self.compute_dtype)


def in_a_step() -> bool:
    """Returns whether replicas exchange here.

    They don't while Keras infers shapes or when a model is called by hand.
    """
    return collectives.replica_id_and_count(Among.GROUP)[1] > 1


def refuse(asked: str, found: str, remedy: str) -> None:
    """Raises a StrategyError."""
    raise StrategyError(asked=asked, found=found, remedy=remedy)


_SUMS_OF_ELEMENTS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class _ShardedRegularizer(keras.regularizers.Regularizer):
    """A regularizer of a whole variable, which Keras calls in a step with one shard.

    In a step of `fit` every replica's loss has the penalty, and in the user's own loop 1/replicas of it. A shard's
    gradient is summed over the groups of the mesh only: so a penalty that is a sum over elements counts 1/groups there,
    and as often as there are shards here. Any other is computed from the gathered variable, whose gradient is brought
    back.

    Args:
        whole: The user's regularizer.
    """

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __call__(self, variable: ReplicaShardedVariable) -> tf.Tensor:
        _, count = collectives.replica_id_and_count(Among.GROUP)
        if count == 1:
            return self.whole(variable.whole())
        shard = keras.ops.convert_to_tensor(variable)
        if type(self.whole) in _SUMS_OF_ELEMENTS:
            own = self.whole(shard)
            groups = collectives.replica_id_and_count(Among.PEERS)[1]
            times = count if here.share is None else 1 / groups
            # The value is that of the whole variable on every replica; the gradient is that of the shard.
            return tf.stop_gradient(collectives.all_reduce(own, among=Among.GROUP) - times * own) + times * own
        return share.weigh(self.whole(variable.gather(shard)))


class _ShardedConstraint(keras.constraints.Constraint):
    """A constraint of a whole variable, which in a step takes one shard and returns the new shard.

    Args:
        whole: The user's constraint.
    """

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __call__(self, variable: ReplicaShardedVariable) -> tf.Tensor:
        shard = keras.ops.convert_to_tensor(variable)
        if isinstance(self.whole, keras.constraints.NonNeg):  # An elementwise constraint.
            return self.whole(shard)
        return variable.shard_of(self.whole(variable.gather(shard)))
