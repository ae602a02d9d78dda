"""Sums of gradients over replicas: packed tensors, concatenated rows, and shards summed over their groups.

A gradient is a tensor, or the `tf.IndexedSlices` of some rows of a table.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from toolkit.strategies.context import here
from toolkit.strategies.exchange import collectives, overlap, powersgd
from toolkit.strategies.exchange.mesh import Among
from toolkit.strategies.options import GradientExchange
from toolkit.support.graphs import same_everywhere

__all__ = [
    "computed_in_half",
    "mapped",
    "of_first",
    "over_groups",
    "over_replicas",
    "sent_as",
    "values_of",
    "with_overflow",
]


def values_of(gradient: Any) -> tf.Tensor:
    """Returns a gradient's values: of all rows or of some."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def mapped(gradient: Any, function: Callable) -> Any:
    """Applies a function to a gradient's values: of all rows or of some."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def sent_as(exchange: GradientExchange) -> tf.DType | None:
    """Returns the dtype in which elements are sent; None for their own."""
    dtype = tf.as_dtype(exchange.dtype)
    return dtype if dtype.size < 4 else None


def over_groups(gradient: Any, dtype: tf.DType | None) -> Any:
    """Returns the sum of a shard's gradients: each group has the weighted gradient of its own examples."""
    if collectives.replica_id_and_count(Among.PEERS)[1] == 1:
        return gradient
    if not isinstance(gradient, tf.IndexedSlices) or same_everywhere(gradient.indices):
        return mapped(gradient, lambda values: collectives.all_reduce(values, among=Among.PEERS, dtype=dtype))
    return _rows(gradient, Among.PEERS, dtype)


def over_replicas(
    gradients: list,
    exchange: GradientExchange,
    memories: Sequence[powersgd.Memory | None] = (),
    scale: tf.Tensor | float = 1.0,
) -> list:
    """Returns the sums over all replicas of gradients of replicated variables.

    Args:
        gradients: Tensors or `tf.IndexedSlices`, in the order in which they are known.
        exchange: How they are sent.
        memories: The unsent parts of compressed gradients, and None for others; () if none is compressed.
        scale: By what they are multiplied in this step, against underflow.
    """
    if any(memories):
        return _compressed(gradients, exchange, memories, scale)
    # If rows are the same on every replica, such as positions in a sequence, they are added before they are squared,
    # as on one device. Rows that depend on the examples, such as words, are concatenated.
    alike = [isinstance(gradient, tf.IndexedSlices) and same_everywhere(gradient.indices) for gradient in gradients]
    given = [gradient.values if same else gradient for gradient, same in zip(gradients, alike, strict=True)]
    dtype = sent_as(exchange)
    if collectives.on_cpus_of_one_process():
        # TensorFlow's collectives would keep the number and dtype of a device group's tensors for the process's life.
        totals = [_added(gradient, dtype) for gradient in given]
    elif here.step.exchanges_overlap:
        totals = _while_computing(given, exchange.bytes_per_pack, dtype)
    else:
        totals = _by_tensorflow(given, exchange.bytes_per_pack or 0, dtype)
    return [
        tf.IndexedSlices(total, gradient.indices, gradient.dense_shape) if same else total
        for total, gradient, same in zip(totals, gradients, alike, strict=True)
    ]


def of_first(gradient: Any) -> Any:
    """Returns the first replica's gradient."""
    first = here.step.replica == 0
    return mapped(gradient, lambda values: collectives.all_reduce(values if first else tf.zeros_like(values)))


def computed_in_half(gradient: Any) -> bool:
    """Whether a gradient was computed in float16, where a batch's sum may overflow though its shares don't."""
    operation = getattr(gradient, "op", None) if tf.is_symbolic_tensor(gradient) else None
    if operation is None or operation.type not in ("Cast", "AddN"):
        return False
    return any(
        each.dtype == tf.float16 or (operation.type == "AddN" and computed_in_half(each)) for each in operation.inputs
    )


