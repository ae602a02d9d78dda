"""A step that sees the whole batch, and layers that compute this replica's rows of it.

What stands between the layers that a step calls, such as similarities, statistics or a mean over what a mask leaves, is
computed of the whole batch by every replica, and so is one device's, whatever it is. A layer is given this replica's
rows, and its output's rows are gathered, if something between layers reads them.

There are two kinds of tensors. A whole one is the same on every replica, and so is its gradient. Of a replica's own
rows the gradient is divided by the replica's share w, as gradients are multiplied by w when they are exchanged.

    gather(own): the rows of all;      gradient: own rows of the upstream, divided by w
    cut(whole): own rows;              gradient: the rows of all of (upstream * w)
    mean(own), a scalar: sum of w * x; gradient: the upstream

A tensor has as many rows as the batch, and is no part of it, where a script has written that number out: noise beside
the batch, a first state. Of a layer that is given both, every replica computes all.

What a step draws between layers is the same on every replica; a metric that it updates counts each row once.
"""

import contextlib
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.context import this_step
from toolkit.strategies.step import collectives
from toolkit.strategies.step.draws import Draws
from toolkit.strategies.step.rows import Call
from toolkit.strategies.step.share import Share, WholeShare, attached, entered
from toolkit.strategies.step.trial import Reads, Trial, is_row_dimension, logits_of, of_any_size
from toolkit.strategies.step.trusted import is_by_row
from toolkit.strategies.upstream import private, replaced
from toolkit.strategies.upstream.attributes import layers_within

_LOG = logging.getLogger(__name__)
_SEED = 0x5EED  # Of draws in a program without a seed. All processes need the same.


def _seed(original: Callable, op_seed: Any) -> Any:
    """Makes TensorFlow's random operations between layers draw the same on every replica."""
    first, _ = original(1)
    return (first if first is not None else _SEED), next(this_step.view.seeds) if op_seed is None else op_seed


