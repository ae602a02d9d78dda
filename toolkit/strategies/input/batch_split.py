"""A replica's share of each global batch: every example once, and never an empty tensor.

A batch may have fewer examples than there are replicas. A replica without one is given a copy of the batch's last
example, so that whatever a script does with it is defined: a mean, a maximum, `x[0]`. Beside it stands that its share
has no rows, and the step makes it count for nothing (`step/share.py`).

Each worker reads the whole data set and keeps its share of every batch, so that the examples of a step are one
device's. What costs is rarely the reading: it is the functions that `map` calls for each example. So a chain such as

    files.shuffle(1000).map(decode).batch(64).prefetch(2)

is made again with batches of what comes before `map`: each worker calls `decode` for its own share only (`undecoded`).
The examples are the same, because a function is moved only where it has no state: random numbers, variables and Python
stay where they are. TensorFlow's datasets don't say in public what they are made of;
`tests/strategies/test_early_split.py` says so when that changes, and then everybody decodes everything.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from tensorflow.python.data.util import structure
from tensorflow.python.framework import op_def_registry

from toolkit.strategies.input.pipelines import by_example, has_shape, without_options

__all__ = [
    "Part",
    "Undecoded",
    "divided_by_tensorflow",
    "packed",
    "row_count",
    "row_range",
    "share_of",
    "shares_of_worker",
    "split",
    "undecoded",
    "with_cardinality",
    "without_copies",
]


class Part(NamedTuple):
    """What one replica is given of a batch.

    Attributes:
        batch: Its share, in the batch's structure; a copy of an example where it has none.
        rows: How many of the batch's examples it has, an int64 scalar; where components differ, of the largest.
        whole: By their numbers among the flattened components, those that aren't by example and that all replicas have.
    """

    batch: Any
    rows: Any
    whole: Any


def row_range(rows: Any, share: Any, shares: Any) -> tuple[Any, Any]:
    """Returns the first row of a share and the row after its last.

    Shares are equal to within one row, and the first ones are the larger.

    Args:
        rows: The number of rows to share; an int or an int64 scalar, as are the others.
        share: The share's index, from 0.
        shares: The number of shares.
    """
    more = rows % shares
    numbers = all(isinstance(each, int) for each in (share, more))
    before = min(share, more) if numbers else tf.minimum(tf.cast(share, tf.int64), tf.cast(more, tf.int64))
    start = share * (rows // shares) + before
    return start, start + (rows + shares - 1 - share) // shares


def shares_of_worker(context: tf.distribute.InputContext) -> list[int]:
    """Returns the numbers of the shares that a worker reads, for its replicas in turn.

    It is the order in which `predict` puts the replicas' results together again.
    """
    workers = context.num_input_pipelines
    return [n * workers + context.input_pipeline_id for n in range(context.num_replicas_in_sync // workers)]


def split(dataset: tf.data.Dataset, *, indices: Sequence[int], count: int) -> tf.data.Dataset:
    """Divides each global batch into `count` shares, equal to within one example, and keeps some of them.

    Components may have different numbers of examples: each is divided by its own. One without examples is kept whole.

    Args:
        dataset: A dataset of global batches.
        indices: Which shares to keep, from 0; they follow one another in the result.
        count: The number of shares.

    Returns:
        A dataset with len(indices) elements for each batch, each a `Part`.
    """
    cardinality, spec, divided = dataset.cardinality(), dataset.element_spec, by_example(dataset)

    def share(batch: tuple, index: Any) -> Part:
        return share_of(packed(batch, spec), index, count, divided)

    if len(indices) == 1:
        cut = dataset.map(lambda *batch: share(batch, indices[0]), num_parallel_calls=1)
    else:
        mine = tf.constant(list(indices), tf.int64)
        cut = dataset.flat_map(
            lambda *batch: tf.data.Dataset.from_tensor_slices(mine).map(lambda index: share(batch, index))
        )
    return with_cardinality(cut, cardinality) if cardinality == tf.data.INFINITE_CARDINALITY else cut


def share_of(batch: Any, index: Any, count: int, divided: Sequence[bool]) -> Part:
    """Returns one of `count` shares of a batch.

    Args:
        batch: The batch, in any structure.
        index: The share's index, a Python int or an int64 scalar.
        count: The number of shares.
        divided: For each of the batch's components, flattened, whether it is by example; each share has all of others.
    """
    index, leaves = tf.cast(index, tf.int64), tf.nest.flatten(batch)
    by_example = [leaf for leaf, each in zip(leaves, divided, strict=True) if each]
    start, stop = row_range(row_count(by_example), index, count)
    shares = [_share(leaf, index, count) if each else leaf for leaf, each in zip(leaves, divided, strict=True)]
    whole = {str(number): True for number, each in enumerate(divided) if not each}
    return Part(tf.nest.pack_sequence_as(batch, shares), stop - start, whole)


def without_copies(parts: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the shares of a dataset of parts, empty ones where they are copies: what a user's own loop expects."""

    def own(part: Part) -> Any:
        leaves = tf.nest.flatten(part.batch)
        shares = [
            leaf if str(number) in part.whole else _slice(leaf, 0, tf.where(part.rows > 0, _rows(leaf), 0))
            for number, leaf in enumerate(leaves)
        ]
        return tf.nest.pack_sequence_as(part.batch, shares)

    return parts.map(own)


