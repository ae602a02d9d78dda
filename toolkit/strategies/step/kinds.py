"""Which losses and metrics follow from those of a batch's parts, as their graphs show; see `rows`.

A mean over examples is the weighted mean of the parts' means, and a sum is the sum of their sums. A Dice loss, a mean
over what a mask leaves, and a running maximum are neither: they need the whole batch. A function is traced once, in a
graph that never runs, so that nothing it does counts.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.strategies.step.rows import Graph, Rows
from toolkit.support.graphs import derives_from, outside

__all__ = ["Kind", "loss_kind", "metric_kind"]

_WRAPPERS = ("LossFunctionWrapper", "MeanMetricWrapper")  # Of a function, which may be the user's.
# Keras's losses in which an example's value depends on others. (Functions have the same names in snake case.)
_COUPLED = ("Circle", "Dice", "Tversky", "PearsonCorrelation", "ConcordanceCorrelation")


class Kind(enum.Enum):
    """How a value of a batch follows from those of its parts."""

    EXAMPLES = "a mean over examples, or a value for each; a metric's state that is a sum over them"
    MEAN = "a metric's state that is a mean of batches' means over their examples"
    SUM = "a sum over examples; a metric's state that is a sum over batches"
    WHOLE = "neither"


def loss_kind(loss: keras.losses.Loss, y_true: Any, y_pred: Any) -> Kind:
    """Returns a loss's kind before weighting and reduction.

    Args:
        loss: Any.
        y_true: Tensors of the shapes and dtypes of labels, in any structure; their values don't matter.
        y_pred: The same of predictions.
    """
    if _is_known(loss.fn) if type(loss).__name__ == "LossFunctionWrapper" else _is_keras_own(loss):
        return Kind.EXAMPLES

    def converted(*given: Any) -> Any:  # As `Loss.__call__` passes them.
        return loss.call(*keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x, loss.dtype), given))

    return _of_value(_traced(lambda given: converted(*given), (y_true, y_pred)))


def metric_kind(metric: keras.Metric, args: Sequence, kwargs: dict) -> Kind:
    """Returns the kind of a metric's state.

    Args:
        metric: Any; its state stays as it is.
        args: What its `update_state` is given: tensors of whose values nothing is asked.
        kwargs: The same, by name.
    """
    function = getattr(metric, "_fn", None)
    if _is_keras_own(metric) or (isinstance(metric, keras.metrics.MeanMetricWrapper) and _is_known(function)):
        return Kind.EXAMPLES
    # Updates of TensorFlow's variables can't be traced apart. A state that begins with a number would begin with a
    # multiple of it on several replicas.
    own = any(isinstance(each, tf.Variable) for each in vars(metric).values())
    if own or outside(lambda: any(np.any(keras.ops.convert_to_numpy(v)) for v in metric.stateless_reset_state())):
        return Kind.WHOLE
    added = _traced(lambda given: _additions(metric, *given), (tuple(args), kwargs))
    if added is None or all(each.is_sum for each in added):
        return Kind.WHOLE if added is None else Kind.EXAMPLES
    given = [each for each in (*args, *kwargs.values()) if each is not None]
    if isinstance(metric, keras.metrics.MeanMetricWrapper) and len(given) <= 2:  # Otherwise with weights.
        mean = _traced(lambda pair: metric._fn(*pair, **metric._fn_kwargs), tuple(given))
        if _of_value(mean) is Kind.EXAMPLES:
            return Kind.MEAN
    return Kind.SUM


def _of_value(found: list[Rows] | None) -> Kind:
    if found is None or len(found) != 1:
        return Kind.WHOLE
    value = found[0]
    if value.is_mean or value.by_row:
        return Kind.EXAMPLES
    return Kind.SUM if value.is_sum else Kind.WHOLE


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


def _traced(function: Callable[[Any], Any], given: Any) -> list[Rows] | None:
    """Returns what a function's results are, of tensors like the given ones with any number of rows.

    None where that can't be told: the function raises, returns None, or sets a variable to what depends on the rows.
    """

    def like(leaf: Any) -> Any:
        if not tf.is_tensor(leaf):
            return leaf
        if not isinstance(leaf, tf.Tensor):  # Ragged or sparse.
            raise TypeError(type(leaf))
        shape = leaf.shape.as_list() if leaf.shape.rank is not None else None
        return tf.compat.v1.placeholder(leaf.dtype, [None, *shape[1:]] if shape else shape)

    def trace() -> list[Rows] | None:
        graph = tf.__internal__.FuncGraph("trial")
        with graph.as_default(), keras.StatelessScope() as scope:
            results = function(keras.tree.map_structure(like, given))
            if results is None:
                return None
            results = [tf.convert_to_tensor(each) for each in keras.tree.flatten(results)]
        known = Graph(graph)
        changed = [known[each] for each in scope.state_mapping.values()] + [value for _, value in known.assigned]
        return [known[each] for each in results] if all(each.is_alike for each in changed) else None

    try:
        return outside(trace)
    except Exception:  # A user's own function may raise anything on tensors without values.
        return None


def _is_known(function: Any) -> bool:
    """Whether it is a Keras function with a value for each example."""
    name = getattr(function, "__name__", "").replace("_", "")
    coupled = [each.lower() for each in _COUPLED]
    return getattr(function, "__module__", "").startswith("keras.src.") and name not in coupled


def _is_keras_own(thing: Any) -> bool:
    return type(thing).__module__.startswith("keras.src.") and type(thing).__name__ not in _COUPLED + _WRAPPERS
