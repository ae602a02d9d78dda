"""One device's random numbers on every replica: each draws its rows of what one device draws for the whole batch.

The generator of TensorFlow's stateless operations, Philox, counts: block k of four 32-bit numbers, or of two 64-bit
ones, is a function of a key and of counter + k. All replicas have the same key, so a replica with the rows from f on
skips the blocks of the rows before them. Nothing is drawn twice, and nothing is exchanged but the numbers of rows.

    shape [n, ...], of uniform and normal numbers           skipped to: block f * (numbers per row) / 4
    [..., n, ...], or as many counts as numbers happen to need    drawn for the whole batch; own rows of it
    [64, 32], a shape without the batch's rows              as it is: all replicas draw alike

Where nobody knows which rows a replica has, as in one's own loop or in a step in which replicas train by themselves,
each draws by its own seed (`next_seed`). TensorFlow's operations with their own state draw by a seed that
depends on the graph; replicas have one each (`operation_seed`).
"""

import contextlib
import functools
import logging
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from toolkit.strategies.context import this_step
from toolkit.strategies.mesh import Among
from toolkit.strategies.step.rows import counts_the_batch
from toolkit.strategies.step.share import Share, exchanged_in_graph
from toolkit.strategies.upstream import private
from toolkit.support.frames import line_of, users_frame

_LOG = logging.getLogger(__name__)
_PHILOX = (1, 3)  # TensorFlow's numbers of it, and of the generator that it chooses itself.
_TRIES = 64  # Counts that the kernels of truncated normals keep for each number.


