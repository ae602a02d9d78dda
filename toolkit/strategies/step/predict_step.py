"""A replica's `predict_step`: predictions of its own examples, and what isn't by example once.

Keras joins replicas' outputs along axis 0. A copy that a replica was given in place of examples is left out here. Of an
output whose first axis isn't the batch's, such as a table or a mean over the batch, the first replica's is taken.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.context import here
from toolkit.strategies.input.batch_split import row_count
from toolkit.strategies.processes.agreement import processes
from toolkit.strategies.step import xla
from toolkit.strategies.step.batch_share import Share
from toolkit.strategies.step.inlining import inlining
from toolkit.strategies.step.shown import Tries
from toolkit.strategies.step.single_rows import rows_stay_together
from toolkit.strategies.step.view import View

__all__ = ["has_one_size", "of_one", "predict_own"]

_known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # By id, because tensors can't be hashed.


def predict_own(original: Callable, model: Any, data: Any) -> Any:
    """Returns a replica's part of a batch's predictions."""
    if not here.divided or here.step.count == 1:
        return original(model, data)
    has_own = None if here.rows is None else here.rows > 0
    kept = None if has_own is None else tf.where(has_own, tf.constant(tf.int32.max), 0)
    use = xla.use_of(model)
    predict = xla.predicted(original, use)
    if has_one_size(model):  # One replica has the whole batch.
        return keras.tree.map_structure(lambda leaf: leaf if kept is None else leaf[:kept], predict(model, data))
    step: Any = functools.partial(original, model)
    step.__func__ = type(model).predict_step  # As a bound method has it.
    found = vars(model).setdefault("_toolkit_predicts", Tries(model)).of(step, data, returns_rows=True)
    several = processes(model.distribute_strategy) > 1

    def part(number: int, leaf: Any, rows: Callable[[Any], Any]) -> Any:
        if found.by_example.get(number, True):
            leaf = rows(leaf)
            return leaf if kept is None else leaf[:kept]
        if leaf.shape.rank:
            return leaf if here.step.replica == 0 else leaf[:0]
        if several:
            raise StrategyError(
                asked="predict with a model some of whose outputs aren't by example",
                found="an output is a scalar, and workers' outputs are joined along axis 0",
                remedy="Return such an output once for each example, or predict on one device",
            )
        leaf = tf.identity(leaf)
        _known[id(leaf)] = leaf
        return leaf

    def parts(outputs: Any, rows: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
        leaves = [part(number, leaf, rows) for number, leaf in enumerate(keras.tree.flatten(outputs))]
        return keras.tree.pack_sequence_as(outputs, leaves)

    if not found.opened:
        return parts(predict(model, data))
    if use is not None:
        use.say("predict_step is computed without XLA, as it computes with the whole batch")
    share = Share(row_count(data) if here.rows is None else here.rows, has_own=has_own)
    view = View(share, found.trial, f"{type(model).__name__}.predict_step", sized=False)
    with view.entered(), inlining(), rows_stay_together():
        outputs = parts(original(model, view.open(data)), view.cut)
    view.describe()
    return outputs


def of_one(values: Any, strategy: tf.distribute.Strategy) -> Any:
    """Returns what `run` returned, with one tensor for scalars that all replicas have alike."""

    def one(value: Any) -> Any:
        parts = strategy.experimental_local_results(value)
        return parts[0] if all(_known.get(id(part)) is part for part in parts) else value

    return keras.tree.map_structure(one, values)


def has_one_size(model: Any) -> bool:
    """Returns whether a model was made for batches of one size, as a stateful one is."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    sizes = any(each.shape and each.shape[0] is not None for each in inputs)
    return sizes or any(getattr(each, "stateful", False) for each in model._flatten_layers())
