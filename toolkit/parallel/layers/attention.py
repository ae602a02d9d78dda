"""`MultiHeadAttention` and `GroupQueryAttention` whose heads are divided among the replicas of a group.

Everybody's queries, keys and values are gathered, each replica computes its heads' attention for all examples of the
group, projects their outputs by its rows of the output projection, and the sums come back to whose examples they are
(Shoeybi et al., arXiv 1909.08053, section 3): a gather and a reduce-scatter forward, and the same backward, together as
many bytes as one all-reduce each way. Dropout inside is what one device draws for the replica's heads.
"""

from typing import Any

import keras
import tensorflow as tf

from toolkit.parallel.layers import base
from toolkit.parallel.layers.dense import equation_parts
from toolkit.strategies.mesh import Among, mesh_of
from toolkit.strategies.step import collectives, draws
from toolkit.strategies.step.sharded_variable import ReplicaShardedVariable


class _Projection(base.Sharded, keras.layers.EinsumDense):
    """A projection of an attention layer: in a step it computes some heads of all examples, or a term of the sum.

    Args:
        of: The projection that Keras has made, not yet built.
    """

    def __init__(self, of: Any) -> None:
        names = ("equation", "activation", "bias_axes", "kernel_initializer", "bias_initializer", "kernel_regularizer")
        more = ("bias_regularizer", "kernel_constraint", "bias_constraint")
        if of.activity_regularizer is not None:
            found = "its activity_regularizer needs all heads, and each replica would have only some"
            base.refuse(f"an attention's layer {of.name} is split by heads", found, "Leave the attention replicated")
        settings = {name: getattr(of, name) for name in (*names, *more)}
        super().__init__(output_shape=of.partial_output_shape, name=of.name, dtype=of.dtype_policy, **settings)
        inputs, weights, _ = equation_parts(self.equation)
        # The output projection takes heads with their features; the other projections compute them from features.
        self.split = "inputs" if sum(letter in inputs for letter in weights) == 2 else "outputs"
        self._heads = 0 if self.split == "inputs" else 1  # The axis of the kernel.

    def _shard_axis(self, name: str) -> int | None:
        if name == "kernel":
            return self._heads
        return 0 if self.split == "outputs" else None

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if not isinstance(self._kernel, ReplicaShardedVariable):
            return super().call(inputs, training=training)
        if not base.in_a_step():
            return self._call_outside_steps(inputs, self._einsum)
        y = self._einsum(inputs, self._shard(self._kernel))
        if self.split == "inputs":  # The bias is added once, to the sum.
            return y
        return self._finished(y, None if self.bias is None else self._shard(self.bias))

    def _einsum(self, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        return keras.ops.einsum(self.equation, x, kernel)


class _ByHeads(base.Exchanging):
    """A mixin in front of a Keras attention layer."""

    name: str
    _output_dense: _Projection

    def __setattr__(self, name: str, value: Any) -> None:
        # Keras creates the projections in `build`, and builds each after storing it as an attribute.
        if type(value) is keras.layers.EinsumDense and not value.built and mesh_of().shards > 1:
            value = _Projection(value)
        super().__setattr__(name, value)

    def _check_heads(self, **heads: int) -> None:
        shards = mesh_of().shards
        asked = f"layer {self.name} is split over {shards} replicas"
        for name, count in heads.items():
            if count % shards:
                base.refuse(
                    asked,
                    f"{name}={count} isn't a multiple of {shards}",
                    f"Give a multiple of {shards} heads, another number of shards, or leave it replicated",
                )

    def call(  # Keras inspects the names of its arguments.
        self,
        query: Any,
        value: Any,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        masks = {"query_mask": query_mask, "value_mask": value_mask, "key_mask": key_mask}
        how = {"training": training, "use_causal_mask": use_causal_mask}
        how["return_attention_scores"] = return_attention_scores
        if not isinstance(self._output_dense, _Projection) or not base.in_a_step():
            return super().call(query, value, key, attention_mask=attention_mask, **masks, **how)  # type: ignore[misc]
        counts = base.count_examples(query)
        mask = getattr(query, "_keras_mask", None)  # Keras's layers leave it there.
        everybodys: dict[int, tf.Tensor] = {}  # An input that is given several times is gathered once.

        def gathered(x: Any) -> Any:
            if x is None:
                return None
            if id(x) not in everybodys:
                everybodys[id(x)] = base.gather(tf.convert_to_tensor(x), counts, dtype=self._communication_dtype)
            return everybodys[id(x)]

        masks = {name: gathered(each) for name, each in masks.items()}
        if attention_mask is not None:
            masks["attention_mask"] = self._mask_of_all(attention_mask, gathered)
        all_queries = gathered(query)
        if mask is not None:
            all_queries._keras_mask = gathered(mask)
        with draws.of_units(counts.padded):
            found = super().call(all_queries, gathered(value), gathered(key), **masks, **how)  # type: ignore[misc]
        terms, scores = found if isinstance(found, tuple) else (found, None)
        projection, dtype = self._output_dense, self._communication_dtype
        outputs = base.sum_to_examples(terms, counts, dtype=dtype)
        if projection.bias is not None:
            outputs = outputs + projection._shard(projection.bias)
        if mask is not None:
            outputs._keras_mask = mask
        if scores is None:
            return outputs
        heads = scores.shape[1] * mesh_of().shards
        return outputs, base.features_to_examples(scores, counts, heads, axis=1, dtype=dtype)

    def _mask_of_all(self, mask: Any, gathered: Any) -> tf.Tensor:
        """Returns a mask for all examples and this replica's heads: of [b, t, s] or [b, heads, t, s], or broadcast."""
        mask = tf.cast(mask, tf.bool)
        rank = len(mask.shape)
        if rank not in (2, 3, 4):
            base.refuse(
                f"layer {self.name} is given an attention_mask of shape {tuple(mask.shape)}",
                "with heads split over replicas, a mask must have 2 to 4 dimensions",
                "Give [examples, queries, keys] or [examples, heads, queries, keys]",
            )
        if rank > 2 and mask.shape[0] != 1:
            mask = gathered(mask)
        if rank == 4 and mask.shape[1] != 1:
            place, count = collectives.replica_id_and_count(Among.GROUP)
            mask = tf.split(mask, count, axis=1)[place]
        return mask


@keras.saving.register_keras_serializable("toolkit")
class ShardedMultiHeadAttention(_ByHeads, keras.layers.MultiHeadAttention):
    """A `keras.layers.MultiHeadAttention` whose heads are sharded over the replicas.

    Args:
        num_heads: As for `MultiHeadAttention`; a multiple of the shards.
        key_dim: As for `MultiHeadAttention`.
        exchange_dtype: As for `ShardedDense`.
        args: As for `MultiHeadAttention`.
        kwargs: As for `MultiHeadAttention`.

    Inputs and outputs, masks and attention scores have the shapes of `MultiHeadAttention`'s.

    Raises:
        StrategyError: The shards don't divide the heads, when the layer is built; or a mask has another shape.
    """

    def __init__(
        self, num_heads: int, key_dim: int, *args: Any, exchange_dtype: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(num_heads, key_dim, *args, **kwargs)
        self._set_exchange_dtype(exchange_dtype)

    def build(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> None:
        self._check_heads(num_heads=self.num_heads)
        super().build(query_shape, value_shape, key_shape)


@keras.saving.register_keras_serializable("toolkit")
class ShardedGroupedQueryAttention(_ByHeads, keras.layers.GroupQueryAttention):
    """A `keras.layers.GroupQueryAttention` whose heads are sharded over the replicas.

    Args:
        head_dim: As for `GroupQueryAttention`.
        num_query_heads: As for `GroupQueryAttention`.
        num_key_value_heads: As for `GroupQueryAttention`; a multiple of the shards.
        exchange_dtype: As for `ShardedDense`.
        args: As for `GroupQueryAttention`.
        kwargs: As for `GroupQueryAttention`.

    Inputs and outputs, masks and attention scores have the shapes of `GroupQueryAttention`'s.

    Raises:
        StrategyError: The shards don't divide the heads, when the layer is built; or a mask has another shape.
    """

    def __init__(
        self,
        head_dim: int,
        num_query_heads: int,
        num_key_value_heads: int,
        *args: Any,
        exchange_dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(head_dim, num_query_heads, num_key_value_heads, *args, **kwargs)
        self._set_exchange_dtype(exchange_dtype)

    def build(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> None:
        self._check_heads(num_query_heads=self.num_query_heads, num_key_value_heads=self.num_key_value_heads)
        super().build(query_shape, value_shape, key_shape)
