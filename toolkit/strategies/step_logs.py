"""What a step of `fit` reports: what one device would report of the whole batch.

In a step each replica sees its own metrics and its own share of the batch only, and Keras takes the mean of what the
replicas return. That is right while they have as many examples. Here, whatever of it is the result of a metric is
computed anew from the sums of all replicas, which travel in one exchange. Any other scalar counts by its replica's
share.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from toolkit.strategies import collectives

__all__ = ["are_of_all_replicas", "of_all_replicas", "results_noted"]

_MOST_IN_FLOAT64 = 4096  # Elements of all metrics; above, as those of a confusion matrix, bytes count.
_known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # By id: tensors can't be hashed.
_here = threading.local()  # tf.distribute traces each replica in a thread of its own.


class _Result(NamedTuple):
    """A tensor that a metric's `result` returned, and its place among those."""

    tensor: Any
    metric: keras.Metric
    place: int


@contextlib.contextmanager
def results_noted(model: Any) -> Iterator[dict[int, _Result]]:
    """While entered by a replica, notes which tensors are results of a model's metrics, by the tensors' ids.

    A train_step may return them under names of its own, and beside others.
    """
    noted: dict[int, _Result] = {}
    metrics = [metric for metric in model.metrics if isinstance(metric, keras.Metric)]
    for metric in metrics:
        kept = vars(metric)  # Passes by what Keras does when an attribute is set.
        kept["_toolkit_steps"] = kept.get("_toolkit_steps", 0) + 1  # Of replicas, which take turns.
        kept.setdefault("result", functools.partial(_noting, metric))
    before, _here.noted = getattr(_here, "noted", None), noted
    try:
        yield noted
    finally:
        _here.noted = before
        for metric in metrics:
            kept = vars(metric)
            kept["_toolkit_steps"] -= 1
            if not kept["_toolkit_steps"]:
                del kept["_toolkit_steps"], kept["result"]


def _noting(metric: keras.Metric) -> Any:
    value = type(metric).result(metric)
    noted = getattr(_here, "noted", None)
    if noted is not None:
        noted |= {id(leaf): _Result(leaf, metric, place) for place, leaf in enumerate(keras.tree.flatten(value))}
    return value


def of_all_replicas(logs: Any, noted: dict[int, _Result], weight: Callable[[], tf.Tensor]) -> Any:
    """Returns a step's logs as one device would have them.

    Args:
        logs: What a `train_step` or `test_step` has returned: any structure.
        noted: What `results_noted` has noted in it.
        weight: Returns this replica's part of all replicas' examples, a float64 scalar; a collective.
    """
    leaves = keras.tree.flatten(logs)
    metrics = {id(r.metric): r.metric for r in (noted.get(id(leaf)) for leaf in leaves) if r is not None}
    results = _results(list(metrics.values()))

    def of_all(leaf: Any) -> Any:
        result = noted.get(id(leaf))
        if result is not None and id(result.metric) in results:
            whole = results[id(result.metric)][result.place]
        elif tf.is_tensor(leaf) and leaf.dtype.is_floating and leaf.shape.rank == 0:
            whole = collectives.all_reduce(leaf * tf.cast(weight(), leaf.dtype))
        else:
            return leaf
        _known[id(whole)] = whole
        return whole

    return keras.tree.pack_sequence_as(logs, [of_all(leaf) for leaf in leaves])


def _results(metrics: list[keras.Metric]) -> dict[int, list]:
    """Returns the results of metrics over all replicas, flat, by the metrics' ids."""
    sums = {id(v): v for metric in metrics for v in metric.variables if v.aggregation == "sum"}
    if not sums:
        return {}
    tensors = [tf.convert_to_tensor(v) for v in sums.values()]
    exact = sum(each.shape.num_elements() for each in tensors) <= _MOST_IN_FLOAT64
    wide = tf.float64 if exact else tf.float32
    flat = tf.concat([tf.reshape(tf.cast(each, wide), [-1]) for each in tensors], 0)
    parts = tf.split(collectives.all_reduce(flat), [each.shape.num_elements() for each in tensors])
    totals = [
        (v, tf.cast(tf.reshape(part, each.shape), each.dtype))
        for v, each, part in zip(sums.values(), tensors, parts, strict=True)
    ]
    with keras.StatelessScope(state_mapping=totals):
        return {
            id(metric): [keras.ops.convert_to_tensor(leaf) for leaf in keras.tree.flatten(type(metric).result(metric))]
            for metric in metrics
            if any(id(v) in sums for v in metric.variables)
        }


def are_of_all_replicas(values: Any) -> bool:
    """Says whether `of_all_replicas` has returned these tensors: each replica has the same."""
    return all(_known.get(id(value)) is value for value in values)
