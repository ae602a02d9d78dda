"""PowerSGD: sends the gradient of a matrix as two thin matrices.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", arXiv
1905.13727, algorithm 1, with sums in the place of means. For a matrix [n, m] of which replica r of R has the weighted
gradient G_r, and what it has not sent yet, E_r:

    M_r = G_r + E_r
    P = orthonormal columns of (sum over r of M_r Q)       [n, rank], first exchange
    Q = sum over r of M_r^T P                              [m, rank], second exchange
    the sum of gradients that all use is P Q^T;  E_r = M_r - P Q^T / R

Q begins as random numbers, the same on all replicas, and is kept for the next step, as orthonormal columns. Each
exchange has the factors of all matrices, the first also what is sent as it is. So a step sends rank * (n + m) elements
for n * m.

A checkpoint has the E_r of all replicas: a resumed run is bit for bit that of no pause. With another number of replicas
they are dropped, which costs as much as one step's compression.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from toolkit.strategies.context import here
from toolkit.strategies.exchange import collectives
from toolkit.strategies.exchange.collectives import joined

__all__ = ["Memory", "matrix_shape", "shrinks", "sums"]

_LEAST_SAVING = 2  # A matrix is compressed if that sends less than half of its elements.
_TINY = 1e-8  # Added to the length of a column, which may be 0.


class Memory(NamedTuple):
    """A replica's state for a matrix, kept from step to step.

    Attributes:
        unsent: E_r, [n, m], another on each replica: shards of one variable.
        right: Q, [m, rank], the same on all.
    """

    unsent: Any
    right: Any


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the matrix shape [n, m] of a variable: its axes in two groups, divided so that n + m is smallest."""
    sizes = [int(size) for size in shape]
    cuts = ((math.prod(sizes[:place]), math.prod(sizes[place:])) for place in range(1, len(sizes)))
    return min(cuts, key=sum, default=(math.prod(sizes), 1))


def shrinks(shape: Sequence[int], rank: int) -> bool:
    """Returns whether a variable of this shape is compressed at this rank."""
    n, m = matrix_shape(shape)
    return _LEAST_SAVING * rank * (n + m) < n * m


def sums(
    gradients: Sequence[tf.Tensor],
    memories: Sequence[Memory],
    others: Sequence[tf.Tensor],
    *,
    dtype: tf.DType | None,
    scale: tf.Tensor | float,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the sums over all replicas: of compressed gradients through their factors, of others exactly.

    Args:
        gradients: Weighted gradients of variables that are compressed, of any shape.
        memories: What this replica keeps of each; it is replaced, unless a sum isn't finite.
        others: Tensors that are sent as they are, in float32.
        dtype: In which elements are sent; None for their own.
        scale: By what gradients are multiplied, against underflow in 16 bits, in this step.
    """
    replicas = here.step.count
    whole = [
        tf.reshape(tf.cast(gradient, tf.float32), matrix_shape(gradient.shape)) + _read(memory.unsent) * scale
        for gradient, memory in zip(gradients, memories, strict=True)
    ]
    rights = [_orthonormal(_read(memory.right)) for memory in memories]
    flat, split = joined([*(m @ q for m, q in zip(whole, rights, strict=True)), *others])
    parts = split(collectives.all_reduce(flat, dtype=dtype))
    lefts = [_orthonormal(part) for part in parts[: len(whole)]]
    flat, split_rights = joined([tf.matmul(m, p, transpose_a=True) for m, p in zip(whole, lefts, strict=True)])
    total = collectives.all_reduce(flat, dtype=dtype)
    finite = tf.reduce_all(tf.math.is_finite(total))
    out = []
    for gradient, memory, m, left, right in zip(gradients, memories, whole, lefts, split_rights(total), strict=True):
        product = tf.matmul(left, right, transpose_b=True)
        _set(memory.unsent, (m - product / replicas) / scale, finite)
        _set(memory.right, right, finite)
        out.append(tf.cast(tf.reshape(product, gradient.shape), gradient.dtype))
    return out, parts[len(whole) :]


def _read(variable: Any) -> tf.Tensor:
    return tf.convert_to_tensor(variable.value)  # This replica's.


def _set(variable: Any, value: tf.Tensor, finite: tf.Tensor) -> None:
    variable.assign(tf.where(finite, value, _read(variable)))


def _orthonormal(columns: tf.Tensor) -> tf.Tensor:
    """Returns orthonormal columns of the same span, by Gram and Schmidt's method.

    Each column is made orthogonal twice. If the others span it, as where a gradient's rank is lower than the number of
    columns, then rounding error is all that the first time leaves of it, and that isn't orthogonal to them.
    """
    done = columns[:, :0]
    for column in tf.unstack(columns, axis=1):
        left = column
        for _ in range(2):
            left -= tf.linalg.matvec(done, tf.linalg.matvec(done, left, transpose_a=True))
            left /= tf.norm(left) + _TINY
        done = tf.concat([done, left[:, None]], 1)
    return done
