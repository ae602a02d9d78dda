"""Divides a single batch, which a script hands to `train_on_batch`, `test_on_batch` or `predict_on_batch`.

No data set brings such a batch, so the strategy doesn't divide it, and each replica would be given the whole of it:
what is a sum or a count would be multiplied by the number of replicas.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from toolkit.strategies.context import here, known
from toolkit.strategies.exchange import mesh
from toolkit.strategies.input.batch_split import Part, row_count, share_of, shares_of_worker
from toolkit.strategies.step.predict_step import has_one_size

__all__ = ["call_on_batch", "make_dividing"]


def call_on_batch(kind: str, original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Has a script's batch divided between replicas, while Keras's method of this kind runs."""
    with known(on_batch=kind):
        return original(model, *args, **kwargs)


def make_dividing(kind: str, original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes Keras create a step function that divides such batches; those of a data set are divided already."""
    name = f"{kind}_function"
    before = getattr(model, name)
    result = original(model, *args, **kwargs)
    function = getattr(model, name)
    if function is None or function is before:
        return result

    @functools.wraps(function)
    def dividing(batches: Any) -> Any:
        if here.on_batch != kind:
            return function(batches)
        return function([_divided(model, batch) for batch in batches])

    setattr(model, name, dividing)
    return result


def _divided(model: Any, batch: Any) -> Any:
    """Returns a batch, which all processes have, with replicas' shares in place of tensors.

    What isn't by example, such as a number, is given to every replica. With a model for batches of one size, such as a
    stateful one, the first replica has all examples, and the others count for nothing.
    """
    strategy = model.distribute_strategy
    count, local = mesh.replicas(strategy), len(strategy.extended.worker_devices)
    batch = tf.nest.map_structure(_tensor, batch)
    leaves = tf.nest.flatten(batch)
    rows = next((int(row_count(leaf)) for leaf in leaves if _counts(leaf)), 0)
    alone = has_one_size(model)
    divided = [_counts(leaf) and int(row_count(leaf)) == rows for leaf in leaves]

    def own(context: Any) -> Part:
        worker, place = divmod(context.replica_id_in_sync_group, local)
        index = shares_of_worker(tf.distribute.InputContext(count // local, worker, count))[place]
        if not any(divided) or alone:
            return Part(leaves, tf.constant(rows if index == 0 else 0, tf.int64), {})
        return share_of(leaves, index, count, divided)

    parts: dict[int, Part] = {}

    def distributed(pick: Callable) -> Any:
        def value(context: Any) -> Any:
            number = context.replica_id_in_sync_group
            if number not in parts:
                parts[number] = own(context)
            return pick(parts[number])

        return strategy.experimental_distribute_values_from_function(value)

    every = [None if leaf is None else distributed(lambda part, n=n: part.batch[n]) for n, leaf in enumerate(leaves)]
    shares = tf.nest.pack_sequence_as(batch, every)
    if all(divided) and rows % count == 0 and not alone:
        return shares
    return Part(shares, distributed(lambda part: part.rows), parts[next(iter(parts))].whole)


def _tensor(leaf: Any) -> Any:
    composite = isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor))
    return leaf if leaf is None or composite else tf.convert_to_tensor(leaf)


def _counts(leaf: Any) -> bool:
    return leaf is not None and bool(leaf.shape.rank)
