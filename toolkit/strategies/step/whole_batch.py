"""Losses and metrics that don't follow from those of a batch's parts, computed of the whole batch."""

import enum
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.context import this_step
from toolkit.strategies.step.rows import Rows, mean_of_rows
from toolkit.strategies.step.share import Share, WholeShare, attached, counted, entered, update_mean
from toolkit.strategies.step.trial import calling
from toolkit.strategies.step.trusted import adds_by_row, has_value_by_row, traced
from toolkit.strategies.upstream import private
from toolkit.strategies.upstream.wrapping import attach
from toolkit.support.graphs import derives_from, outside

# Which losses and metrics follow from those of a batch's parts, as their graphs show; see `rows`.
#
# A mean over examples is the weighted mean of the parts' means, and a sum is the sum of their sums. A Dice loss, a mean
# over what a mask leaves, and a running maximum are neither: they need the whole batch. A function is traced once, in a
# graph that never runs, so that nothing it does counts.


class Kind(enum.Enum):
    """How a value of a batch follows from those of its parts."""

    EXAMPLES = "a value for each example; a metric's state that is a sum over them"
    MEAN = "one mean over examples; a metric's state that is a mean of batches' means over their examples"
    SUM = "a sum over examples; a metric's state that is a sum over batches"
    NEITHER = "neither"


def loss_kind(loss: keras.losses.Loss, y_true: Any, y_pred: Any) -> Kind:
    """Returns a loss's kind before weighting and reduction.

    Args:
        loss: Any.
        y_true: Tensors of the shapes and dtypes of labels, in any structure; their values don't matter.
        y_pred: The same of predictions.
    """
    if has_value_by_row(loss, y_pred):
        return Kind.EXAMPLES
    if type(loss).__call__ is not keras.losses.Loss.__call__:  # It weights and reduces in its own way.
        return Kind.NEITHER

    def converted(*given: Any) -> Any:  # As `Loss.__call__` passes them.
        return loss.call(*keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x, loss.dtype), given))

    return _of_value(traced(lambda given: converted(*given), (y_true, y_pred)))


def metric_kind(metric: keras.Metric, args: Sequence, kwargs: dict) -> Kind:
    """Returns the kind of a metric's state.

    Args:
        metric: Any; its state stays as it is.
        args: What its `update_state` is given: tensors of whose values nothing is asked.
        kwargs: The same, by name.
    """
    if adds_by_row(metric, kwargs.get("y_pred", args[1] if len(args) > 1 else args)):
        return Kind.EXAMPLES
    # Updates of TensorFlow's variables can't be traced apart. A state that begins with a number would begin with a
    # multiple of it on several replicas.
    own = any(isinstance(each, tf.Variable) for each in vars(metric).values())
    if own or outside(lambda: any(np.any(keras.ops.convert_to_numpy(v)) for v in metric.stateless_reset_state())):
        return Kind.NEITHER
    added = traced(lambda given: _additions(metric, *given), (tuple(args), kwargs))
    if added is None or all(each.is_sum for each in added):
        return Kind.NEITHER if added is None else Kind.EXAMPLES
    given = [each for each in (*args, *kwargs.values()) if each is not None]
    if isinstance(metric, keras.metrics.MeanMetricWrapper) and len(given) <= 2:  # Otherwise with weights.
        mean = traced(lambda pair: metric._fn(*pair, **metric._fn_kwargs), tuple(given))
        if _of_value(mean) in (Kind.EXAMPLES, Kind.MEAN):
            return Kind.MEAN
    return Kind.SUM


def _of_value(found: list[Rows] | None) -> Kind:
    if found is None or len(found) != 1:
        return Kind.NEITHER
    value = found[0]
    if value.by_row:
        return Kind.EXAMPLES
    if value.is_mean:
        return Kind.MEAN
    return Kind.SUM if value.is_sum else Kind.NEITHER


