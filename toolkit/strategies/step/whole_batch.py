"""Computes losses and metrics that don't follow from a batch's parts, on the whole batch on every replica.

A compiled loss that isn't a mean over examples is asked once which kind it is (see `kinds`). A sum is summed. Any
other is computed of all replicas' labels and predictions, which travel in each step; a replica's gradients are those by
its own predictions. A metric whose state isn't a sum is updated with all replicas' examples, too, so that each replica
has the whole state.

What is put in their places stands in `watch`: entries of the model's compiled losses, and an attribute of each metric.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from toolkit.strategies.context import here
from toolkit.strategies.step.batch_share import Share, WholeShare, counted, entered, update_mean
from toolkit.strategies.step.kinds import Kind, loss_kind, metric_kind
from toolkit.strategies.step.rows import mean_of_rows
from toolkit.strategies.step.trial import calling
from toolkit.support.wrapping import attach

__all__ = ["is_whole", "watch"]

_LOG = logging.getLogger(__name__)
_KINDS = "_toolkit_kinds"


def watch(model: Any) -> None:
    """Makes a model's compiled losses and metrics those of the whole batch. Later calls look for new ones."""
    compiled = getattr(model, "_compile_loss", None)
    if compiled is not None:
        attach(compiled, "build", _build)
        if compiled.built:
            _replace(compiled)
    attach(model, "get_metrics_result", _results)
    for metric in model.metrics:
        # Keras wraps all compiled metrics into one.
        for each in metric.metrics if type(metric).__name__ == "CompileMetrics" else [metric]:
            if isinstance(each, keras.Metric):
                attach(each, "update_state", _update)
                for part in _with_parts(each):
                    if type(part).update_state is keras.metrics.Mean.update_state:
                        attach(part, "update_state", update_mean)


def _with_parts(metric: keras.Metric) -> Iterator[keras.Metric]:
    """Yields a metric, the metrics among its attributes, and theirs."""
    yield metric
    for part in metric._metrics:
        yield from _with_parts(part)


def is_whole(metric: Any) -> bool:
    """Returns whether each replica has the whole state of a metric."""
    return any(kind in (Kind.SUM, Kind.WHOLE) for kind in vars(metric).get(_KINDS, {}).values())


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
        share, given = here.share, (y_true, y_pred, sample_weight)
        if here.view is not None and here.view.is_any_by_row(given):
            return here.view.by_row(lambda args, _: self(*args), given, {}, self.name)
        if share is None:
            return calling(self, given, lambda: self.loss(*given), mean_of_rows)
        if isinstance(share, WholeShare) or here.alone:
            return self.loss(*given)
        kind = _once(self._kinds, (y_true, y_pred), lambda: loss_kind(self.loss, y_true, y_pred))
        if kind is Kind.EXAMPLES:
            return self.loss(y_true, y_pred, sample_weight)
        if kind is Kind.SUM and sample_weight is None:
            value = self.loss(y_true, y_pred)
            # Replicas' losses are averaged.
            return tf.math.divide_no_nan(value, tf.cast(share.weight, value.dtype))
        if here.step.count > 1:
            _say(self.name)
        masks = [backend.get_keras_mask(each) for each in keras.tree.flatten(y_pred)]
        y_true, y_pred, sample_weight = _of_all(share, (y_true, y_pred, sample_weight))
        for each, mask in zip(keras.tree.flatten(y_pred), masks, strict=True):
            if mask is not None:
                backend.set_keras_mask(each, share.rows_of_all(mask))
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
    if here.recorded is not None:
        here.recorded.update((args, kwargs))
    if here.view is not None:
        return here.view.update(functools.partial(_update, original, metric), args, kwargs)
    share, update = here.share, functools.partial(original, metric)
    ranks = [each.shape.rank for each in keras.tree.flatten((args, kwargs)) if tf.is_tensor(each)]
    if share is None or here.alone or not any(ranks):
        return update(*args, **kwargs)
    kinds = vars(metric).setdefault(_KINDS, {})
    kind = _once(kinds, (args, kwargs), lambda: metric_kind(metric, args, kwargs))
    if kind is Kind.EXAMPLES:
        return update(*args, **kwargs)
    if kind is Kind.MEAN:
        return update(*args, **{**kwargs, "sample_weight": counted(share)})
    share.keeps_whole(metric, over_batches=kind is Kind.SUM)
    args, kwargs = _of_all(share, (args, kwargs))
    with entered(WholeShare()):
        return update(*args, **kwargs)


def _of_all(share: Share, given: Any) -> Any:
    return keras.tree.map_structure(
        lambda each: share.rows_of_all(each) if tf.is_tensor(each) and each.shape.rank != 0 else each, given
    )


def _once(kinds: dict[str, Kind], given: Any, make: Callable[[], Kind]) -> Kind:
    """Returns an earlier result for such shapes and dtypes; the number of examples doesn't count."""
    leaves = [each for each in keras.tree.flatten(given) if tf.is_tensor(each)]
    key = str([(each.dtype.name, each.shape[1:] if each.shape.rank else None) for each in leaves])
    if key not in kinds:
        kinds[key] = make()
    return kinds[key]
