"""Each replica's share of a step's batch, and what losses and means must be so that the share can weight gradients.

Replica r has n_r of a batch's n examples, and its share is w_r = n_r / n. A script's `train_step`, which may have been
written for one device, computes a mean l_r over n_r examples; the whole batch's mean is l = sum over r of w_r * l_r,
and its gradient is sum over r of w_r * g_r. So a loss stays l_r, `optimizer.apply` multiplies gradients by w_r and
all-reduces (`step/exchanges.py`), and in a step of `fit` a strategy says that there is one replica, so
that nobody divides a loss by their number. The user's own loop around `strategy.run` sums, as TensorFlow's guides have
it.

A loss that Keras divides by the replica's own sum of weights or mask, d_r, becomes l_r * (d_r / sum over r of d_r) /
w_r. What TensorFlow's `compute_average_loss` divides by the whole batch's examples is divided by w_r, for the same
reason.

Keras has no public hook for it: `reduced_values` answers in the place of its reduction.
`tests/strategies/test_losses.py` fails when it changes.

After that stand means in one's own loop (`batch_mean`), Keras's reductions, and the losses that layers add.
"""

import contextlib
import copy
import dataclasses
from collections import UserList
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.context import this_step
from toolkit.strategies.mesh import Among, layout_of, replica_count
from toolkit.strategies.step import collectives
from toolkit.strategies.step.rows import ALIKE, Of, Rows, mean_of_rows
from toolkit.strategies.step.trial import calling
from toolkit.strategies.upstream import private
from toolkit.strategies.upstream.attributes import layers_within

_BYTES = [bytes([code]) for code in range(256)]


@dataclasses.dataclass
class ExchangedInGraph:
    """What replicas have exchanged in a graph, whose tensors may belong to several of them.

    Attributes:
        identical: Gradients that are the same on every replica.
        shards: Those of variables that steps use by shard, by replica and the variables' ids: parts of one.
        drawn: Seeds by which each replica draws its own numbers.
    """

    identical: list[tf.Tensor] = dataclasses.field(default_factory=list)
    shards: dict[tuple[int, int], tf.Tensor] = dataclasses.field(default_factory=dict)
    drawn: list[tf.Tensor] = dataclasses.field(default_factory=list)

    def add(self, gradients: Sequence, variables: Sequence) -> None:
        """Records gradients of all replicas, or of shards."""
        self.identical += tf.nest.flatten(gradients, expand_composites=True)
        replica, pairs = this_step.replica, zip(gradients, variables, strict=True)
        self.shards |= {(replica, id(v)): g for g, v in pairs if layout_of(v).in_shards and not layout_of(v).used_whole}


def exchanged_in_graph() -> ExchangedInGraph:
    """Returns what has been exchanged in the graph being traced; nothing if none is."""
    graph = _graph()
    if graph is None:
        return ExchangedInGraph()
    if not hasattr(graph, "_toolkit_exchanged"):
        graph._toolkit_exchanged = ExchangedInGraph()  # As long as the graph exists.
    return graph._toolkit_exchanged


