"""Gradients on their way to all replicas, and the plainest exchange of them: their sum.

A gradient is a tensor, or the `tf.IndexedSlices` of some rows of a table. Each is weighted by its replica's share, and
goes by one `Exchange`; `exchanges.py` lists them. Of a sum, tensors travel in packs, and rows are concatenated.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from toolkit.strategies.context import this_step
from toolkit.strategies.mesh import Among
from toolkit.strategies.step import collectives, overlap
from toolkit.strategies.step.rows import counts_the_batch
from toolkit.strategies.step.share import exchanged_in_graph
from toolkit.support.graphs import same_everywhere


@dataclasses.dataclass
class Gradients:
    """Gradients that are to become those of all replicas.

    Attributes:
        values: A tensor, `tf.IndexedSlices` or None for each variable. An exchange replaces those that it takes.
        variables: A `keras.Variable` for each gradient.
        optimizer: The one that is given them; None at a tape.
        weighted: The numbers of those that are weighted by this replica's share already, as of a scaled loss.
        alike: The numbers of those that all replicas have alike already.
        scale: By what all are multiplied in this step, against underflow.
    """

    values: list
    variables: Sequence
    optimizer: Any = None
    weighted: frozenset[int] = frozenset()
    alike: frozenset[int] = frozenset()
    scale: tf.Tensor | float = 1.0

    def __post_init__(self) -> None:
        share = this_step.share
        self._weight = None if share is None else share.exchanged_weight
        self._in_half = frozenset(
            () if share is None else (number for number in self.weighted if _computed_in_half(self.values[number]))
        )

    def of_shares(self, numbers: Sequence[int]) -> list:
        """Returns gradients by this replica's share, as they are summed."""
        return [self._by_share(number, self.values[number]) for number in numbers]

    def _by_share(self, number: int, gradient: Any) -> Any:
        if self._weight is None:
            return gradient if number in self.weighted else mapped(gradient, lambda values: values / this_step.count)
        weight = tf.cast(self._weight, gradient.dtype)
        factor = tf.cast(weight > 0, gradient.dtype) if number in self.weighted else weight
        # A replica without examples has no mean: 0 / 0.
        return mapped(gradient, lambda values: tf.math.multiply_no_nan(values, factor))

    def complete(self, numbers: Sequence[int], totals: Sequence) -> None:
        """Takes the sums over replicas in the place of gradients."""
        for number, total in zip(numbers, totals, strict=True):
            self.values[number] = _with_overflow(total) if number in self._in_half else total


class Exchange:
    """One way in which gradients become those of all replicas, in one step.

    Args:
        sent: All gradients of the step.

    Attributes:
        name: By which a checkpoint knows what it keeps; "" where it keeps nothing.
        numbers: Those that it takes, the last layers' first, because they are known first.
        now: Whether it exchanges them in this step.
        at_tape: Whether it takes gradients that a tape returns, before an optimizer is given them.
    """

    name = ""
    now = True
    at_tape = False

    def __init__(self, sent: Gradients) -> None:
        self.sent = sent
        self.numbers: list[int] = []

    @staticmethod
    def begin(optimizer: Any) -> bool:  # noqa: ARG004
        """Gives an optimizer what this exchange needs of it, and returns whether its gradients may take it."""
        return True

    @staticmethod
    def building(optimizer: Any, variables: Sequence) -> contextlib.AbstractContextManager:  # noqa: ARG004
        """A context in which Keras builds what all optimizers have, for these variables."""
        return contextlib.nullcontext()

    def choose(self, numbers: Sequence[int]) -> list[int]:
        """Returns the gradients that it takes, of those that no exchange before it in the list has taken."""
        return list(numbers)

    def run(self) -> None:
        """Replaces its gradients."""
        raise NotImplementedError

    def end(self) -> None:
        """Called when all exchanges have run."""

    @staticmethod
    def state(optimizer: Any) -> dict[str, Any]:  # noqa: ARG004
        """Returns the variables of which a checkpoint needs all replicas' values, by names that don't change."""
        return {}


class Sum(Exchange):
    """Each replica gets the sum of all replicas' gradients. It takes all that no other exchange takes."""

    at_tape = True

    def run(self) -> None:
        """Sums them, in packs."""
        self.sent.complete(self.numbers, summed(self.sent.of_shares(self.numbers)))


def values_of(gradient: Any) -> tf.Tensor:
    """Returns a gradient's values: of all rows or of some."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def mapped(gradient: Any, function: Callable) -> Any:
    """Applies a function to a gradient's values: of all rows or of some."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def sent_as() -> tf.DType | None:
    """Returns the dtype in which elements are sent in this step; None for their own."""
    dtype = tf.as_dtype(this_step.options.gradients.dtype)
    return dtype if dtype.size < 4 else None


def summed(gradients: list) -> list:
    """Returns the sums over all replicas of gradients of replicated variables.

    Args:
        gradients: Tensors or `tf.IndexedSlices`, in the order in which they are known.
    """
    known = (exchanged_in_graph() if this_step.share is None else this_step.share.in_graph).identical
    looked_up = [_lookups(each, known) for each in gradients]
    totals = iter(_summed([each for parts in looked_up for each in parts], known))
    return [_joined([next(totals) for _ in parts]) for parts in looked_up]


