"""A replica's `predict_step`: predictions of its own examples, and what isn't by example once.

Keras joins replicas' outputs along axis 0. A copy that a replica was given in place of examples is left out here. An
output whose first axis isn't the batch's, such as a table or a mean over the batch, is computed from the whole batch
on every replica, and the first one's is taken.
"""

import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.context import here
from toolkit.strategies.exchange import collectives
from toolkit.strategies.processes.agreement import processes
from toolkit.strategies.step.batch_share import Share, entered

__all__ = ["has_one_size", "of_one", "predict_own"]

_known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # By id, because tensors can't be hashed.


def predict_own(original: Callable, model: Any, data: Any) -> Any:
    """Returns a replica's part of a batch's predictions."""
    if not here.divided or collectives.replica_id_and_count()[1] == 1:
        return original(model, data)
    leaves = [each if n in here.whole else _of_any_size(each) for n, each in enumerate(tf.nest.flatten(data))]
    # A stateful LSTM of Keras 3.12 can't take a batch of any size.
    given = data if has_one_size(model) else tf.nest.pack_sequence_as(data, leaves)
    outputs = original(model, given)
    by_example = [_is_by_example(leaf) for leaf in keras.tree.flatten(outputs)]
    if not all(by_example) and given is not data and not tf.executing_eagerly():
        return _of_whole(original, model, data, by_example)
    if here.rows is None:
        return outputs
    kept = tf.where(here.rows > 0, tf.constant(tf.int32.max), 0)
    return keras.tree.map_structure(lambda leaf: leaf[:kept], outputs)


def of_one(values: Any, strategy: tf.distribute.Strategy) -> Any:
    """Returns what `run` returned, with one tensor for scalars that all replicas have alike."""

    def one(value: Any) -> Any:
        parts = strategy.experimental_local_results(value)
        return parts[0] if all(_known.get(id(part)) is part for part in parts) else value

    return keras.tree.map_structure(one, values)


def _of_any_size(leaf: Any) -> Any:
    """Hides how many examples there are from what is traced: an output that has as many then depends on them."""
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank or tf.executing_eagerly():
        return leaf
    return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *leaf.shape[1:]])


def _is_by_example(leaf: Any) -> bool:
    """Returns whether the size of the first axis depends on the batch."""
    if not isinstance(leaf, tf.Tensor) or leaf.shape.rank is None:  # Ragged and sparse ones.
        return True
    return leaf.shape.rank > 0 and leaf.shape[0] is None


def has_one_size(model: Any) -> bool:
    """Returns whether a model was made for batches of one size, as a stateful one is."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    sizes = any(each.shape and each.shape[0] is not None for each in inputs)
    return sizes or any(getattr(each, "stateful", False) for each in model._flatten_layers())


def _of_whole(original: Callable, model: Any, data: Any, by_example: list[bool]) -> Any:
    tensors = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    several = processes(model.distribute_strategy) > 1
    if any(not isinstance(leaf, tf.Tensor) or leaf.dtype == tf.string for leaf in tensors):
        raise _not_by_example("its batches hold strings, or ragged or sparse tensors, which replicas can't exchange")
    share = Share(0, has_own=None if here.rows is None else here.rows > 0)
    leaves = tf.nest.flatten(data)
    divided = [number for number, leaf in enumerate(leaves) if leaf is not None and number not in here.whole]
    rows = tf.shape(leaves[divided[0]])[:1]
    whole = [share.rows_of_all(leaf) if number in divided else leaf for number, leaf in enumerate(leaves)]
    replica = collectives.own_id()
    own = share.rows_of_all(tf.fill(rows, replica)) == replica

    def part(leaf: Any, of_rows: bool) -> Any:
        if of_rows:
            return tf.boolean_mask(leaf, own)
        if leaf.shape.rank:
            return leaf if replica == 0 else leaf[:0]
        if several:
            raise _not_by_example("an output is a scalar, and workers' outputs are joined along axis 0")
        leaf = tf.identity(leaf)
        _known[id(leaf)] = leaf
        return leaf

    with entered(None):
        outputs = original(model, tf.nest.pack_sequence_as(data, whole))
    leaves = keras.tree.flatten(outputs)
    return keras.tree.pack_sequence_as(outputs, [part(*pair) for pair in zip(leaves, by_example, strict=True)])


def _not_by_example(found: str) -> StrategyError:
    return StrategyError(
        asked="predict with a model some of whose outputs aren't by example",
        found=found,
        remedy="Return such an output once for each example, or predict on one device",
    )
