"""A worker's share of a batch, taken before the batch's examples are decoded.

Each worker reads the whole data set and keeps its share of every batch, so that the examples of a step are one
device's. What costs is rarely the reading: it is the functions that `map` calls for each example. So a chain such as

    files.shuffle(1000).map(decode).batch(64).prefetch(2)

is made again with batches of what comes before `map`: each worker calls `decode` for its own share only. The examples
are the same, because a function is moved only where it has no state: random numbers, variables and Python stay where
they are. TensorFlow's datasets don't say in public what they are made of; `tests/strategies/test_early_split.py` says
so when that changes, and then everybody decodes everything.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.data.util import structure
from tensorflow.python.framework import op_def_registry

from toolkit.strategies.input.batch_split import Part, packed, row_count
from toolkit.strategies.input.components import without_options

__all__ = ["Undecoded", "undecoded"]

_BATCH = ("_BatchDataset", "_ParallelBatchDataset")
_MAP = ("_MapDataset", "_ParallelMapDataset")
# Counted as stateful by TensorFlow, but without state that another example could see.
_HARMLESS = frozenset("Assert HashTableV2 LookupTableFindV2 LookupTableSizeV2 StatefulPartitionedCall If While".split())  # noqa: SIM905


class Undecoded(NamedTuple):
    """A dataset of global batches, before the functions that decode examples.

    Attributes:
        batches: Global batches of what the first of the functions takes.
        decode: Makes of a dataset of parts of those batches one of parts of the original's batches.
    """

    batches: tf.data.Dataset
    decode: Callable[[tf.data.Dataset], tf.data.Dataset]


def undecoded(dataset: tf.data.Dataset) -> Undecoded:
    """Returns a dataset of batches as it is before examples are decoded; unchanged if that can't be found.

    Args:
        dataset: A dataset of global batches.
    """
    batch = without_options(dataset)
    size = tf.get_static_value(getattr(batch, "_batch_size", None)) if type(batch).__name__ in _BATCH else None
    if size is None:
        return Undecoded(dataset, lambda parts: parts)
    functions: list[Callable] = []
    waiting: list[Callable] = []
    source = None
    each = without_options(batch._input_dataset)
    while type(each).__name__ in _MAP and _is_stateless(each):
        waiting.insert(0, _as_traced(each._map_func))
        each = without_options(each._input_dataset)
        if _has_one_shape(each):
            source, functions = each, waiting + functions
            waiting = []
    if source is None:
        return Undecoded(dataset, lambda parts: parts)

    def decoded(part: Part) -> tf.data.Dataset:
        examples = tf.data.Dataset.from_tensor_slices(part.batch)
        for function in functions:
            examples = examples.map(function)
        batches = examples.batch(row_count(part.batch))
        return batches.map(lambda *batch: Part(packed(batch, batches.element_spec), part.rows, {}))

    return Undecoded(
        source.batch(size, drop_remainder=tf.get_static_value(batch._drop_remainder)).with_options(dataset.options()),
        # Datasets of one element each, in the order of the shares, some at a time. (A `map` to that element would do
        # the same, but TensorFlow couldn't save its iterators.)
        lambda parts: parts.interleave(decoded, num_parallel_calls=tf.data.AUTOTUNE),
    )


def _as_traced(function: Any) -> Callable:
    """Returns a function of `map` as `map` traced it; calling the user's Python again might differ."""
    takes, returns = function._input_structure, function.output_structure

    def traced(*example: Any) -> Any:
        given = example if type(takes) is tuple else example[0]
        found = function.function(*structure.to_tensor_list(takes, given))
        return structure.from_compatible_tensor_list(returns, found)

    return traced


def _has_one_shape(dataset: tf.data.Dataset) -> bool:
    leaves = tf.nest.flatten(dataset.element_spec)
    return all(isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined() for leaf in leaves)


def _is_stateless(mapped: Any) -> bool:
    graph = mapped._map_func.function.graph.as_graph_def()
    nodes: Iterable[Any] = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    defined = {function.signature.name for function in graph.library.function}
    return not any(_has_state(node.op) for node in nodes if node.op not in _HARMLESS | defined)


def _has_state(operation: str) -> bool:
    definition = op_def_registry.get(operation)
    return definition is None or definition.is_stateful
