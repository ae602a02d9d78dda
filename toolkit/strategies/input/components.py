"""Which components of a dataset's batches have the examples along their first axis; all replicas get the others whole.

A scalar has none. A table such as `tf.ones((4, 6))` beside a batch is told by what the dataset is made of: a function
of `map` returns it without having computed it from its arguments, and its size isn't theirs. TensorFlow's datasets
don't say in public what they are made of; `tests/strategies/test_components.py` says so when that changes.
"""

import collections
from typing import Any

import tensorflow as tf

from toolkit.support.graphs import computed_from

__all__ = ["by_example", "has_shape", "without_options"]

_BATCH = ("_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset", "_DenseToRaggedDataset")
_MAP = ("_MapDataset", "_ParallelMapDataset")


def by_example(dataset: Any) -> list[bool]:
    """Returns for each of the flattened components whether its first axis counts examples."""
    dataset = without_options(dataset)
    kind, inputs = type(dataset).__name__, list(getattr(dataset, "_inputs", list)())
    leaves = tf.nest.flatten(dataset.element_spec)
    if kind == "_ZipDataset":
        return [each for part in inputs for each in by_example(part)]
    if kind in _MAP:
        return _of_function(dataset, inputs[0], leaves)
    if kind not in _BATCH and len(inputs) == 1 and inputs[0].element_spec == dataset.element_spec:
        return by_example(inputs[0])  # Such as `take` or `shuffle`.
    return _by_size(leaves)


def has_shape(leaf: Any) -> bool:
    """Returns whether a component, or its spec, is a tensor: Keras has an empty Optional in place of missing labels."""
    return hasattr(leaf, "shape")


def without_options(dataset: Any) -> Any:
    """Returns the dataset below those that don't change its elements."""
    while type(dataset).__name__ in ("_PrefetchDataset", "_OptionsDataset"):
        dataset = dataset._input_dataset
    return dataset


def _size(leaf: Any) -> int | None:
    return leaf.shape[0] if leaf.shape.rank else None


def _by_size(leaves: list) -> list[bool]:
    there = [leaf for leaf in leaves if has_shape(leaf) and leaf.shape.rank != 0]
    sizes = collections.Counter(map(_size, there))
    usual = None if None in sizes else max(sizes, key=sizes.__getitem__, default=None)
    return [has_shape(leaf) and leaf.shape.rank != 0 and _size(leaf) == usual for leaf in leaves]


def _of_function(dataset: Any, source: Any, leaves: list) -> list[bool]:
    given, graph = (
        zip(tf.nest.flatten(source.element_spec), by_example(source), strict=True),
        dataset._map_func.function.graph,
    )
    # A batch may be made from numbers, such as of its first example.
    arguments = {
        tensor.op: _size(spec)
        for tensor, (spec, examples) in zip(graph.inputs, given, strict=False)
        if examples or (has_shape(spec) and spec.shape.rank == 0)
    }

    def is_batch(leaf: Any, tensor: tf.Tensor) -> bool:
        if not has_shape(leaf) or leaf.shape.rank == 0:
            return False
        # A constant of the batch's own size may be weights: `tf.ones_like` of a known shape is one.
        return _size(leaf) in {None, *arguments.values()} or any(op in arguments for op in computed_from([tensor.op]))

    return [is_batch(leaf, tensor) for leaf, tensor in zip(leaves, graph.outputs, strict=True)]