def _call_layer(original: Callable, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Hands a layer's call to the view of the whole batch."""
    return this_step.view.call(original, layer, args, kwargs)


class ViewShare(WholeShare):
    """The share of a step that sees the whole batch: losses count as they are, and gradients by this replica's rows.

    Args:
        rows: The share of this replica's rows.
    """

    def __init__(self, rows: Share) -> None:
        super().__init__()
        self.at_tape, self.batch = rows.at_tape, rows.batch
        self.reads_gradients = rows.reads_gradients
        self._rows = rows

    @property
    def exchanged_weight(self) -> tf.Tensor:
        """The weight of this replica's gradients in the exchange."""
        return self._rows.weight

    keeps_whole = Share.keeps_whole  # One replica updates it, and the others' states don't count.


class View:
    """The whole batch, for one replica's step.

    Args:
        rows: The share of this replica's rows.
        trial: What is known of the step; None if it couldn't be traced without values.
        name: The step, for a message.
        sized: Whether all replicas have as many rows as this one, if the batch's shape shows their number.

    Attributes:
        share: The step's own share: all of the batch.
        seeds: Numbers the random operations between layers.
        replicated: As of `Trial`.
    """

    def __init__(self, rows: Share, trial: Trial | None, name: str, *, sized: bool = True) -> None:
        replaced.LAYER.answer(view=_call_layer)
        replaced.OPERATION_SEED.answer(view=_seed)
        self.share = ViewShare(rows)
        self.seeds = itertools.count(1)
        self.replicated = trial is not None and trial.replicated
        self._rows, self._trial, self._name = rows, trial, name
        self._sized = sized and this_step.rows is None
        self._own: dict[int, tuple[Any, Any]] = {}  # By whole tensors' ids: the tensor, and its own rows.
        self._calls = [] if trial is None else [_layers(trial.calls)]
        self._gathered: list[tuple[str, Any]] = []
        self._size: int | None = None  # Of the batch, where that is known when the step is traced.

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A context for what sees the whole batch."""
        with entered(self.share), this_step.having(view=self, draws=None):
            yield

    @contextlib.contextmanager
    def _by_row(self, share: Share, rows: Iterable[Any]) -> Iterator[None]:
        if share is not self._rows:
            share.batch = [each for each in rows if isinstance(each, tf.Tensor)]
        with entered(share), this_step.having(view=None, draws=Draws(share)):
            yield

    def open(self, data: Any) -> Any:
        """Returns a step's batch as the step sees it."""
        known_of = iter(self._trial.data if self._trial is not None else ())

        def one(number: int, leaf: Any) -> Any:
            if not tf.is_tensor(leaf):
                return leaf
            in_trial = next(known_of, None)
            if not leaf.shape.rank or number in this_step.tables:
                return leaf
            reads = Reads() if in_trial is None else self._trial.reads(in_trial)  # type: ignore[union-attr]
            if leaf.shape[0] is not None and isinstance(leaf, tf.Tensor) and not tf.executing_eagerly():
                if self._sized:
                    self._size = self._size or leaf.shape[0] * this_step.count
                else:
                    leaf = of_any_size(leaf)
            return self._whole(leaf, reads, "the batch")

        return tf.nest.pack_sequence_as(data, [one(*pair) for pair in enumerate(tf.nest.flatten(data))])

    def call(self, original: Callable, layer: Any, args: tuple, kwargs: dict) -> Any:
        """Calls a layer: with this replica's rows, or, where it needs the whole batch, as a part of the step."""
        if self.share.in_branch:  # Replicas can't exchange rows in a branch or a loop; each computes all.
            return original(layer, *args, **kwargs)
        record = self._next(layer)
        tensors = [x for x in keras.tree.flatten((args, kwargs)) if tf.is_tensor(x)]
        of_rows = [is_row_dimension(each) for each in record.inputs] if record is not None else [True] * len(tensors)
        opened = self.replicated or not self.is_any_by_row([*itertools.compress(tensors, of_rows)])
        opened = opened or (record.opened if record is not None else not is_by_row(layer, tensors))
        if opened:
            self._calls.append(_layers(record.calls if record is not None else []))
            try:
                return original(layer, *args, **kwargs)
            finally:
                self._calls.pop()
        outputs = iter(record.outputs if record is not None else ())
        reads = lambda: self._trial.reads(next(outputs, None)) if record is not None else Reads()  # type: ignore[union-attr] # noqa: E731
        kept: list = []

        def computed(args: Any, kwargs: Any) -> tuple:
            outputs = original(layer, *args, **kwargs)
            kept.extend(vars(each).get("_losses") for each in layers_within(layer))
            return outputs, [list(losses or ()) for losses in kept]

        found, added = self.by_row(computed, args, kwargs, layer.name, reads, of_rows)
        for losses, means in zip(kept, added, strict=True):
            if means:
                losses[:] = means
        return found

    def by_row(
        self,
        function: Callable,
        args: Any,
        kwargs: Any,
        name: str,
        reads: Callable[[], Reads] = Reads,
        of_rows: list[bool] | None = None,
    ) -> Any:
        """Calls a function with this replica's rows, and returns its results as the step sees them.

        Args:
            function: Takes positional and named arguments.
            args: The positional ones.
            kwargs: The named ones.
            name: The function, for a message.
            reads: Returns how the step uses the next of the function's results.
            of_rows: For each tensor that the function takes, whether it has a row for each of the batch's.
        """
        tensors, share = iter(of_rows or ()), self._rows

        def own(x: Any) -> Any:
            nonlocal share
            if not tf.is_tensor(x) or not next(tensors, True):
                return x
            rows = self.cut(x)
            if rows is not x and id(x) not in self._own and share is self._rows:
                share = self._rows.of_part(rows, x)  # It may be a part of the batch, as what a mask leaves.
            if self._trial is None or tf.executing_eagerly():
                return rows
            unsized = of_any_size(rows)  # So that rows are told from other sizes.
            return rows if unsized is rows else attached(rows, unsized, of_any_size)

        args, kwargs = keras.tree.map_structure(own, (args, kwargs))
        with self._by_row(share, keras.tree.flatten((args, kwargs))):
            outputs = function(args, kwargs)

        def one(leaf: Any) -> Any:
            if not tf.is_tensor(leaf):
                return leaf
            use = reads()
            if leaf.shape.rank == 0:
                return self._mean(leaf, share) if leaf.dtype.is_floating else leaf
            by_row = self._is_by_row(leaf, own=True) if use.by_row is None else use.by_row
            return self._whole(leaf, use, name) if by_row else leaf

        return keras.tree.map_structure(one, outputs)

    def update(self, update: Callable, args: Any, kwargs: Any) -> Any:
        """Updates a metric so that each row counts once."""
        if self.are_by_row((args, kwargs)):
            return self.by_row(lambda args, kwargs: update(*args, **kwargs), args, kwargs, "a metric")
        if this_step.replica != 0:
            return None
        with this_step.having(view=None):
            return update(*args, **kwargs)

    def _next(self, layer: Any) -> Call | None:
        """Returns what the trial has found of this call; None if it had no such call here."""
        waiting = self._calls[-1] if self._calls else []
        if waiting and waiting[0].of is layer:
            return waiting.pop(0)
        return None

    def is_any_by_row(self, given: Any) -> bool:
        """Returns whether a tensor of some has a row for each of the batch's."""
        return any(self._is_by_row(each) for each in keras.tree.flatten(given) if tf.is_tensor(each))

    def are_by_row(self, given: Any) -> bool:
        """Returns whether all tensors of some have a row for each of the batch's, but for scalars."""
        tensors = [each for each in keras.tree.flatten(given) if tf.is_tensor(each)]
        return self.is_any_by_row(tensors) and all(each.shape.rank == 0 or self._is_by_row(each) for each in tensors)

    def _is_by_row(self, x: Any, own: bool = False) -> bool:
        if id(x) in self._own or is_row_dimension(x):
            return True
        if not x.shape.rank:
            return False
        if not tf.executing_eagerly():
            size = self._size and (self._size // this_step.count if own else self._size)
            return bool(size and x.shape[0] and x.shape[0] % size == 0)
        count = max(1, int(self._rows.count)) if own else int(self._rows.total_count)  # None is a copy of one.
        return count > 0 and x.shape[0] % count == 0

    def cut(self, x: Any) -> Any:
        """Returns this replica's rows of a tensor of the step's; what isn't by row is returned as it is."""
        if not tf.is_tensor(x) or not self._is_by_row(x):
            return x
        if id(x) in self._own:
            return self._own[id(x)][1]
        return attached(x, self._rows.rows_of_this(x), self.cut)

    def _whole(self, own: Any, reads: Reads, name: str) -> Any:
        found, logits = self._of_all(own, reads, name), logits_of(own)
        if logits is not None:  # Which are read in its place.
            found = tf.identity(found) if found is own else found
            found._keras_logits = self._whole(logits, reads.logits or Reads(), name)
        if not reads.differentiated:
            self._own[id(found)] = (found, own)
        return found

    def _of_all(self, own: Any, reads: Reads, name: str) -> Any:
        if reads.values:
            found = self._rows.rows_of_all(own)
            self._gathered.append((name, own))
            self.share.in_graph.identical += tf.nest.flatten(found, expand_composites=True)
            mask = private.masking.get_keras_mask(own)
            if mask is not None:
                private.masking.set_keras_mask(found, self._rows.rows_of_all(mask))
        elif reads.shape:  # Nothing is computed of it but its size.
            sizes = tf.concat([[self._count_of(own)], tf.shape(own)[1:]], 0)
            found = tf.broadcast_to(tf.zeros([], own.dtype), sizes) if own.dtype != tf.string else tf.fill(sizes, "")
            self.share.in_graph.identical.append(found)
        else:
            found = own
            if isinstance(own, tf.Tensor) and not tf.executing_eagerly():  # Nobody takes its size for the batch's.
                found = of_any_size(own)
            mask = private.masking.get_keras_mask(own)
            if mask is not None:
                private.masking.set_keras_mask(found, mask)
        if not tf.executing_eagerly() and isinstance(found, tf.Tensor):
            rows = own.shape[0] and self._size and own.shape[0] * this_step.count
            found.set_shape([rows, *own.shape[1:]])
        return found

    def _count_of(self, own: Any) -> tf.Tensor:
        """Returns how many rows all replicas have of a tensor. It is a collective."""
        return tf.cast(self._rows.total(tf.cast(tf.shape(own)[0], tf.float64)), tf.int32)

    def _mean(self, own: Any, share: Share) -> Any:
        """Returns the mean over rows of which this replica has that over its own.

        Args:
            own: Its mean.
            share: Of these rows. The gradient will be multiplied by the share of the batch's.
        """
        weight = tf.cast(share.weight, own.dtype)
        times = tf.ones([], own.dtype)
        if share is not self._rows:
            times = tf.math.divide_no_nan(weight, tf.cast(self._rows.weight, own.dtype))

        @tf.custom_gradient
        def mean(x: tf.Tensor) -> tuple:
            return collectives.all_reduce(tf.math.multiply_no_nan(x, weight)), lambda upstream: upstream * times

        found = mean(own)
        self.share.in_graph.identical.append(found)
        return found

    def describe(self) -> None:
        """Says once which tensors a step exchanges because it looks at the whole batch."""
        if self._gathered and this_step.replica == 0:
            what = ", ".join(f"{name} {_size(own)}" for name, own in self._gathered)
            why = "" if self._trial is not None else " (it can't be traced without values)"
            _LOG.info("%s computes with the whole batch%s: replicas exchange the rows of %s", self._name, why, what)


def _size(own: Any) -> str:
    return f"{own.dtype.name}{[*own.shape[1:]]}"


def _layers(calls: list[Call]) -> list[Call]:
    return [each for each in calls if isinstance(each.of, keras.layers.Layer)]


# A step can't take the rows of a batch apart: their number isn't known when it is traced.


_APART = re.compile("Cannot infer argument `num`|unknown first dimension")


@contextlib.contextmanager
def rows_stay_together() -> Iterator[None]:
    """A context in which a step is traced.

    Raises:
        StrategyError: The step takes rows apart, as `tf.unstack` does.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        if not _APART.search(str(error)):
            raise
        raise StrategyError(
            asked="the step takes a tensor apart along axis 0, such as by tf.unstack",
            found="axis 0 of each component of a batch is the batch, whose size isn't known when the step is traced",
            remedy="Take rows by their number, such as data[0], or give what was stacked there as components of their "
            "own, such as (anchors, positives)",
        ) from error
