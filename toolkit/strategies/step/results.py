"""Which tensors of a step are results of metrics: a step may return them under its own names, and beside others."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from toolkit.strategies.context import here, known

__all__ = ["Result", "results_noted"]

_VARIABLES = (tf.Variable, keras.Variable, tf.distribute.DistributedValues)


class Result(NamedTuple):
    """A tensor that a metric's `result` returned, and its position in the result."""

    tensor: Any
    metric: keras.Metric
    place: int


@contextlib.contextmanager
def results_noted(model: Any) -> Iterator[dict[int, Result]]:
    """A context in which a replica records which tensors are results of a model's metrics, by the tensors' ids.

    A train_step may return them under its own names, and beside others.
    """
    noted: dict[int, Result] = {}
    metrics = [metric for metric in model.metrics if isinstance(metric, keras.Metric)]
    for metric in metrics:
        kept = vars(metric)  # Avoids Keras's actions when an attribute is set.
        kept["_toolkit_steps"] = kept.get("_toolkit_steps", 0) + 1  # Of replicas, which take turns.
        kept.setdefault("result", functools.partial(_noting, metric))
    try:
        with known(noted=noted):
            yield noted
    finally:
        for metric in metrics:
            kept = vars(metric)
            kept["_toolkit_steps"] -= 1
            if not kept["_toolkit_steps"]:
                del kept["_toolkit_steps"], kept["result"]


def _noting(metric: keras.Metric) -> Any:
    value = keras.tree.map_structure(
        lambda x: tf.convert_to_tensor(x) if isinstance(x, _VARIABLES) else x, type(metric).result(metric)
    )
    if here.noted is not None:
        here.noted |= {id(leaf): Result(leaf, metric, place) for place, leaf in enumerate(keras.tree.flatten(value))}
    return value
