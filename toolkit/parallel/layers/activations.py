"""Moves activations between the replicas of a group: from a replica's own examples to all of the group's, and back.

A replica's own examples are [n, ...]. Replicas may have different numbers of them (the last batch of an evaluation),
so each pads its own to the largest number, m. All examples are [replicas * m, ...], replica after replica of the group.

Every function takes the communication dtype, which activations and their gradients have between replicas; None leaves
them as they are.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.mesh import Among
from toolkit.strategies.step import collectives, share
from toolkit.support.graphs import computed_from, is_elementwise, outside

__all__ = [
    "Counts",
    "acts_elementwise",
    "count",
    "counts_of",
    "examples_to_features",
    "features_of_all",
    "features_to_examples",
    "gather",
    "keep_split",
    "sum_of_all",
    "sum_to_examples",
]

_KEPT = "toolkit_kept_split"  # The collection of a function's graph in which layers note outputs that stay sharded.
_of_this_replica = threading.local()  # tf.distribute traces each replica in its own thread.


class Counts(NamedTuple):
    """The number of this replica's examples, and the number to which each replica's are padded: int32 scalars."""

    own: tf.Tensor
    padded: tf.Tensor


def count(x: tf.Tensor) -> Counts:
    """Returns the number of this replica's examples in x, [n, ...], and the padded number. It is a collective."""
    own = tf.constant(x.shape[0], tf.int32) if x.shape[0] is not None else tf.shape(x)[0]
    return Counts(own, collectives.all_reduce_max(own, among=Among.GROUP))


def keep_split(y: tf.Tensor, counts: Counts) -> tf.Tensor:
    """Returns a layer's output sharded by features, for a following layer that asks for `counts_of`."""
    y = tf.identity(y)
    _of_this_replica.counts = counts
    if not tf.executing_eagerly():
        y.graph.add_to_collection(_KEPT, (y.op, counts))
    return y


def counts_of(x: tf.Tensor) -> Counts:
    """Returns the counts of an input that is sharded by features, as the layer that made it noted them.

    Raises:
        StrategyError: What lies between computes from all features of an example, of which there is a part here.
    """
    if tf.executing_eagerly():  # Without a graph that layer can't be found.
        return _of_this_replica.counts
    kept = dict(x.graph.get_collection(_KEPT))
    before = computed_from([x.op], kept)
    found = [kept[operation] for operation in before if operation in kept]
    others = [operation for operation in before if operation not in kept and not is_elementwise(operation)]
    wrong = next((each for each in others if any(other in kept for other in computed_from([each], kept))), None)
    if wrong is not None or not found:
        raise StrategyError(
            asked="a layer takes an input that is split by features",
            found=f"a {wrong.type} operation before it needs all features of an example"
            if wrong is not None
            else "no layer before it keeps its output split",
            remedy="Leave keep_split out in the layer before, or have nothing but elementwise layers between the two",
        )
    return found[0]


def acts_elementwise(function: Callable | None) -> bool:
    """Returns whether an activation function is elementwise; None is."""
    if function is None:
        return True

    def traced() -> bool:
        with tf.Graph().as_default():
            x = tf.compat.v1.placeholder(tf.float32, [2, 3, 4])
            result = function(x)
            before = computed_from([result.op], [x.op])
        return result.shape == x.shape and all(is_elementwise(each) for each in before if each.inputs)

    return outside(traced)


def gather(x: tf.Tensor, counts: Counts, *, dtype: tf.DType | None) -> tf.Tensor:
    """Returns all examples from own ones: [n, ...] to [replicas * m, ...]; also for masks and indices."""
    own = share.unweigh(x) if x.dtype.is_floating else x
    sent = _padded(tf.cast(own, tf.float16) if x.dtype == tf.bool else own, counts)  # No collective accepts bools.
    everybody = collectives.all_gather(sent, among=Among.GROUP, dtype=dtype if x.dtype.is_floating else None)
    joined = tf.cast(tf.reshape(everybody, tf.concat([[-1], tf.shape(everybody)[2:]], 0)), x.dtype)
    joined.set_shape([None, *x.shape[1:]])
    return joined


