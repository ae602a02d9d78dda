"""Whether replicas' rows are enough for a model's step, found out once for each kind of data."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Collection
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.context import here
from toolkit.strategies.step import trial as trials
from toolkit.strategies.step.results import results_noted
from toolkit.strategies.step.trial import Trial
from toolkit.support.graphs import outside

__all__ = ["Found", "Tries", "shown"]

_LOG = logging.getLogger(__name__)
_STEPS = ("train_step", "test_step", "predict_step")
_METHODS = ("compute_loss", "compute_metrics")  # Of a model, which Keras's own steps call.


@dataclasses.dataclass(frozen=True)
class Found:
    """What is known of a step.

    Attributes:
        opened: Whether it needs the whole batch.
        trial: How it was found out; None if the step can't be traced without values, or need not be.
        sums: Whether the losses that it differentiates are sums over examples, and not means.
        summed_logs: The numbers of those scalars that it returns which are sums.
        by_example: By the numbers of the tensors that it returns, whether they have a row for each example.
    """

    opened: bool
    trial: Trial | None = None
    sums: bool = False
    summed_logs: frozenset[int] = frozenset()
    by_example: dict[int, bool] = dataclasses.field(default_factory=dict)


class Tries:
    """What is known of one step of a model's, by the kind of its data.

    Args:
        model: It keeps what is found until its step function is made once more.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._found: dict[str, Found] = {}
        self._lock = threading.Lock()

    def of(self, step: Callable, data: Any, *, returns_rows: bool = False) -> Found:
        """Returns what is known of a step with such data, as `shown` does; the number of examples doesn't count."""
        with self._lock:
            tensors = [each for each in keras.tree.flatten(data) if tf.is_tensor(each)]
            key = str([(each.dtype.name, each.shape[1:] if each.shape.rank else None) for each in tensors])
            if key not in self._found:
                table = here.whole
                self._found[key] = outside(lambda: shown(self._model, step, data, table, returns_rows))
            return self._found[key]


def shown(model: keras.Model, step: Callable, data: Any, whole: Collection[int], returns_rows: bool = False) -> Found:
    """Finds out what a step needs, outside of its replicas.

    Args:
        model: Built.
        step: Its `train_step`, `test_step` or `predict_step`.
        data: A replica's part of a batch.
        whole: The numbers of its components that aren't by example.
        returns_rows: Whether each replica returns its own rows of what the step returns, as `predict` does.
    """
    kind = type(model)
    function = getattr(step, "__func__", None)
    own = function not in [getattr(keras.Model, each) for each in _STEPS]
    own = own or any(getattr(kind, each) is not getattr(keras.Model, each) for each in _METHODS)
    if not own and not any(trials.may_mix(each) for each in model._flatten_layers()):
        return Found(opened=False)
    leaves = tf.nest.flatten(data)
    if any(isinstance(leaf, tf.RaggedTensor) for leaf in leaves):  # Padding depends on the longest row of the batch.
        return Found(opened=True)
    try:
        with model.distribute_strategy.scope(), results_noted(model) as noted:
            trial = trials.run(step, _any_size(data, whole), lambda: noted, returns_rows)
        trial.decide(own=own, metrics=model.metrics_variables)
    except Exception:  # The user's own code may raise anything on tensors without values.
        _LOG.debug("%s can't be run on tensors without values", step, exc_info=True)
        return Found(opened=own or not any(isinstance(leaf, tf.SparseTensor) for leaf in leaves))
    return Found(trial.opened, trial, trial.sums, trial.summed_logs, trial.by_example)


def _any_size(data: Any, whole: Collection[int]) -> Any:
    def one(number: int, leaf: Any) -> Any:
        if not tf.is_tensor(leaf) or not leaf.shape.rank or number in whole:
            return leaf
        return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)

    leaves = [one(number, leaf) for number, leaf in enumerate(tf.nest.flatten(data))]
    return tf.nest.pack_sequence_as(data, leaves)
