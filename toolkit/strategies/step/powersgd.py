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
from collections.abc import Mapping, Sequence

import tensorflow as tf

from toolkit.strategies.compression import Compression, Kept, Replicas

_LEAST_SAVING = 2  # A matrix is compressed if that sends less than half of its elements.
_TINY = 1e-8  # Added to the length of a column, which may be 0.


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the matrix shape [n, m] of a variable: its axes in two groups, divided so that n + m is smallest."""
    sizes = [int(size) for size in shape]
    cuts = ((math.prod(sizes[:place]), math.prod(sizes[place:])) for place in range(1, len(sizes)))
    return min(cuts, key=sum, default=(math.prod(sizes), 1))


def shrinks(shape: Sequence[int], rank: int) -> bool:
    """Returns whether a variable of this shape is compressed at this rank."""
    n, m = matrix_shape(shape)
    return _LEAST_SAVING * rank * (n + m) < n * m


class PowerSGD(Compression):
    """Sends gradients of matrices as two factors each.

    Args:
        rank: Columns of the factors.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __str__(self) -> str:
        return f"PowerSGD at rank {self.rank}"

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether its two factors are much smaller than it."""
        return len(shape) > 1 and shrinks(shape, self.rank)

    def keeps(self, shape: tuple[int, ...], number: int) -> Mapping[str, Kept]:
        """E_r, [n, m], and Q, [m, rank]."""
        n, m = matrix_shape(shape)
        right = tf.random.stateless_normal([m, self.rank], [number, 1905_13727])
        return {"unsent": Kept(shape=(n, m)), "right": Kept(shape=(m, self.rank), initial=right, own=False)}

    def exchange(
        self, gradients: Sequence[tf.Tensor], kept: Sequence[Mapping[str, tf.Tensor]], replicas: Replicas
    ) -> tuple[list, list]:
        """Two sums: of the left factors, and of the right ones."""
        whole = [
            tf.reshape(gradient, matrix_shape(gradient.shape)) + each["unsent"]
            for gradient, each in zip(gradients, kept, strict=True)
        ]
        rights = [_orthonormal(each["right"]) for each in kept]
        lefts = [_orthonormal(part) for part in replicas.sum([m @ q for m, q in zip(whole, rights, strict=True)])]
        rights = replicas.sum([tf.matmul(m, p, transpose_a=True) for m, p in zip(whole, lefts, strict=True)])
        products = [tf.matmul(p, q, transpose_b=True) for p, q in zip(lefts, rights, strict=True)]
        later = [
            {"unsent": m - product / replicas.count, "right": right}
            for m, product, right in zip(whole, products, rights, strict=True)
        ]
        return [tf.reshape(each, gradient.shape) for each, gradient in zip(products, gradients, strict=True)], later


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
