"""Whether replicas' rows are enough for a model's step, found out once for each kind of data."""

import dataclasses
import logging
from collections.abc import Callable, Collection
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.step import trial as trials
from toolkit.strategies.step.results import results_noted
from toolkit.strategies.step.trial import Trial

__all__ = ["Found", "shown"]

_LOG = logging.getLogger(__name__)
_METHODS = ("compute_loss", "compute_metrics")  # Of a model, which Keras's own steps call.


@dataclasses.dataclass(frozen=True)
class Found:
    """What is known of a step.

    Attributes:
        opened: Whether it needs the whole batch.
        trial: How it was found out; None if the step can't be traced without values, or need not be.
        sums: Whether the losses that it differentiates are sums over examples, and not means.
        summed_logs: The numbers of those scalars that it returns which are sums.
    """

    opened: bool
    trial: Trial | None = None
    sums: bool = False
    summed_logs: frozenset[int] = frozenset()


def shown(model: keras.Model, step: Callable, data: Any, whole: Collection[int]) -> Found:
    """Finds out what a step needs, outside of its replicas.

    Args:
        model: Built.
        step: Its `train_step` or `test_step`.
        data: A replica's part of a batch.
        whole: The numbers of its components that aren't by example.
    """
    kind = type(model)
    function = getattr(step, "__func__", None)
    own = function not in (keras.Model.train_step, keras.Model.test_step)
    own = own or any(getattr(kind, name) is not getattr(keras.Model, name) for name in _METHODS)
    if not own and not any(trials.may_mix(each) for each in model._flatten_layers()):
        return Found(opened=False)
    try:
        with model.distribute_strategy.scope(), results_noted(model) as noted:
            trial = trials.run(step, _any_size(data, whole), lambda: noted)
        trial.decide(own=own, metrics=model.metrics_variables)
    except Exception:  # The user's own code may raise anything on tensors without values.
        _LOG.debug("%s can't be run on tensors without values", step, exc_info=True)
        return Found(opened=own)
    return Found(opened=trial.opened, trial=trial, sums=trial.sums, summed_logs=trial.summed_logs)


def _any_size(data: Any, whole: Collection[int]) -> Any:
    def one(number: int, leaf: Any) -> Any:
        if not tf.is_tensor(leaf) or not leaf.shape.rank or number in whole:
            return leaf
        return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)

    leaves = [one(number, leaf) for number, leaf in enumerate(tf.nest.flatten(data))]
    return tf.nest.pack_sequence_as(data, leaves)