def features_to_examples(
    y: tf.Tensor, counts: Counts, features: int, *, axis: int = -1, dtype: tf.DType | None
) -> tf.Tensor:
    """Returns own examples with all features, from all examples with this replica's features.

    Args:
        y: [replicas * m, ..., s].
        counts: As `count` returned them.
        features: How many all replicas have together, without padding.
        axis: The axis of y that has its features.
        dtype: The communication dtype.

    Returns:
        [n, ..., features].
    """
    _, replicas = collectives.replica_id_and_count(Among.GROUP)
    shape = y.shape.as_list()
    axis %= len(shape)
    y = tf.reshape(y, tf.concat([[replicas, counts.padded], tf.shape(y)[1:]], 0))
    y = collectives.all_to_all(y, among=Among.GROUP, dtype=dtype)
    # [features' replica, m, ...] to [m, ..., features' replica, s, ...].
    y = tf.transpose(y, [*range(1, axis + 1), 0, *range(axis + 1, len(shape) + 1)])
    y = tf.reshape(y, tf.concat([tf.shape(y)[:axis], [replicas * shape[axis]], tf.shape(y)[axis + 2 :]], 0))
    index = [slice(None)] * len(shape)
    index[0], index[axis] = slice(counts.own), slice(features)
    y = y[tuple(index)]
    shape[0], shape[axis] = None, features
    y.set_shape(shape)
    return share.weigh(y)


def examples_to_features(
    x: tf.Tensor, counts: Counts, size: int, *, axis: int = -1, dtype: tf.DType | None
) -> tf.Tensor:
    """Returns all examples with this replica's features, from own examples with all features.

    Args:
        x: [n, ...].
        counts: As `count` returned them.
        size: Features of each replica; what is missing of the last one's is filled with zeros.
        axis: The axis of x that has its features.
        dtype: The communication dtype.

    Returns:
        [replicas * m, ...], with `size` features.
    """
    _, replicas = collectives.replica_id_and_count(Among.GROUP)
    x = _padded(share.unweigh(x), counts)
    shape = x.shape.as_list()
    axis %= len(shape)
    padding = [[0, 0]] * len(shape)
    padding[axis] = [0, replicas * size - shape[axis]]
    # [m, ..., replicas * size, ...] to [features' replica, m, ..., size, ...].
    x = tf.reshape(tf.pad(x, padding), tf.concat([tf.shape(x)[:axis], [replicas, size], tf.shape(x)[axis + 1 :]], 0))
    x = tf.transpose(x, [axis, *(number for number in range(len(shape) + 1) if number != axis)])
    x = collectives.all_to_all(x, among=Among.GROUP, dtype=dtype)
    x = tf.reshape(x, tf.concat([[-1], tf.shape(x)[2:]], 0))
    shape[0], shape[axis] = None, size
    x.set_shape(shape)
    return x


def features_of_all(y: tf.Tensor, features: int, *, dtype: tf.DType | None) -> tf.Tensor:
    """Returns all features of a tensor that is sharded and the same for all examples: [..., s] to [..., features].

    Its gradients are added over the replicas.
    """
    everybody = tf.unstack(collectives.all_gather(y, among=Among.GROUP, dtype=dtype))
    return share.weigh(tf.concat(everybody, -1)[..., :features])


def sum_of_all(y: tf.Tensor, *, dtype: tf.DType | None) -> tf.Tensor:
    """Returns the sum of the replicas' terms that are the same for all examples; gradients are summed as well."""
    return share.weigh(tf.reduce_sum(collectives.all_gather(y, among=Among.GROUP, dtype=dtype), 0))


def sum_to_examples(y: tf.Tensor, counts: Counts, *, dtype: tf.DType | None) -> tf.Tensor:
    """Returns sums over replicas for own examples, from terms for all examples: [replicas * m, ...] to [n, ...]."""
    _, replicas = collectives.replica_id_and_count(Among.GROUP)
    shape = y.shape
    y = tf.reshape(y, tf.concat([[replicas, counts.padded], tf.shape(y)[1:]], 0))
    y = collectives.reduce_scatter(y, among=Among.GROUP, dtype=dtype)[: counts.own]
    y.set_shape([None, *shape[1:]])
    return share.weigh(y)


def _padded(x: tf.Tensor, counts: Counts) -> tf.Tensor:
    padded = tf.pad(x, [[0, counts.padded - counts.own], *[[0, 0]] * (len(x.shape) - 1)])
    padded.set_shape([None, *x.shape[1:]])
    return padded
