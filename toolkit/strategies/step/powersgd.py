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

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.context import this_step
from toolkit.strategies.mesh import Among, Layout, layout_of, replica_count
from toolkit.strategies.options import options_of
from toolkit.strategies.step import collectives
from toolkit.strategies.step.collectives import joined
from toolkit.strategies.step.gradients import Exchange, Gradients, sent_as, summed
from toolkit.strategies.step.sharded_optimizer import is_in_parts, make_in_scope
from toolkit.strategies.step.sharded_variable import ReplicaShardedVariable
from toolkit.strategies.step.trusted import is_elementwise
from toolkit.strategies.variables import is_table, optimizers_of

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


class Compressed(Exchange):
    """Gradients of matrices go as two factors each, with what else is sent in float32 beside them."""

    def __init__(self, sent: Gradients) -> None:
        super().__init__(sent)
        self._memories = memories_of(sent.optimizer, sent.variables)

    @staticmethod
    def begin(optimizer: Any) -> bool:
        """Whether its strategy compresses."""
        return options_of(optimizer._distribution_strategy).gradients.compression != "none"

    @staticmethod
    @contextlib.contextmanager
    def building(optimizer: Any, variables: Sequence) -> Iterator[None]:
        """Makes the state of compression."""
        yield
        _make_memories(optimizer, variables)

    def choose(self, numbers: Sequence[int]) -> list[int]:
        """All, if some are compressed, but for those of which each replica updates its part."""
        return [number for number in numbers if self._takes(number)] if any(self._memories) else []

    def _takes(self, number: int) -> bool:
        in_parts = is_in_parts(self.sent.optimizer, self.sent.variables[number])
        rows = isinstance(self.sent.values[number], tf.IndexedSlices)
        return self._memories[number] is not None or rows or not in_parts

    def run(self) -> None:
        """Exchanges them."""
        memories = [self._memories[number] for number in self.numbers]
        self.sent.complete(self.numbers, totals(self.sent.of_shares(self.numbers), memories, self.sent.scale))

    @staticmethod
    def state(optimizer: Any) -> list[Any]:
        """What each replica hasn't sent, and the right factors, in the order of the optimizer's trainable variables."""
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        return [variable for memory in optimizer.__dict__.get(_ATTRIBUTE, {}).values() for variable in memory]


def totals(gradients: list, memories: Sequence[Memory | None], scale: tf.Tensor | float = 1.0) -> list:
    """Returns the sums over all replicas: of matrices with a memory through their factors.

    Args:
        gradients: Weighted; tensors or `tf.IndexedSlices`, in the order in which they are known.
        memories: What this replica keeps of each, None for those that are sent as they are; () if all are.
        scale: By what gradients are multiplied in this step.
    """
    kinds = [
        "factors"
        if memory is not None and not isinstance(gradient, tf.IndexedSlices)
        else "beside"
        if isinstance(gradient, tf.Tensor) and gradient.dtype == tf.float32
        else "alone"
        for gradient, memory in zip(gradients, memories or [None] * len(gradients), strict=True)
    ]
    factors, beside, alone = (
        [n for n, kind in enumerate(kinds) if kind == each] for each in ("factors", "beside", "alone")
    )
    if not factors:  # Gradients of a table's looked up rows.
        return summed(gradients)
    of_factors = [(gradients[n], memories[n]) for n in factors]
    products, others = _sums(of_factors, [gradients[n] for n in beside], sent_as(), scale)
    rest = summed([gradients[n] for n in alone]) if alone else []
    by_number = dict(zip([*factors, *beside, *alone], [*products, *others, *rest], strict=True))
    return [by_number[n] for n in range(len(gradients))]


def _sums(compressed: Sequence[tuple], others: Sequence[tf.Tensor], dtype: tf.DType | None, scale: Any) -> tuple:
    """Returns sums over all replicas: of gradients with their memories, and of other tensors, in float32.

    A memory is replaced, unless a sum isn't finite.
    """
    gradients, memories = zip(*compressed, strict=True)
    replicas = this_step.count
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