def _summed(gradients: list, known: list) -> list:
    # If rows are the same on every replica, such as positions in a sequence, they are added before they are squared,
    # as on one device. Rows that depend on the examples, such as words, are concatenated; if each replica has each of
    # them once, as a sparse lookup leaves them, so has one device.
    rows = [gradient.indices if isinstance(gradient, tf.IndexedSlices) else None for gradient in gradients]
    alike = [each is not None and same_everywhere(each, known) for each in rows]
    by_length = [each is not None and same_everywhere(each, known, _is_length) for each in rows]
    once = [each is not None and _are_distinct(each) for each in rows]
    given = [gradient.values if same else gradient for gradient, same in zip(gradients, alike, strict=True)]
    dtype, size = sent_as(), this_step.options.gradients.bytes_per_pack
    if this_step.on_cpus:
        # TensorFlow's collectives would keep the number and dtype of a device group's tensors for the process's life.
        totals = collectives.all_reduce_here(given, dtype)
    elif this_step.exchanges_overlap:
        totals = _while_computing(given, size, dtype)
    else:
        totals = _by_tensorflow(given, size or 0, dtype)
    for number, (total, gradient) in enumerate(zip(totals, gradients, strict=True)):
        if alike[number]:
            totals[number] = tf.IndexedSlices(total, gradient.indices, gradient.dense_shape)
        elif by_length[number]:
            totals[number] = _added(total)
        elif once[number]:
            totals[number] = _each_once(total)
    return totals


def _are_distinct(indices: Any) -> bool:
    """Whether no row is there twice: TensorFlow has looked the rows up by what `tf.unique` returns."""
    while not tf.executing_eagerly() and indices.op.type in ("Reshape", "Identity", "Cast", "StopGradient"):
        indices = indices.op.inputs[0]
    return not tf.executing_eagerly() and indices.op.type in ("Unique", "UniqueV2") and indices.value_index == 0


def _each_once(total: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds what replicas have of the same row."""
    indices, places = tf.unique(total.indices)
    values = tf.math.unsorted_segment_sum(total.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, total.dense_shape)


def _lookups(gradient: Any, known: list) -> list:
    """Returns the gradients by each lookup of a table, which TensorFlow concatenates, if some are of the same rows."""
    made = gradient.indices.op if isinstance(gradient, tf.IndexedSlices) and not tf.executing_eagerly() else None
    indices = list(made.inputs)[:-1] if made is not None and made.type == "ConcatV2" else []
    if not any(same_everywhere(each, known, _is_length) for each in indices):
        return [gradient]
    values = tf.split(gradient.values, [tf.size(each) for each in indices])
    return [tf.IndexedSlices(*each, gradient.dense_shape) for each in zip(values, indices, strict=True)]


def _joined(parts: list) -> Any:
    if len(parts) == 1:
        return parts[0]
    values, indices = (tf.concat(each, 0) for each in zip(*((x.values, x.indices) for x in parts), strict=True))
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def _is_length(operation: tf.Operation) -> bool:
    """Whether an operation returns a size of the batch's that isn't its rows, such as how long its texts are."""
    if this_step.share is None or operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return False
    return not counts_the_batch(operation.outputs[0], 0, this_step.share.batch)


def _added(total: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds the rows of all replicas, one after another, if they are the same ones: their data may be of other lengths.

    Args:
        total: All replicas' rows, which depend on no example, but on the length of each's part of the batch.
    """
    count, size = this_step.count, tf.size(total.indices)
    indices = tf.reshape(total.indices[: size // count * count], [count, -1])
    same = tf.logical_and(size % count == 0, tf.reduce_all(indices == indices[:1]))
    shape = tf.concat([[count, -1], tf.shape(total.values)[1:]], 0)
    values, indices = tf.cond(
        same,
        lambda: (tf.reduce_sum(tf.reshape(total.values, shape), 0), indices[0]),
        lambda: (total.values, total.indices),
    )
    values.set_shape([None, *total.values.shape[1:]])
    return tf.IndexedSlices(values, indices, total.dense_shape)


def of_first(gradient: Any) -> Any:
    """Returns the first replica's gradient."""
    first = this_step.replica == 0
    return mapped(gradient, lambda values: collectives.all_reduce(values if first else tf.zeros_like(values)))


def _computed_in_half(gradient: Any) -> bool:
    """Whether a gradient was computed in float16, where a batch's sum may overflow though its shares don't."""
    operation = getattr(gradient, "op", None) if tf.is_symbolic_tensor(gradient) else None
    if operation is None or operation.type not in ("Cast", "AddN"):
        return False
    return any(
        each.dtype == tf.float16 or (operation.type == "AddN" and _computed_in_half(each)) for each in operation.inputs
    )


def _with_overflow(total: tf.Tensor) -> tf.Tensor:
    """Returns a sum of float16 gradients with infinity where one device, which adds in float16, would overflow."""
    return tf.where(tf.math.is_finite(tf.cast(total, tf.float16)), total, total.dtype.as_numpy_dtype(float("inf")))


def _while_computing(gradients: list, bytes_per_pack: int | None, dtype: tf.DType | None) -> list:
    whole = [gradient for gradient in gradients if not isinstance(gradient, tf.IndexedSlices)]
    totals = iter(overlap.summed(whole, bytes_per_pack=bytes_per_pack, dtype=dtype))
    return [
        rows_of_replicas(gradient, Among.ALL, dtype) if isinstance(gradient, tf.IndexedSlices) else next(totals)
        for gradient in gradients
    ]


def rows_of_replicas(gradient: tf.IndexedSlices, among: Among, dtype: tf.DType | None) -> tf.IndexedSlices:
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