def _additions(metric: keras.Metric, args: Sequence, kwargs: dict) -> list[Any] | None:
    """Returns what an update adds to a metric's variables; None if it does anything else to them."""
    before = [tf.compat.v1.placeholder(v.dtype, v.shape) for v in metric.variables]
    after = metric.stateless_update_state(before, *args, **kwargs)
    added = [_added(old, tf.convert_to_tensor(new)) for old, new in zip(before, after, strict=True)]
    if any(each is None or (tf.is_tensor(each) and derives_from(each, before)) for each in added):
        return None
    return [each for each in added if tf.is_tensor(each)]


def _added(old: tf.Tensor, new: tf.Tensor) -> Any:
    """Returns what was added to a tensor, 0 for nothing, None if the other isn't the tensor and something added."""
    while new.op.type in ("Identity", "StopGradient"):
        new = new.op.inputs[0]
    if new is old:
        return 0
    if new.op.type not in ("Add", "AddV2", "Sub"):
        return None
    one, two = new.op.inputs
    if _added(old, one) == 0:
        return two
    return one if new.op.type != "Sub" and _added(old, two) == 0 else None


# Computes losses and metrics that don't follow from a batch's parts, on the whole batch on every replica.
#
# A compiled loss that isn't a mean over examples is asked once which kind it is (`loss_kind`). A sum is summed. Any
# other is computed of all replicas' labels and predictions, which travel in each step; a replica's gradients are those
# by its own predictions. A metric whose state isn't a sum is updated with all replicas' examples, too, so that each
# replica has the whole state.
#
# What is put in their places stands in `watch`: entries of the model's compiled losses, and an attribute of each
# metric.


_LOG = logging.getLogger(__name__)
_KINDS = "_toolkit_kinds"


def watch(model: Any) -> None:
    """Makes a model's compiled losses and metrics those of the whole batch. Later calls look for new ones."""
    compiled = getattr(model, "_compile_loss", None)
    # Keras wraps all compiled metrics into one.
    every = (each.metrics if type(each).__name__ == "CompileMetrics" else [each] for each in model.metrics)
    metrics = [each for some in every for each in some if isinstance(each, keras.Metric)]
    parts = [part for each in metrics for part in _with_parts(each)]
    if compiled is not None and compiled.built:
        _replace(compiled)
    if compiled is not None:
        attach(compiled, build=_build)
    attach(model, get_metrics_result=_results)
    for each in metrics:
        attach(each, update_state=_update)
    for part in parts:
        if type(part).update_state is keras.metrics.Mean.update_state:
            attach(part, update_state=update_mean)


def _with_parts(metric: keras.Metric) -> Iterator[keras.Metric]:
    """Yields a metric, the metrics among its attributes, and theirs."""
    yield metric
    for part in metric._metrics:
        yield from _with_parts(part)


def is_whole(metric: Any) -> bool:
    """Returns whether each replica has the whole state of a metric."""
    return any(kind in (Kind.SUM, Kind.NEITHER) for kind in vars(metric).get(_KINDS, {}).values())


def _results(original: Callable, model: Any) -> Any:
    """Prevents a metric's result from being what holds its variable.

    Of replicas that is nothing which Python can take for a number. Keras's variable is, and changes as it does on one
    device.
    """
    held = {id(v._value): v for v in model.metrics_variables}
    return keras.tree.map_structure(lambda leaf: held.get(id(leaf), leaf), original(model))


def _build(original: Callable, compiled: Any, *args: Any) -> None:
    original(compiled, *args)
    _replace(compiled)


def _replace(compiled: Any) -> None:
    compiled._flat_losses = [
        entry if isinstance(entry.loss, _BatchLoss) else entry._replace(loss=_BatchLoss(entry.loss))
        for entry in compiled._flat_losses
    ]


