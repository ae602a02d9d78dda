"""Activations between replicas: from a replica's own examples to all examples, and back.

A replica's own examples are [n, ...]. Replicas may have different numbers of them (the last batch of an evaluation),
so each pads its own to the largest number, m. All examples are [replicas * m, ...], replica after replica.

Every function takes the communication dtype, which activations and their gradients have between replicas; None leaves
them as they are.
"""

import threading
from collections.abc import Container
from typing import NamedTuple

import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies import collectives, weighting
from toolkit.strategies.gradients import SHAPES

__all__ = [
    "Counts",
    "count",
    "counts_of",
    "examples_to_features",
    "features_to_examples",
    "gather",
    "keep_split",
    "sum_to_examples",
]

_KEPT = "toolkit_kept_split"  # The collection of a function's graph that has what layers have kept split.
# Operations that compute each element from those at its place.
_ELEMENTWISE = frozenset(
    """Abs Add AddN AddV2 Atan2 Cast Ceil ClipByValue Cos Div DivNoNan Elu EnsureShape Equal Erf Erfc Exp Expm1 Floor
    Greater GreaterEqual Identity IdentityN IsFinite LeakyRelu Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr
    Maximum Minimum Mul MulNoNan Neg NotEqual OnesLike Pow PreventGradient RealDiv Reciprocal Relu Relu6 Round Rsqrt
    Select SelectV2 Selu Sigmoid Sign Sin Softplus Softsign Sqrt Square SquaredDifference StopGradient Sub Tanh Xdivy
    ZerosLike""".split()  # noqa: SIM905 - A list of words.
)
_of_this_replica = threading.local()  # tf.distribute traces each replica in a thread of its own.


class Counts(NamedTuple):
    """How many examples this replica has, and how many each replica's are padded to: int32 scalars."""

    own: tf.Tensor
    padded: tf.Tensor


def count(x: tf.Tensor) -> Counts:
    """Returns how many examples this replica has in x, [n, ...], and what they are padded to: a collective."""
    own = tf.constant(x.shape[0], tf.int32) if x.shape[0] is not None else tf.shape(x)[0]
    return Counts(own, collectives.all_reduce_max(own))


def keep_split(y: tf.Tensor, counts: Counts) -> tf.Tensor:
    """Returns a layer's output, split by features, for a layer that takes it so and asks for `counts_of`."""
    y = tf.identity(y)
    _of_this_replica.counts = counts
    if not tf.executing_eagerly():
        y.graph.add_to_collection(_KEPT, (y.op, counts))
    return y


def counts_of(x: tf.Tensor) -> Counts:
    """Returns the counts of an input that is split by features: those of the layer that has kept it so.

    Raises:
        StrategyError: What lies between computes from all features of an example, of which there is a part here.
    """
    if tf.executing_eagerly():  # There is no graph in which to find that layer.
        return _of_this_replica.counts
    kept = dict(x.graph.get_collection(_KEPT))
    before = _computed_from(x.op, kept)
    found = [kept[operation] for operation in before if operation in kept]
    others = [operation for operation in before if operation not in kept and not _is_elementwise(operation)]
    wrong = next((each for each in others if any(other in kept for other in _computed_from(each, kept))), None)
    if wrong is not None or not found:
        raise StrategyError(
            asked="a layer takes an input that is split by features",
            found=f"a {wrong.type} lies between, which computes from all of an example's features"
            if wrong is not None
            else "no layer before it has kept its output split",
            remedy="Leave keep_split out in the layer before, or have nothing but elementwise layers between the two",
        )
    return found[0]


def _computed_from(operation: tf.Operation, kept: Container[tf.Operation]) -> list[tf.Operation]:
    """Returns an operation and those whose values it needs, back to what was kept split; shapes are no values."""
    waiting, seen = [operation], dict[tf.Operation, None]()
    while waiting:
        each = waiting.pop()
        if each not in seen and each.type not in SHAPES:
            seen[each] = None
            if each not in kept:
                waiting += [tensor.op for tensor in each.inputs]
    return list(seen)


def _is_elementwise(operation: tf.Operation) -> bool:
    if operation.type == "Reshape":  # Such as of steps of a sequence, which count as examples.
        before, after = operation.inputs[0].shape, operation.outputs[0].shape
        return bool(before.rank and after.rank) and before[-1] is not None and before[-1] == after[-1]
    return operation.type in _ELEMENTWISE


def gather(x: tf.Tensor, counts: Counts, *, dtype: tf.DType | None) -> tf.Tensor:
    """Returns all examples, from own ones: [n, ...] to [replicas * m, ...]."""
    everybody = collectives.all_gather(_padded(weighting.unweigh(x), counts), dtype=dtype)
    joined = tf.reshape(everybody, tf.concat([[-1], tf.shape(everybody)[2:]], 0))
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
    _, replicas = collectives.replica_id_and_count()
    shape = y.shape.as_list()
    axis %= len(shape)
    y = tf.reshape(y, tf.concat([[replicas, counts.padded], tf.shape(y)[1:]], 0))
    y = collectives.all_to_all(y, dtype=dtype)
    # [features' replica, m, ...] to [m, ..., features' replica, s, ...].
    y = tf.transpose(y, [*range(1, axis + 1), 0, *range(axis + 1, len(shape) + 1)])
    y = tf.reshape(y, tf.concat([tf.shape(y)[:axis], [replicas * shape[axis]], tf.shape(y)[axis + 2 :]], 0))
    index = [slice(None)] * len(shape)
    index[0], index[axis] = slice(counts.own), slice(features)
    y = y[tuple(index)]
    shape[0], shape[axis] = None, features
    y.set_shape(shape)
    return weighting.weigh(y)


def examples_to_features(x: tf.Tensor, counts: Counts, size: int, *, dtype: tf.DType | None) -> tf.Tensor:
    """Returns all examples with this replica's features, from own examples with all features.

    Args:
        x: [n, features].
        counts: As `count` returned them.
        size: Features of each replica; what is missing of the last one's is filled with zeros.
        dtype: The communication dtype.

    Returns:
        [replicas * m, size].
    """
    _, replicas = collectives.replica_id_and_count()
    x = _padded(weighting.unweigh(x), counts)
    x = tf.pad(x, [[0, 0], [0, replicas * size - x.shape[-1]]])
    x = tf.transpose(tf.reshape(x, [counts.padded, replicas, size]), [1, 0, 2])
    x = tf.reshape(collectives.all_to_all(x, dtype=dtype), [-1, size])
    x.set_shape([None, size])
    return x


def sum_to_examples(y: tf.Tensor, counts: Counts, *, dtype: tf.DType | None) -> tf.Tensor:
    """Returns sums over replicas for own examples, from terms for all examples: [replicas * m, s] to [n, s]."""
    _, replicas = collectives.replica_id_and_count()
    features = y.shape[-1]
    y = collectives.reduce_scatter(tf.reshape(y, [replicas, counts.padded, features]), dtype=dtype)[: counts.own]
    y.set_shape([None, features])
    return weighting.weigh(y)


def _padded(x: tf.Tensor, counts: Counts) -> tf.Tensor:
    padded = tf.pad(x, [[0, counts.padded - counts.own], *[[0, 0]] * (len(x.shape) - 1)])
    padded.set_shape([None, *x.shape[1:]])
    return padded