class Share:
    """This replica's share of a step's batch.

    Args:
        rows: How many examples it has.
        weight: Its weight, where that isn't its part of all replicas' examples.
        has_own: Whether it has any, a bool scalar; None where it surely has. Otherwise it computes with a copy of one.

    Attributes:
        in_loss: Whether the loss that is being differentiated is weighted already: one of `scaled`.
        scaled: Losses that a LossScaleOptimizer has scaled, and that `step/optimizer.py` has weighted before.
        scaled_by: The ids of those optimizers: gradients that no tape has exchanged are weighted when they are given.
        at_tape: Whether gradients are exchanged where a tape returns them.
        has_gradients: Is given gradients that a tape has returned and that are this replica's; None if nobody asks.
        differentiates: Whether a tape is at work now.
        batch: The tensors of the replica's part of the batch.
        in_graph: What tapes have exchanged.
        sums: Whether losses that are differentiated are sums over examples, and not means.
        reads_gradients: Whether a script's step may do more with gradients than hand them to an optimizer.
    """

    reads_gradients = True
    has_gradients: Callable[[list[tf.Tensor]], None] | None = None

    def __init__(
        self, rows: Any, weight: tf.Tensor | None = None, *, at_tape: bool = False, has_own: Any = None
    ) -> None:
        self.in_loss = self.differentiates = False
        self.at_tape = at_tape
        self.sums = False
        self.has_own = has_own
        self.batch: list[tf.Tensor] = []
        self.in_graph = exchanged_in_graph()
        self._graph = _graph()
        self.scaled: list[tf.Tensor] = []
        self.scaled_by: set[int] = set()
        self.count = tf.cast(rows, tf.float64)
        self._made: dict[str, tf.Tensor] = {}  # Of the properties below.
        self._weight = weight
        self._of: Share | None = None  # That of the batch, of whose rows this is a part's.

    def of_batch(self, data: Any) -> "Share":
        """Records the replica's part of a batch, in any structure, and returns the same."""
        leaves = [leaf for number, leaf in enumerate(tf.nest.flatten(data)) if number not in this_step.tables]
        self.batch = [each for each in leaves if isinstance(each, tf.Tensor)]
        return self

    @property
    def in_branch(self) -> bool:
        """Whether a branch, a loop or a function in the step is being traced, where replicas can't exchange."""
        return _graph() is not self._graph

    @property
    def in_function(self) -> bool:
        """Whether that is a function, and neither a branch nor a loop, nor in one."""
        graph = _graph()
        while graph is not None and graph is not self._graph:
            if getattr(graph, "is_control_flow_graph", False):
                return False
            graph = getattr(graph, "outer_graph", None)
        return self.in_branch

    @property
    def weight(self) -> tf.Tensor:
        """Its part of all replicas' examples, a float64 scalar. The first read is a collective."""
        if self._weight is None:
            self._weight = tf.math.divide_no_nan(self.count, self.total_count)
        return self._weight

    @property
    def exchanged_weight(self) -> tf.Tensor:
        """By what this replica's gradients are multiplied when they are exchanged: its part of the whole batch."""
        return self.weight if self._of is None else self._of.exchanged_weight

    @property
    def counts(self) -> tf.Tensor:
        """How many examples each replica has, float64 [replicas]. The first read is a collective.

        It is made in the step's own graph, also where a branch, a loop or what XLA compiles asks for it: there,
        replicas can't meet.
        """
        return self._in_step("counts", lambda: collectives.timed(collectives.of_each, self.count))

    @property
    def total_count(self) -> tf.Tensor:
        """How many examples all replicas have, a float64 scalar."""
        counts = self.counts
        return self._in_step("total_count", lambda: tf.reduce_sum(counts))

    @property
    def firsts(self) -> tf.Tensor:
        """How many examples stand before each replica's, float64 [replicas]."""
        counts, order = self.counts, collectives.order_of_rows()

        def make() -> tf.Tensor:
            before = tf.cumsum(tf.gather(counts, order), exclusive=True)
            return tf.gather(before, [order.index(each) for each in range(len(order))])

        return self._in_step("firsts", make)

    @property
    def first(self) -> tf.Tensor:
        """How many examples stand before this replica's, a float64 scalar."""
        firsts = self.firsts
        return self._in_step("first", lambda: firsts[this_step.place])

    def _in_step(self, name: str, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns what is made once, in the step's own graph."""
        if name not in self._made:
            graph = contextlib.nullcontext() if self._graph is None else self._graph.as_default()
            with graph, this_step.having(piece=None if self.in_branch else this_step.piece):
                self._made[name] = make()
        return self._made[name]

    def total(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the sum of all replicas' tensors, which has no gradient. It is a collective."""
        return collectives.all_reduce(self.own(x))

    def own(self, x: tf.Tensor) -> tf.Tensor:
        """Returns a tensor of this replica's examples, which is zero if it has none."""
        return x if self.has_own is None else tf.where(self.has_own, x, tf.zeros_like(x))

    def rows_of_all(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the rows of all replicas' tensors, in the batch's order. It is a collective.

        Each replica computes the same of them. The gradient is that by the replica's own rows, as it is before it is
        weighted.
        """
        if self.has_own is not None:
            x = first_rows(x, tf.where(self.has_own, tf.constant(tf.int32.max), 0))

        def back(upstream: tf.Tensor, first: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
            own = self._own_rows(upstream, first, size)
            return tf.math.divide_no_nan(own, tf.cast(self.exchanged_weight, own.dtype))

        return _rows_of_all(x, back)

    def of_all(self, x: tf.Tensor, of: Rows) -> tf.Tensor:
        """Returns the whole batch's value of which this replica has its part's. It is a collective."""
        if of.of is Of.ROWS:
            return self.rows_of_all(x)
        exact = x if x.dtype.is_floating or x.dtype.is_complex else tf.cast(x, tf.float64)
        own = tf.cast(self.weight, exact.dtype)
        # A sum counts as it is, but of a replica without examples not at all.
        whole = collectives.all_reduce(tf.math.multiply_no_nan(exact, tf.sign(own) if of.is_sum else own))
        return tf.cast(whole, x.dtype)

    def rows_of_this(self, whole: tf.Tensor) -> tf.Tensor:
        """Returns this replica's rows of a tensor that all have alike; its gradient is the rows of all replicas'.

        Args:
            whole: As many rows as the batch has, or a multiple.
        """
        size = tf.cast(tf.shape(whole)[0], tf.float64)
        begin, end = (tf.cast(size * at / self.total_count, tf.int32) for at in (self.first, self.first + self.count))
        if self.has_own is not None:  # A replica without examples has a copy of one.
            begin = tf.minimum(begin, tf.maximum(tf.shape(whole)[0] - 1, 0))
            end = tf.where(self.has_own, end, tf.maximum(end, begin + 1))
        return self._own_rows(whole, begin, end - begin)

    def of_part(self, own: tf.Tensor, whole: tf.Tensor) -> "Share":
        """Returns the share of rows that may be a part of the batch's.

        Args:
            own: This replica's of them.
            whole: All of them.
        """
        rows, total = (tf.cast(tf.shape(each)[0], tf.float64) for each in (own, whole))
        counts, firsts, all_rows = self.counts, self.firsts, self.total_count

        def of_each() -> tf.Tensor:
            begin, end = (tf.floor(total * at / all_rows) for at in (firsts, firsts + counts))  # As `rows_of_this`.
            return end - begin

        found = copy.copy(self)
        found._of, found._made = self, {}
        counts = found._in_step("counts", of_each)
        found.count = counts[this_step.place]
        found._weight = self.own(tf.math.divide_no_nan(rows, total))
        return found

    def _own_rows(self, whole: tf.Tensor, first: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        if whole.dtype.is_complex:
            return _complex(self._own_rows(_pairs(whole), first, size))
        if not whole.dtype.is_floating:
            return whole[first : first + size]

        @tf.custom_gradient
        def cut(x: tf.Tensor) -> tuple:
            def gradient(upstream: Any) -> tf.Tensor:
                upstream = tf.convert_to_tensor(upstream)
                return self.rows_of_all(upstream * tf.cast(self.exchanged_weight, upstream.dtype))

            return x[first : first + size], gradient

        return cut(whole)

    def keeps_whole(self, metric: keras.Metric, *, over_batches: bool) -> None:  # noqa: ARG002
        """Gives each replica the whole state of a metric that isn't a sum over examples."""
        for variable in metric.variables:
            _keep_first_replica(variable)


def _keep_first_replica(variable: Any) -> None:
    """Makes a metric's variable, of which each replica has its own, read as the first replica's value and not as a sum.

    Args:
        variable: A `keras.Variable`.
    """
    held = variable._value
    if isinstance(held, tf.distribute.DistributedValues):
        held._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
        variable._aggregation = "only_first_replica"


class WholeShare(Share):
    """The share of a process that has the whole batch.

    Args:
        note: Takes metrics whose state isn't a sum; None where nobody asks for them.
    """

    def __init__(self, note: Callable[[keras.Metric], None] | None = None) -> None:
        super().__init__(0, weight=tf.ones([], tf.float64))
        self._note = note

    def total(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the same."""
        return x

    rows_of_all = total

    def keeps_whole(self, metric: keras.Metric, *, over_batches: bool) -> None:
        """Records a metric whose state isn't a sum, not even over batches."""
        if self._note is not None and not over_batches:
            self._note(metric)


def attached(own: Any, made: Any, move: Callable[[Any], Any]) -> Any:
    """Returns a tensor that was made of another's rows, with what Keras has attached to that: a mask, logits.

    Args:
        own: The other.
        made: The tensor.
        move: Makes the same of what is attached.
    """
    for name in ("_keras_mask", "_keras_logits"):
        value = getattr(own, name, None)
        if value is not None:
            setattr(made, name, move(value))
    return made


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def entered(share: Share | None) -> contextlib.AbstractContextManager[None]:
    """A context in which this is the share of the step."""
    return this_step.having(share=share)


def weigh(x: tf.Tensor) -> tf.Tensor:
    """Returns a tensor unchanged, with a gradient weighted by this replica's share.

    Where replicas exchange activations, a gradient that goes to another replica has to be weighted on its way.
    """
    return _scaled(x, lambda gradient, weight: gradient * weight)


def unweigh(x: tf.Tensor) -> tf.Tensor:
    """Undoes `weigh` where gradients come from others, because they will be weighted when they are exchanged."""
    return _scaled(x, tf.math.divide_no_nan)


def _scaled(x: tf.Tensor, scale: Callable) -> tf.Tensor:
    share = this_step.share
    if share is None:
        return x
    weight = tf.cast(share.exchanged_weight, x.dtype)

    @tf.custom_gradient
    def same(x: tf.Tensor) -> tuple:
        return tf.identity(x), lambda gradient: gradient if share.in_loss else scale(gradient, weight)

    return same(x)


def batch_rows(values: Any) -> tf.Tensor:
    """Returns the rows of the whole batch; see `toolkit.strategies.batch_rows`."""
    values, share = tf.convert_to_tensor(values), this_step.share
    if share is not None:
        return share.rows_of_all(values)
    if this_step.count == 1:
        return calling("batch_rows", values, lambda: tf.identity(values), lambda *_: ALIKE)
    # In one's own loop, gradients are sums over replicas.
    return _rows_of_all(values, lambda upstream, first, size: collectives.all_reduce(upstream)[first : first + size])


def _rows_of_all(x: Any, back: Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]) -> Any:
    """Returns all replicas' rows, of any kind, in the batch's order.

    Args:
        x: This replica's.
        back: Takes an upstream gradient, and the first and the number of this replica's rows. Returns the gradient.
    """
    if isinstance(x, tf.SparseTensor):
        sizes, place = collectives.rows_of_all(x.dense_shape[:1])
        before = tf.reduce_sum(sizes[:place])
        indices, _ = collectives.rows_of_all(x.indices + tf.one_hot(0, x.dense_shape.shape[0], before, dtype=tf.int64))
        shape = tf.concat([tf.reduce_sum(sizes, keepdims=True), x.dense_shape[1:]], 0)
        return tf.SparseTensor(indices, _rows_of_all(x.values, back), shape)
    if isinstance(x, tf.RaggedTensor):
        lengths = [_rows_of_all(each, back) for each in x.nested_row_lengths()]
        return tf.RaggedTensor.from_nested_row_lengths(_rows_of_all(x.flat_values, back), lengths)
    if x.dtype == tf.string:
        return _texts_of_all(x)
    if x.dtype.is_complex:
        return _complex(_rows_of_all(_pairs(x), back))
    if not x.dtype.is_floating:  # TensorFlow has no exchange for bools and short integers.
        return tf.cast(collectives.rows_of_all(tf.cast(x, tf.int64))[0], x.dtype)

    @tf.custom_gradient
    def gather(x: tf.Tensor) -> tuple:
        rows, first = collectives.rows_of_all(x)
        return rows, lambda upstream: back(tf.convert_to_tensor(upstream), first, tf.shape(x)[0])

    return gather(x)


def first_rows(x: Any, count: tf.Tensor) -> Any:
    """Returns at most so many rows of a tensor, which may be sparse or ragged."""
    if not isinstance(x, tf.SparseTensor):
        return x[:count]
    rest = x.dense_shape[1:]
    rows = tf.minimum(tf.cast(count, tf.int64), x.dense_shape[0])
    return tf.sparse.slice(x, tf.zeros_like(x.dense_shape), tf.concat([[rows], rest], 0))


def _texts_of_all(x: tf.Tensor) -> tf.Tensor:
    """Returns the texts of all replicas, which are exchanged as bytes."""
    sizes = tf.strings.length(x)
    longest = collectives.all_reduce_max(tf.reduce_max(tf.concat([[1], tf.reshape(sizes, [-1])], 0)), among=Among.ALL)
    codes, _ = collectives.rows_of_all(tf.cast(tf.io.decode_raw(x, tf.uint8, fixed_length=longest), tf.int64))
    kept = tf.sequence_mask(collectives.rows_of_all(sizes)[0], longest)
    return tf.strings.reduce_join(tf.where(kept, tf.gather(tf.constant(_BYTES), codes), ""), -1)


def _pairs(x: tf.Tensor) -> tf.Tensor:
    """Returns complex numbers as real and imaginary parts along a last axis."""
    return tf.stack([tf.math.real(x), tf.math.imag(x)], -1)


def _complex(pairs: tf.Tensor) -> tf.Tensor:
    return tf.complex(pairs[..., 0], pairs[..., 1])


def batch_mean(values: Any, weights: Any = None) -> tf.Tensor:
    """Returns this replica's part of a mean over the whole batch; see `toolkit.strategies.batch_mean`."""
    return calling("batch_mean", (values, weights), lambda: _batch_mean(values, weights), mean_of_rows)


def _batch_mean(values: Any, weights: Any) -> tf.Tensor:
    values = tf.convert_to_tensor(values)
    weights = tf.ones_like(values) if weights is None else tf.cast(weights, values.dtype) * tf.ones_like(values)
    share = this_step.share
    sum_over_all = collectives.all_reduce if share is None else share.total
    total = tf.stop_gradient(sum_over_all(tf.reduce_sum(weights)))
    part = tf.math.divide_no_nan(tf.reduce_sum(values * weights), total)
    return part if share is None else tf.math.divide_no_nan(part, tf.cast(share.weight, part.dtype))


def update_mean(original: Callable, metric: Any, values: Any, sample_weight: Any = None) -> Any:
    """Weights a scalar that is a mean over this replica's share by that share."""
    share = this_step.share
    if share is not None and not keras.ops.shape(values):
        if sample_weight is None:
            sample_weight = counted(share)
        elif 0 in this_step.tables and not keras.ops.shape(sample_weight):
            # Keras counts the rows of the first component, of which every replica has all.
            sample_weight = tf.cast(sample_weight, tf.float64) * tf.cast(counted(share), tf.float64)
    elif share is not None and _counts_own(sample_weight, share):  # Keras's, of a loss that isn't reduced.
        sample_weight = tf.cast(share.total_count, values.dtype)
    return original(metric, values, sample_weight)


def _counts_own(weight: Any, share: Share) -> bool:
    """Whether a weight is the number of rows that a replica has of a component of its batch."""
    op = getattr(weight, "op", None) if tf.is_symbolic_tensor(weight) and weight.shape.rank == 0 else None
    if op is None or op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return False
    sized = op.inputs[0].op.inputs[0]
    while sized.op.type == "PlaceholderWithDefault":
        sized = sized.op.inputs[0]
    return any(each is sized for each in share.batch) and tf.get_static_value(op.inputs[1]) == 0


def counted(share: Share) -> tf.Tensor:
    """Returns a replica's weight for a batch's mean, in a sum where a full batch counts as the number of replicas."""
    return share.weight * this_step.count


def reduced_values(
    original: Callable,
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """Reduces as Keras does, and corrects the divisor from this replica's to its part of the whole one."""
    given = (values, sample_weight, mask)
    scalar = reduction not in (None, "none") and (keras.ops.ndim(values) or _given(sample_weight, mask))
    reduced = lambda: original(*given, reduction, dtype)  # noqa: E731
    in_trial = scalar and this_step.recorded is not None
    value = calling("reduction", given, reduced, mean_of_rows) if in_trial else reduced()
    share, count = this_step.share, this_step.count
    if this_step.is_local and reduction == "sum" and share is not None and keras.ops.ndim(values):
        return value * replica_count()  # The whole batch's divisor, as far as this replica knows.
    undivided = this_step.is_local or (share is None and count == 1)
    undivided = undivided or not (keras.ops.ndim(values) or _given(sample_weight, mask))  # The loss reduces itself.
    if undivided or reduction in (None, "none") or value.shape.rank != 0:
        return value
    own = _divisor(sample_weight, mask, reduction, value.dtype)
    if reduction == "sum":
        # A sum over replicas, whose losses are averaged.
        return value if share is None else tf.math.divide_no_nan(value, tf.cast(share.weight, value.dtype))
    if own is None:
        return value
    if share is None:
        return value * tf.math.divide_no_nan(own, collectives.all_reduce(own)) * count
    part = tf.math.divide_no_nan(own, share.total(own))
    return value * tf.math.divide_no_nan(part, tf.cast(share.weight, value.dtype))


def _given(*weights: Any) -> bool:
    return any(each is not None for each in weights)


def _divisor(sample_weight: Any, mask: Any, reduction: str, dtype: Any) -> tf.Tensor | None:
    """Returns the divisor of this replica's sum in Keras; None if it is the number of elements."""
    if reduction == "mean_with_sample_weight" and _given(sample_weight, mask):
        weights = None if sample_weight is None else tf.cast(sample_weight, dtype)
        own = tf.reduce_sum(private.apply_mask(weights, mask, dtype=dtype, reduction=reduction))
    elif reduction in ("mean", "sum_over_batch_size") and mask is not None:
        own = tf.reduce_sum(tf.cast(mask, dtype))
    else:
        return None
    return tf.stop_gradient(own)


# The losses that layers add, by replica: the replicas of a process are threads that take turns.
#
# Keras keeps it in a list of each layer's. In layers of a model of several replicas that list is one in which every
# replica sees what it has put there itself.


_LOSSES = "_losses"


class _ByReplica(UserList):
    """A list for each replica; if there is none, the first one's."""

    def __init__(self, shared: Any) -> None:
        self._kept = {0: list(shared)}

    @property
    def data(self) -> list:  # type: ignore[override]
        """This replica's."""
        return self._kept.setdefault(this_step.replica, [])

    def __reduce__(self) -> tuple:
        return list, (list(self),)

    def __getitem__(self, place: Any) -> Any:
        return self.data[place]


def keep_losses_apart(model: Any) -> None:
    """Makes a model's layers keep their losses by replica, also those that a step calls without the model."""
    for layer in layers_within(model):
        kept = vars(layer)  # Avoids Keras's actions when an attribute is set.
        if not isinstance(kept[_LOSSES], _ByReplica):
            kept[_LOSSES] = _ByReplica(kept[_LOSSES])


def clear_losses(original: Callable, model: Any) -> None:
    """Makes layers that the model has made since keep theirs so, too. Keras calls it when a call of it begins."""
    if this_step.strategy is not None:
        keep_losses_apart(model)
    original(model)
