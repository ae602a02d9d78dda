"""What a step of `fit` reports: the running metrics of all replicas, as one device would have them.

In a step each replica sees its own metrics only. Keras takes the mean of their results, which is right while replicas
have as many examples, and asks for each result by itself. Here the sums behind all results are added in one exchange.
"""

import weakref
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies import collectives

__all__ = ["are_of_all_replicas", "of_all_replicas"]

_known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # By id: tensors can't be hashed.


def of_all_replicas(model: Any, logs: Any) -> Any:
    """Returns a step's logs with the results of the model's metrics over all replicas, where it returned those.

    Args:
        model: A `keras.Model`, in a step.
        logs: What its `train_step` or `test_step` has returned.
    """
    sums = [v for v in model.metrics_variables if v.aggregation == "sum"]
    # As Keras does at the end of an epoch: others are a train_step's own.
    if not sums or not isinstance(logs, dict) or set(model.get_metrics_result()) != set(logs):
        return logs
    flat = tf.concat([tf.reshape(tf.cast(tf.convert_to_tensor(v), tf.float64), [-1]) for v in sums], 0)
    parts = tf.split(collectives.all_reduce(flat), [v.shape.num_elements() for v in map(tf.convert_to_tensor, sums)])
    totals = [(v, tf.cast(tf.reshape(part, v.shape), v.dtype)) for v, part in zip(sums, parts, strict=True)]
    with keras.StatelessScope(state_mapping=totals):
        results = keras.tree.map_structure(keras.ops.convert_to_tensor, model.get_metrics_result())
    for result in keras.tree.flatten(results):
        _known[id(result)] = result
    return {name: results[name] for name in logs}


def are_of_all_replicas(values: Any) -> bool:
    """Says whether `of_all_replicas` has returned these tensors: each replica has the same."""
    return all(_known.get(id(value)) is value for value in values)