def divided_by_tensorflow(dataset: tf.data.Dataset, adapter: Any, replicas: int) -> bool:
    """Returns whether TensorFlow can divide a dataset's batches, and leaves an example for each replica.

    It gives each replica as many examples as of a whole batch, while there are any.

    Args:
        dataset: A dataset of global batches.
        adapter: What Keras reads it by.
        replicas: How many share a batch.
    """
    if isinstance(adapter, ArrayDataAdapter):
        whole = adapter.batch_size
        smallest = adapter.partial_batch_size if adapter.has_partial_batch else whole
    else:  # The size of a last batch is unknown, unless it is as large as the others.
        leaves = [leaf for leaf in tf.nest.flatten(dataset.element_spec) if has_shape(leaf)]
        sizes = {leaf.shape[0] if leaf.shape.rank else None for leaf in leaves}
        alike = len(sizes) == 1 and sum(by_example(dataset)) == len(leaves)
        whole = smallest = sizes.pop() if alike else None
    return whole is not None and smallest > (replicas - 1) * -(-whole // replicas)


def with_cardinality(dataset: tf.data.Dataset, cardinality: tf.Tensor) -> tf.data.Dataset:
    """Returns the same dataset with a declared number of elements; unchanged if the number isn't known."""
    if cardinality == tf.data.UNKNOWN_CARDINALITY:
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(cardinality))


def packed(arguments: tuple, spec: Any) -> Any:
    """Returns an element from the arguments of a dataset's function.

    tf.data passes a tuple's components as separate arguments, and anything else as one.
    """
    return arguments if type(spec) is tuple else arguments[0]


def row_count(batch: Any) -> tf.Tensor:
    """Returns the number of examples of a batch, or of its largest component, an int64 scalar."""
    rows = [_rows(leaf) for leaf in tf.nest.flatten(batch) if has_shape(leaf) and leaf.shape.rank != 0]
    return rows[0] if len(rows) == 1 else tf.reduce_max(rows)


def _rows(component: Any) -> tf.Tensor:
    if isinstance(component, tf.SparseTensor):
        return component.dense_shape[0]
    if isinstance(component, tf.RaggedTensor):
        return component.nrows(tf.int64)
    return tf.shape(component, tf.int64)[0]


def _share(component: Any, index: tf.Tensor, count: int) -> Any:
    """Returns a share of a component's rows, or a copy of the row before it if that is empty."""
    start, stop = row_range(_rows(component), index, count)
    return _slice(component, tf.maximum(tf.minimum(start, stop - 1), 0), stop)


def _slice(component: Any, start: Any, stop: Any) -> Any:
    if isinstance(component, tf.SparseTensor):
        rest = component.dense_shape[1:]
        return tf.sparse.slice(
            component, tf.concat([[start], tf.zeros_like(rest)], 0), tf.concat([[stop - start], rest], 0)
        )
    return component[start:stop]


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