def with_overflow(total: tf.Tensor) -> tf.Tensor:
    """Returns a sum of float16 gradients with infinity where one device, which adds in float16, would overflow."""
    return tf.where(tf.math.is_finite(tf.cast(total, tf.float16)), total, total.dtype.as_numpy_dtype(float("inf")))


def _compressed(gradients: list, exchange: GradientExchange, memories: Sequence, scale: tf.Tensor | float) -> list:
    kinds = [
        "factors"
        if memory is not None and not isinstance(gradient, tf.IndexedSlices)
        else "beside"
        if isinstance(gradient, tf.Tensor) and gradient.dtype == tf.float32
        else "alone"
        for gradient, memory in zip(gradients, memories, strict=True)
    ]
    factors, beside, alone = (
        [n for n, kind in enumerate(kinds) if kind == each] for each in ("factors", "beside", "alone")
    )
    if not factors:  # Gradients of a table's looked up rows.
        return over_replicas(gradients, exchange)
    totals, others = powersgd.sums(
        [gradients[n] for n in factors],
        [memories[n] for n in factors],
        [gradients[n] for n in beside],
        dtype=sent_as(exchange),
        scale=scale,
    )
    rest = over_replicas([gradients[n] for n in alone], exchange) if alone else []
    by_number = dict(zip([*factors, *beside, *alone], [*totals, *others, *rest], strict=True))
    return [by_number[n] for n in range(len(gradients))]


def _while_computing(gradients: list, bytes_per_pack: int | None, dtype: tf.DType | None) -> list:
    whole = [gradient for gradient in gradients if not isinstance(gradient, tf.IndexedSlices)]
    totals = iter(overlap.summed(whole, bytes_per_pack=bytes_per_pack, dtype=dtype))
    return [
        _rows(gradient, Among.ALL, dtype) if isinstance(gradient, tf.IndexedSlices) else next(totals)
        for gradient in gradients
    ]


def _rows(gradient: tf.IndexedSlices, among: Among, dtype: tf.DType | None) -> tf.IndexedSlices:
    """Returns all replicas' rows concatenated, like those of one device's lookups.

    Replicas may have different numbers of them: what is missing is filled with zeros of the first row.
    """
    size = tf.shape(gradient.indices)[0]
    missing = collectives.all_reduce_max(size, among=among) - size
    values = tf.pad(gradient.values, [[0, missing], *[[0, 0]] * (gradient.values.shape.rank - 1)])
    values = collectives.all_gather(values, among=among, dtype=dtype)
    indices = collectives.all_gather(tf.pad(gradient.indices, [[0, missing]]), among=among)
    values = tf.reshape(values, tf.concat([[-1], tf.shape(values)[2:]], 0))
    return tf.IndexedSlices(values, tf.reshape(indices, [-1]), gradient.dense_shape)


def _by_tensorflow(gradients: list, bytes_per_pack: int, dtype: tf.DType | None) -> list:
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack)
    sent = gradients if dtype is None else [_cast(gradient, dtype) for gradient in gradients]
    totals = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, sent, options)
    return [_cast(total, gradient.dtype) for total, gradient in zip(totals, gradients, strict=True)]


def _cast(gradient: Any, dtype: tf.DType) -> Any:
    return mapped(gradient, lambda values: tf.cast(values, dtype))


def _added(gradient: Any, dtype: tf.DType | None) -> Any:
    """Returns the sum over the replicas of one process; gradients of some rows are concatenated."""
    if not isinstance(gradient, tf.IndexedSlices):
        return collectives.all_reduce(gradient, dtype=dtype)
    values = gradient.values if dtype is None else tf.cast(tf.cast(gradient.values, dtype), gradient.dtype)
    values, indices = collectives.concatenated(values), collectives.concatenated(gradient.indices)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)