class _BatchLoss(keras.losses.Loss):
    """Replaces a loss in a compiled model.

    Args:
        loss: The loss.
    """

    def __init__(self, loss: keras.losses.Loss) -> None:
        super().__init__(name=loss.name, reduction=loss.reduction, dtype=loss.dtype)
        self.loss = loss
        self._kinds: dict[str, Kind] = {}

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        share, given = this_step.share, (y_true, y_pred, sample_weight)
        if this_step.view is not None and this_step.view.are_by_row(given):
            return this_step.view.by_row(lambda args, _: self(*args), given, {}, self.name)
        if share is None:
            return calling(self, given, lambda: self.loss(*given), mean_of_rows)
        if isinstance(share, WholeShare) or this_step.is_local:
            return self.loss(*given)
        kind = _once(self._kinds, (y_true, y_pred), lambda: loss_kind(self.loss, y_true, y_pred))
        masks = [private.masking.get_keras_mask(each) for each in keras.tree.flatten(y_pred)]
        # Keras multiplies one number for a batch by the mean of its weights.
        weighted = sample_weight is not None or any(mask is not None for mask in masks)
        if kind is Kind.EXAMPLES or (kind is Kind.MEAN and not weighted):
            return self.loss(y_true, y_pred, sample_weight)
        if kind is Kind.SUM and not weighted:
            value = self.loss(y_true, y_pred)
            # Replicas' losses are averaged.
            return tf.math.divide_no_nan(value, tf.cast(share.weight, value.dtype))
        if this_step.count > 1:
            _say(self.name)
        y_true, y_pred, sample_weight = _of_all(share, (y_true, y_pred, sample_weight))
        with entered(WholeShare()):
            return self.loss(y_true, y_pred, sample_weight)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """As for the loss."""
        return self.loss.call(y_true, y_pred)


@functools.lru_cache(maxsize=64)
def _say(name: str) -> None:
    _LOG.warning(
        "The loss %s isn't a mean over examples: every replica computes it for the whole batch, and labels and "
        "predictions travel in each step",
        name,
    )


def _update(original: Callable, metric: Any, *args: Any, **kwargs: Any) -> Any:
    """Updates a metric with the whole batch if its state isn't a sum over examples."""
    if this_step.recorded is not None:
        this_step.recorded.update((args, kwargs))
    if this_step.view is not None:
        return this_step.view.update(functools.partial(_update, original, metric), args, kwargs)
    share, update = this_step.share, functools.partial(original, metric)
    ranks = [each.shape.rank for each in keras.tree.flatten((args, kwargs)) if tf.is_tensor(each)]
    if share is None or not any(ranks):
        return update(*args, **kwargs)
    kinds = vars(metric).setdefault(_KINDS, {})
    kind = _once(kinds, (args, kwargs), lambda: metric_kind(metric, args, kwargs))
    if this_step.is_local and kind is Kind.NEITHER:
        raise StrategyError(
            asked=f"metric {metric.name} while replicas train by themselves (LocalSteps)",
            found="its state isn't a sum over examples, and theirs can't be added up",
            remedy="Leave it out of compile while you train, and compile again with it to evaluate; or leave local out",
        )
    if kind is Kind.EXAMPLES or this_step.is_local:
        return update(*args, **kwargs)
    if kind is Kind.MEAN:
        # Without weights of the script's, which may have stood there as None.
        return update(*args[:2], **{**kwargs, "sample_weight": counted(share)})
    share.keeps_whole(metric, over_batches=kind is Kind.SUM)
    args, kwargs = _of_all(share, (args, kwargs))
    with entered(WholeShare()):
        return update(*args, **kwargs)


def _of_all(share: Share, given: Any) -> Any:
    def one(x: Any) -> Any:
        by_row = tf.is_tensor(x) and x.shape.rank != 0
        return attached(x, share.rows_of_all(x), share.rows_of_all) if by_row else x

    return keras.tree.map_structure(one, given)


def _once(kinds: dict[str, Kind], given: Any, make: Callable[[], Kind]) -> Kind:
    """Returns an earlier result for such shapes and dtypes; the number of examples doesn't count."""
    leaves = [each for each in keras.tree.flatten(given) if tf.is_tensor(each)]
    key = str([(each.dtype.name, each.shape[1:] if each.shape.rank else None) for each in leaves])
    if key not in kinds:
        kinds[key] = make()
    return kinds[key]