class Draws:
    """How a replica draws what one device would draw for its rows.

    Args:
        share: The replica's share of the batch.
    """

    def __init__(self, share: Share) -> None:
        self.share = share

    def drawn(self, draw: Callable, shape: tf.Tensor, counter: tf.Tensor, each: int, counts: int) -> tf.Tensor:
        """Returns this replica's rows of a draw, to which it skips.

        Args:
            draw: Takes a shape and a counter.
            shape: The shape of this replica's numbers.
            counter: Where one device begins.
            each: How many numbers are made of a group of counts.
            counts: How many counts are in such a group.
        """
        sizes = _static(shape)
        axis = self._axis(shape, sizes)
        if axis is None:
            return draw(shape, counter)
        if axis:
            return self._cut(draw(self._of_all(shape, axis), counter), shape, axis)
        size = tf.reduce_prod(tf.cast(shape, tf.int64))
        start = _int64(self.share.first) * (size // tf.maximum(_int64(self.share.count), 1))
        skipped = tf.stack([start // each * counts, tf.zeros([], tf.int64)])
        counter = tf.bitcast(tf.bitcast(counter, tf.int64) + skipped, tf.uint64)
        if sizes is not None and math.prod(size or 1 for size in sizes[1:]) % each == 0:
            return draw(shape, counter)  # Rows begin where groups do.
        flat = draw(tf.reshape(size + each - 1, [1]), counter)  # XLA compiles for sizes, not for where a slice begins.
        found = tf.reshape(tf.slice(flat, [start % each], [size]), shape)
        found.set_shape(sizes)
        return found

    def whole(self, draw: Callable, shape: tf.Tensor, given: Sequence[Any]) -> tf.Tensor | None:
        """Returns this replica's rows of a draw of the whole batch; None if it can't be made here.

        Args:
            draw: Takes a shape and the parameters.
            shape: The shape of this replica's numbers.
            given: Parameters of the distribution; of some each row may have its own.
        """
        axis = self._axis(shape, _static(shape))
        if axis is None:
            return draw(shape, given)
        rank = shape.shape[0]

        def is_by_row(x: Any) -> bool:
            place = axis - rank + x.shape.rank if tf.is_tensor(x) and rank and x.shape.rank else -1
            return place >= 0 and x.shape[place] != 1

        if any(map(is_by_row, given)) and (self.share.in_branch or axis):
            return None
        given = [self._with_others(x) if is_by_row(x) else x for x in given]
        return self._cut(draw(self._of_all(shape, axis), given), shape, axis)

    def _axis(self, shape: tf.Tensor, sizes: list[int | None] | None) -> int | None:
        """Returns which axis of a shape counts the batch's rows; None if none does."""
        if tf.executing_eagerly():
            return 0 if self._is_multiple(shape) else None
        if sizes is None:
            return 0
        unknown = [n for n, size in enumerate(sizes) if size is None]
        return next((n for n in unknown if counts_the_batch(shape, n, self.share.batch)), None)

    def _is_multiple(self, shape: tf.Tensor) -> bool:
        """Whether a shape whose origin isn't known is one of rows: a single row divides everything."""
        count, first = max(1, int(self.share.count)), int(shape[0]) if len(shape) else 0
        return first > 0 and (first == count or (count > 1 and first % count == 0))

    def _times(self, shape: tf.Tensor, axis: int) -> tf.Tensor:
        """How often a row counts along an axis."""
        return tf.cast(shape[axis], tf.int64) // tf.maximum(_int64(self.share.count), 1)

    def _of_all(self, shape: tf.Tensor, axis: int) -> tf.Tensor:
        size = tf.cast(self._times(shape, axis) * _int64(self.share.total_count), shape.dtype)
        return tf.concat([shape[:axis], [size], shape[axis + 1 :]], 0)

    def _cut(self, drawn: tf.Tensor, shape: tf.Tensor, axis: int) -> tf.Tensor:
        first = tf.cast(_int64(self.share.first) * self._times(shape, axis), shape.dtype)
        # A replica without examples has a copy of one, and takes any row.
        first = tf.minimum(first, tf.shape(drawn, shape.dtype)[axis] - shape[axis])
        own = tf.slice(drawn, tf.one_hot(axis, tf.size(shape), first, dtype=shape.dtype), shape)
        own.set_shape(_static(shape))
        return own

    def _with_others(self, x: tf.Tensor) -> tf.Tensor:
        """Returns all replicas' rows of a parameter, with a gradient by this replica's."""
        rows, others = self.share, tf.stop_gradient(self.share.rows_of_all(tf.stop_gradient(x)))
        if rows.has_own is not None:
            x = x[: tf.where(rows.has_own, tf.constant(tf.int32.max), 0)]
        each = tf.shape(others, tf.int64)[0] // tf.maximum(_int64(rows.total_count), 1)
        first = _int64(rows.first) * each
        return tf.concat([others[:first], x, others[first + tf.shape(x, tf.int64)[0] :]], 0)


class UnitDraws(Draws):
    """How a replica draws for some units of a layer, of the rows of all replicas of its group.

    Args:
        share: The replica's share of the batch.
        rows: How many rows the layer has of each replica, with padding.
    """

    def __init__(self, share: Share, rows: tf.Tensor) -> None:
        super().__init__(share)
        self._rows = _int64(rows)

    def drawn(self, draw: Callable, shape: tf.Tensor, counter: tf.Tensor, each: int, counts: int) -> tf.Tensor:  # noqa: ARG002
        """Returns the numbers of shape [rows, units, ...] of what one device draws for all rows and units."""
        members, place = this_step.members[Among.GROUP]
        total = _int64(self.share.total_count)
        units = shape[1] * len(members)
        whole = draw(tf.concat([tf.cast([total], shape.dtype), [units], shape[2:]], 0), counter)
        firsts = tf.gather(_int64(self.share.firsts), members)
        rows = tf.reshape(firsts[:, None] + tf.range(self._rows), [-1])
        mine = whole[:, place * shape[1] : (place + 1) * shape[1]]
        found = tf.gather(mine, tf.minimum(rows, total - 1))
        found.set_shape(_static(shape))
        return found


def of_units(rows: tf.Tensor) -> contextlib.AbstractContextManager[None]:
    """A context in which a layer draws for some units of the rows of all replicas of its group.

    Args:
        rows: As of `UnitDraws`.
    """
    found = None if this_step.draws is None else UnitDraws(this_step.draws.share, rows)
    return this_step.having(draws=found)


def _int64(x: Any) -> tf.Tensor:
    return tf.cast(x, tf.int64)


def _static(shape: tf.Tensor) -> list[int | None] | None:
    """Returns the sizes of a shape that are known when it is traced; None if not even their number is."""
    found = private.constant_value_as_shape(shape)
    return None if found.rank is None else found.as_list()


# The answers in the place of TensorFlow's stateless operations.


def numbers(original: Callable, shape: Any, key: Any, counter: Any, alg: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws numbers, each from its own part of a block."""
    dtype = args[0] if args else kwargs.get("dtype", tf.float32)
    return _drawn(original, shape, key, counter, alg, args, kwargs, tf.as_dtype(dtype), 1)


def normal(original: Callable, shape: Any, key: Any, counter: Any, alg: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws normal numbers. XLA makes pairs of them along an axis, so that they depend on all of a draw's shape."""
    if not _is_compiled():
        return numbers(original, shape, key, counter, alg, *args, **kwargs)
    return _of_whole(original, _tensor(shape), key, counter, alg, args, kwargs)


def integers(original: Callable, shape: Any, key: Any, counter: Any, alg: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws integers between two others, which have the result's dtype."""
    least = args[0] if args else kwargs["minval"]
    return _drawn(original, shape, key, counter, alg, args, kwargs, tf.convert_to_tensor(least).dtype, 1)


def truncated(original: Callable, shape: Any, key: Any, counter: Any, alg: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws truncated normal numbers, for which the kernels keep counts to draw some again; XLA needs none."""
    dtype = tf.as_dtype(args[0] if args else kwargs.get("dtype", tf.float32))
    tries = 1 if _is_compiled() else _TRIES * _in_a_block(dtype)
    return _drawn(original, shape, key, counter, alg, args, kwargs, dtype, tries)


def _is_compiled() -> bool:
    """Whether numbers are XLA's: of a piece, or because one device would have all of the step compiled."""
    return this_step.piece is not None or this_step.compiled_alone


def by_xla(original: Callable, shape: Any, key: Any, counter: Any, alg: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws what XLA draws also where it compiles nothing else, since its numbers aren't the kernels'."""
    if this_step.piece is not None or this_step.recorded is not None:
        return original(shape, key, counter, alg, *args, **kwargs)

    def draw(shape: tf.Tensor, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
        return original(shape, key, counter, alg, *args, **kwargs)

    shape = _tensor(shape)
    drawn = tf.function(draw, autograph=False, jit_compile=True)(shape, key, counter)
    drawn.set_shape(_static(shape))
    return drawn


def _drawn(
    original: Callable, shape: Any, key: Any, counter: Any, alg: Any, args: tuple, kwargs: Any, dtype: Any, tries: int
) -> Any:
    shape = _tensor(shape)
    if isinstance(alg, int) and alg in _PHILOX:
        return this_step.draws.drawn(
            lambda shape, counter: original(shape, key, counter, alg, *args, **kwargs),
            shape,
            counter,
            _in_a_block(dtype),
            tries,
        )
    return _of_whole(original, shape, key, counter, alg, args, kwargs)


def _of_whole(original: Callable, shape: Any, key: Any, counter: Any, alg: Any, args: tuple, kwargs: Any) -> Any:
    return this_step.draws.whole(lambda shape, _: original(shape, key, counter, alg, *args, **kwargs), shape, ())


def gamma(original: Callable, shape: Any, key: Any, counter: Any, alg: Any, alpha: Any, **kwargs: Any) -> Any:
    """Draws what needs another number of counts for each, by rows' own parameters."""

    def draw(shape: tf.Tensor, given: Sequence[Any]) -> Any:
        return original(shape, key, counter, alg, given[0], **kwargs)

    own = [counter[0], counter[1] + tf.cast(this_step.replica, tf.uint64)]
    found = this_step.draws.whole(draw, _tensor(shape), [alpha])
    return original(shape, key, tf.stack(own), alg, alpha, **kwargs) if found is None else found


def by_seed(original: Callable, shape: Any, seed: Any, **kwargs: Any) -> Any:
    """The same of operations that take a seed, and their parameters by name."""
    names = [name for name in kwargs if name in ("counts", "probs", "lam")]

    def draw(shape: tf.Tensor, given: Sequence[Any], seed: Any = seed) -> Any:
        return original(shape, seed, **{**kwargs, **dict(zip(names, given, strict=True))})

    given = [kwargs[name] for name in names]
    found = this_step.draws.whole(draw, _tensor(shape), given)
    return draw(shape, given, _own(seed)) if found is None else found


def between(original: Callable, shape: Any, seed: Any, *limits: Any, **kwargs: Any) -> Any:
    """The same of truncated normal numbers, whose means, deviations and limits may be rows' own."""

    def draw(shape: tf.Tensor, given: Sequence[Any], seed: Any = seed) -> Any:
        return original(shape, seed, *given, **kwargs)

    found = this_step.draws.whole(draw, _tensor(shape), limits)
    return draw(shape, limits, _own(seed)) if found is None else found


def classes(original: Callable, logits: Any, num_samples: Any, seed: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws classes by rows of logits."""
    logits = tf.convert_to_tensor(logits)

    def draw(_: tf.Tensor, given: Sequence[Any]) -> Any:
        return original(given[0], num_samples, seed, *args, **kwargs)

    found = this_step.draws.whole(draw, tf.stack([tf.shape(logits)[0], num_samples]), [logits])
    return original(logits, num_samples, _own(seed), *args, **kwargs) if found is None else found


def _tensor(shape: Any) -> tf.Tensor:
    return shape if tf.is_tensor(shape) else tf.convert_to_tensor(shape, tf.int32)


def _in_a_block(dtype: tf.DType) -> int:
    return 2 if dtype.size == 8 else 4


# Seeds of replicas' own, where one device's numbers can't be had.


def _own(seed: Any) -> tf.Tensor:
    seed = tf.convert_to_tensor(seed)
    return seed + tf.constant([0, this_step.replica * 0x9E37_79B1 % 2**31], seed.dtype)


def next_seed(original: Callable, generator: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives each replica its own seeds, where it isn't known which rows it has: copies of a generator are equal."""
    seed = original(generator, *args, **kwargs)
    if not tf.is_tensor(seed) or this_step.draws is not None or this_step.view is not None:
        return seed
    if this_step.replica:  # The first replica's are one device's.
        seed = _own(seed)
    exchanged_in_graph().drawn.append(seed)
    return seed


@functools.lru_cache(maxsize=64)
def _say_stateful(line: str) -> None:
    _LOG.debug(
        "%s draws by a state of TensorFlow's: no two replicas draw the same, but neither do they draw what one device "
        "draws. By keras.random or tf.random.stateless_* they do",
        line,
    )


def operation_seed(original: Callable, op_seed: Any) -> Any:
    """Gives operations with a state their own seed on each replica."""
    _say_stateful(line_of(users_frame(sys._getframe(1))))
    first, second = original(op_seed)
    return first, second if second is None else (second + this_step.replica * 0x9E37_79B1) % 2**31