# State that an optimizer keeps for compressed gradients, beside its slots.
#
# It is made when the optimizer is built, where it learns what it trains.


_ATTRIBUTE = "_toolkit_memories"
_WAITS = "_toolkit_sends_all_yet"


def memories_of(optimizer: Any, variables: Sequence[Any]) -> list[Memory | None]:
    """Returns each variable's state; None for variables whose gradients are sent exactly."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # Of a LossScaleOptimizer.
    kept = {} if optimizer.__dict__.get(_WAITS) else optimizer.__dict__.get(_ATTRIBUTE, {})
    return [kept.get(optimizer._var_key(variable)) if kept else None for variable in variables]


def _make_memories(optimizer: Any, variables: Sequence) -> None:
    exchange = options_of(optimizer._distribution_strategy).gradients
    if not variables:
        return
    _check(optimizer, exchange.rank)
    memories = {
        optimizer._var_key(variable): make_in_scope(
            optimizer, functools.partial(_make, variable, exchange.rank, number)
        )
        for number, variable in enumerate(variables)
        if _is_compressed(variable, exchange.rank)
    }
    object.__setattr__(optimizer, _ATTRIBUTE, memories)  # Keras would take them for the optimizer's own variables.


def _check(optimizer: Any, rank: int) -> None:
    """Checks that compression makes sense.

    Raises:
        StrategyError: It doesn't for this optimizer.
    """
    if not is_elementwise(optimizer):
        raise StrategyError(
            asked=f"gradients compressed by PowerSGD at rank {rank}, with {type(optimizer).__name__}",
            found="its update may depend on the whole layer's gradient, of which a part comes later",
            remedy="Use another optimizer, such as SGD or AdamW, or leave compression out; if this one updates each "
            "element by itself, set elementwise = True in its class",
        )


def check_smaller(model: keras.Model) -> None:
    """Checks that compression makes a gradient smaller.

    Raises:
        StrategyError: It makes none.
    """
    rank, variables = options_of(model.distribute_strategy).gradients.rank, model.trainable_variables
    if variables and not any(_is_compressed(variable, rank) for variable in variables):
        largest = max(variables, key=lambda variable: tf.TensorShape(variable.shape).num_elements())
        n, m = matrix_shape(largest.shape) if len(largest.shape) else (1, 1)
        raise StrategyError(
            asked=f"gradients compressed by PowerSGD at rank {rank}",
            found=f"no gradient gets smaller: the largest, of {largest.path}, is a matrix of {n} x {m}",
            remedy="Give a smaller rank, or leave compression out",
        )


def _is_compressed(variable: Any, rank: int) -> bool:
    plain = not layout_of(variable).in_shards and not getattr(variable, "overwrite_with_gradient", False)
    plain = plain and not is_table(variable)
    return plain and len(variable.shape) > 1 and shrinks(variable.shape, rank)


def _make(variable: Any, rank: int, number: int) -> Memory:
    n, m = matrix_shape(variable.shape)
    name = variable.path.replace("/", "_")
    # Rows of all replicas, each of which has its own. A checkpoint has all of them.
    unsent = ReplicaShardedVariable(
        keras.initializers.Zeros(),
        [replica_count() * n, m],
        layout=Layout(axis=0, among=Among.ALL),
        dtype="float32",
        trainable=False,
        name=f"{name}_unsent",
    )
    right = keras.Variable(
        tf.random.stateless_normal([m, rank], [number, 1905_13727]),
        trainable=False,
        aggregation="only_first_replica",
        synchronization="on_read",
        name=f"{name}_right",
    )
    return Memory(unsent, right)


def send_all(model: keras.Model, value: bool) -> None:
    """Makes a model's optimizers send whole gradients, or compress them, in what is traced from now on."""
    for optimizer in optimizers_of(model):
        object.__setattr__(getattr(optimizer, "inner_optimizer", optimizer), _WAITS, value)
