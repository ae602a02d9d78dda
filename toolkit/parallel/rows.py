"""Examples and features between replicas: from a replica's own examples to everybody's, and back.

A replica's own examples are rows [n, ...]. Replicas may have different numbers of them (the last batch of an
evaluation), so they are padded to the largest, m. "Everybody's" is [replicas * m, ...], replica after replica.
"""

import functools
import threading
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from toolkit.strategies import collectives

__all__ = ["SCHEMES", "Rows", "columns_to_rows", "computed", "last", "partial_to_rows", "rows_of", "rows_to_columns"]

SCHEMES = ("a", "b", "c")
_here = threading.local()


class Rows(NamedTuple):
    """How many rows this replica has, and how many each is padded to: int32 scalars."""

    own: tf.Tensor
    most: tf.Tensor


def rows_of(x: tf.Tensor) -> Rows:
    """Returns how many rows of everybody's there will be. It is an exchange of one number."""
    own = tf.constant(x.shape[0], tf.int32) if x.shape[0] is not None else tf.shape(x)[0]
    _here.rows = Rows(own, collectives.largest(own))
    return _here.rows


def last() -> Rows:
    """Returns what `rows_of` did last in this replica: of the layer before one whose input is split already."""
    return _here.rows


def computed(
    x: tf.Tensor,
    weights: tf.Tensor,
    function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    rows: Rows,
    *,
    scheme: str,
    dtype: tf.DType | None,
) -> tf.Tensor:
    """Computes something of everybody's rows: [n, ...] to [replicas * m, ...].

    The schemes are those of Krizhevsky, arXiv 1404.5997, section 4. In "a" all rows are brought
    here at once, and kept for the gradient. In "b" and "c" they come in as many turns as there are
    replicas, and are let go and brought again for the gradient: 1/replicas of the memory, and half as
    many bytes again. A turn has all rows of one replica in "b", and a share of each replica's in "c".

    Args:
        x: This replica's rows.
        weights: This replica's part of them.
        function: Of rows and weights, row by row.
        rows: Of x.
        scheme: "a", "b" or "c".
        dtype: What rows travel as; None for as they are.
    """
    _, count = collectives.place()
    x = _padded(x, rows.own, rows.most)
    if scheme == "a":
        return function(_joined(collectives.all_gather(x, dtype=dtype)), weights)
    if scheme == "b":
        turns = [
            _turn(functools.partial(collectives.send_from, sender=sender, dtype=dtype), function, x, weights)
            for sender in range(count)
        ]
        return tf.concat(turns, 0)
    share = -(-rows.most // count)
    shares = _padded(x, rows.most, share * count)
    shares = tf.reshape(shares, tf.concat([[count, share], tf.shape(x)[1:]], 0))
    shares.set_shape([count, None, *x.shape[1:]])
    done = [
        _turn(lambda x: _joined(collectives.all_gather(x, dtype=dtype)), function, shares[turn], weights)
        for turn in range(count)
    ]
    # [turn, replica, share, ...] to [replica, turn and share, ...].
    whole = tf.stack([tf.reshape(y, tf.concat([[count, share], tf.shape(y)[1:]], 0)) for y in done], 1)
    whole = tf.reshape(whole, tf.concat([[count, count * share], tf.shape(done[0])[1:]], 0))[:, : rows.most]
    joined = _joined(whole)
    joined.set_shape([None, *done[0].shape[1:]])
    return joined


def _turn(
    bring: Callable[[tf.Tensor], tf.Tensor],
    function: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    x: tf.Tensor,
    weights: tf.Tensor,
) -> tf.Tensor:
    @tf.custom_gradient
    def turn(x: tf.Tensor, weights: tf.Tensor) -> tuple:
        def gradient(dy: tf.Tensor) -> list:
            # Not before dy is there, or TensorFlow would see that it has brought them already.
            with tf.GradientTape() as tape, tf.control_dependencies([dy]):
                again = tf.identity(x)
                tape.watch([again, weights])
                y = function(bring(again), weights)
            return tape.gradient(y, [again, weights], dy)

        return function(bring(x), weights), gradient

    return turn(x, weights)


def columns_to_rows(y: tf.Tensor, rows: Rows, features: int, *, axis: int = -1, dtype: tf.DType | None) -> tf.Tensor:
    """From everybody's rows of this replica's features to its own rows of all features: [replicas * m, ..., s] to
    [n, ..., features].

    Args:
        y: Of everybody's rows.
        rows: How many there are.
        features: Of all replicas.
        axis: Where y has its features.
        dtype: What travels; None for as it is.
    """
    _, count = collectives.place()
    shape = y.shape.as_list()
    axis %= len(shape)
    y = tf.reshape(y, tf.concat([[count, rows.most], tf.shape(y)[1:]], 0))
    y = collectives.all_to_all(y, dtype=dtype)
    # [features' replica, m, ...] to [m, ..., features' replica, s, ...].
    y = tf.transpose(y, [*range(1, axis + 1), 0, *range(axis + 1, len(shape) + 1)])
    y = tf.reshape(y, tf.concat([tf.shape(y)[:axis], [count * shape[axis]], tf.shape(y)[axis + 2 :]], 0))
    index = [slice(None)] * len(shape)
    index[0], index[axis] = slice(rows.own), slice(features)
    y = y[tuple(index)]
    shape[0], shape[axis] = None, features
    y.set_shape(shape)
    return y


def rows_to_columns(x: tf.Tensor, rows: Rows, size: int, *, dtype: tf.DType | None) -> tf.Tensor:
    """From own rows of all features to everybody's of this replica's: [n, features] to [replicas * m, size].

    Args:
        x: Own rows.
        rows: Of x.
        size: Features of each replica; what is missing is filled with zeros.
        dtype: What travels; None for as it is.
    """
    _, count = collectives.place()
    x = _padded(x, rows.own, rows.most)
    x = tf.pad(x, [[0, 0], [0, count * size - x.shape[-1]]])
    x = tf.transpose(tf.reshape(x, [rows.most, count, size]), [1, 0, 2])
    x = tf.reshape(collectives.all_to_all(x, dtype=dtype), [-1, size])
    x.set_shape([None, size])
    return x


def partial_to_rows(y: tf.Tensor, rows: Rows, *, dtype: tf.DType | None) -> tf.Tensor:
    """From terms of everybody's rows to this replica's rows' sums: [replicas * m, features] to [n, features]."""
    _, count = collectives.place()
    features = y.shape[-1]
    y = collectives.reduce_scatter(tf.reshape(y, [count, rows.most, features]), dtype=dtype)[: rows.own]
    y.set_shape([None, features])
    return y


def _padded(x: tf.Tensor, own: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
    padded = tf.pad(x, [[0, most - own], *[[0, 0]] * (len(x.shape) - 1)])
    padded.set_shape([None, *x.shape[1:]])
    return padded


def _joined(x: tf.Tensor) -> tf.Tensor:
    joined = tf.reshape(x, tf.concat([[-1], tf.shape(x)[2:]], 0))
    joined.set_shape([None, *x.shape[2:]])
    return joined
