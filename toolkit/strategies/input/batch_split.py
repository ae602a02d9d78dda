"""A replica's share of each global batch: every example once, and no replica without an example."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from toolkit.errors import StrategyError

__all__ = [
    "check_arrays",
    "is_batched",
    "leaves_enough",
    "may_run_short",
    "row_count",
    "row_range",
    "shares_of_worker",
    "split",
    "with_cardinality",
    "without_options",
]

_TOO_FEW = (
    "the data has too few examples for {} replicas, each of which needs at least one. Use more data or fewer replicas"
)


def row_range(rows: Any, share: Any, shares: Any) -> tuple[Any, Any]:
    """Returns the first row of a share and the row after its last. Shares are equal to within one row.

    Args:
        rows: The number of rows to share; an int or an int64 scalar, as are the others.
        share: The share's index, from 0.
        shares: The number of shares.
    """
    return share * rows // shares, (share + 1) * rows // shares


def shares_of_worker(context: tf.distribute.InputContext) -> list[int]:
    """Returns the numbers of the shares that a worker reads, for its replicas in turn.

    It is the order in which `predict` puts the replicas' results together again.
    """
    workers = context.num_input_pipelines
    return [n * workers + context.input_pipeline_id for n in range(context.num_replicas_in_sync // workers)]


def split(
    dataset: tf.data.Dataset, *, indices: Sequence[int], count: int, may_be_empty: bool = False
) -> tf.data.Dataset:
    """Divides each global batch into `count` shares, equal to within one example, and keeps some of them.

    A batch with fewer examples than there are shares borrows from the batch before it, or joins it: a
    replica without an example would fail in BatchNormalization and make every mean NaN.

    Args:
        dataset: A dataset of global batches.
        indices: Which shares to keep, from 0; they follow one another in the result.
        count: The number of shares.
        may_be_empty: Whether shares may be empty where there is nothing to borrow: fewer examples in all than shares.

    Returns:
        A dataset with len(indices) elements for each batch. Reading it fails with
        InvalidArgumentError where there is nothing to borrow, unless shares may be empty.
    """
    cardinality, spec = dataset.cardinality(), dataset.element_spec
    if not _always_enough(spec, count):
        dataset = _evened(dataset, count, may_be_empty)

    def share(batch: Any, index: Any) -> Any:
        # A share's index is a Python int or an int64 tensor.
        start, stop = row_range(row_count(batch), tf.cast(index, tf.int64), count)
        return tf.nest.map_structure(lambda component: _slice(component, start, stop), batch)

    if len(indices) == 1:
        cut = dataset.map(lambda *batch: share(_packed(batch, spec), indices[0]), num_parallel_calls=1)
    else:
        mine = tf.constant(list(indices), tf.int64)
        cut = dataset.flat_map(
            lambda *batch: tf.data.Dataset.from_tensor_slices(mine).map(
                lambda index: share(_packed(batch, spec), index)
            )
        )
    # A finite length isn't declared, because two batches may have become one.
    return with_cardinality(cut, cardinality) if cardinality == tf.data.INFINITE_CARDINALITY else cut


def leaves_enough(adapter: Any, replicas: int) -> bool:
    """Returns whether data surely leaves an example for each replica if TensorFlow divides its batches.

    It gives each replica as many examples as of a whole batch, while there are any.

    Args:
        adapter: What Keras reads the data by.
        replicas: How many share a batch.
    """
    if not isinstance(adapter, ArrayDataAdapter):  # The size of other datasets' last batch is unknown.
        return False
    smallest = adapter.partial_batch_size if adapter.has_partial_batch else adapter.batch_size
    return smallest > (replicas - 1) * -(-adapter.batch_size // replicas)


def check_arrays(adapter: Any, replicas: int) -> None:
    """Checks that each batch of arrays has an example for each replica. Other data shows this only when it is read.

    Raises:
        StrategyError: There are fewer in all, or in a batch.
    """
    if not isinstance(adapter, ArrayDataAdapter):
        return
    whole = adapter.num_batches - bool(adapter.has_partial_batch)
    examples = whole * adapter.batch_size + (adapter.partial_batch_size or 0)
    if min(examples, adapter.batch_size) < replicas:
        few = examples < replicas
        raise StrategyError(
            asked=f"{examples} example{'s' * (examples != 1)} in batches of {adapter.batch_size}",
            found=f"each of the {replicas} replicas needs at least one example of a batch",
            remedy="Give more examples, or use fewer replicas"
            if few
            else f"batch_size counts the examples of all replicas together: give {replicas} or more",
        )


def with_cardinality(dataset: tf.data.Dataset, cardinality: tf.Tensor) -> tf.data.Dataset:
    """Returns the same dataset with a declared number of elements; unchanged if the number isn't known."""
    if cardinality == tf.data.UNKNOWN_CARDINALITY:
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(cardinality))


def may_run_short(dataset: tf.data.Dataset, count: int) -> bool:
    """Returns whether a batch of a dataset, such as its last one, may have fewer examples than there are replicas."""
    return is_batched(dataset) and not _always_enough(dataset.element_spec, count)


def is_batched(dataset: tf.data.Dataset) -> bool:
    """Returns whether every component has a dimension that counts examples."""
    return all(spec.shape.rank != 0 for spec in tf.nest.flatten(dataset.element_spec) if hasattr(spec, "shape"))


def _packed(arguments: tuple, spec: Any) -> Any:
    """tf.data passes a tuple's components as separate arguments, and anything else as one."""
    return arguments if type(spec) is tuple else arguments[0]


def _always_enough(spec: Any, count: int) -> bool:
    """Returns whether no batch can be too small, or too small ones can't be filled up."""
    leaves = tf.nest.flatten(spec)
    if not all(isinstance(leaf, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)) for leaf in leaves):
        return True  # Keras puts an empty Optional in place of missing labels or weights.
    sizes = [leaf.shape[0] if leaf.shape.rank else None for leaf in leaves]
    return any(size is not None and size >= count for size in sizes)


def _evened(dataset: tf.data.Dataset, count: int, may_be_empty: bool) -> tf.data.Dataset:
    """Fills a batch of fewer than `count` examples up with the last ones of the batch before it."""
    spec = dataset.element_spec
    padding = _padding_values(dataset)

    # `scan` accepts plain tensors only, no ragged ones.
    def flat(batch: Any) -> tuple:
        return tuple(tf.nest.flatten(batch, expand_composites=True))

    def whole(tensors: tuple) -> Any:
        return tf.nest.pack_sequence_as(spec, tensors, expand_composites=True)

    empty = flat(tf.nest.map_structure(_nothing, spec))
    end = tf.data.Dataset.from_tensors((empty, False))
    following = dataset.map(lambda *batch: (flat(_packed(batch, spec)), True)).concatenate(end)

    def step(state: tuple, element: tuple) -> tuple:
        (held, holding), (batch, real) = state, element
        held, batch = whole(held), whole(batch)
        missing = count - row_count(batch)
        enough = tf.logical_or(tf.logical_not(real), missing <= 0)

        # Divided so that this batch gets just enough. If that leaves the one before too few, both become one batch.
        cut = row_count(held) - missing
        cut = tf.where(cut >= count, cut, 0)

        def borrow() -> tuple:
            joined = tf.nest.map_structure(_concatenated, spec, held, batch, padding)
            least = tf.constant(0 if may_be_empty else count, tf.int64)
            fits = tf.debugging.assert_greater_equal(row_count(joined), least, _TOO_FEW.format(count))
            with tf.control_dependencies([fits]):
                place = tf.identity(cut)
            rows = row_count(joined)
            return tuple(
                flat(tf.nest.map_structure(lambda a, s=start, e=stop: _slice(a, s, e), joined))
                for start, stop in ((tf.zeros_like(place), place), (place, rows))
            )

        before, after = tf.cond(enough, lambda: (flat(held), flat(batch)), borrow)
        return (after, real), (before, holding & (row_count(whole(before)) > 0))

    evened = following.scan((empty, False), step).filter(lambda _, holding: holding)
    return evened.map(lambda batch, _: whole(batch))


def _nothing(leaf: Any) -> Any:
    """Returns zero examples of a kind."""
    sizes = [0, *(size or 0 for size in leaf.shape[1:])] if leaf.shape.rank else [0]
    if isinstance(leaf, tf.SparseTensorSpec):
        return tf.SparseTensor(tf.zeros([0, len(sizes)], tf.int64), tf.zeros([0], leaf.dtype), sizes)
    if isinstance(leaf, tf.RaggedTensorSpec):
        values = tf.zeros([0, *sizes[leaf.ragged_rank + 1 :]], leaf.dtype)
        splits = [tf.zeros([1], leaf.row_splits_dtype)] * leaf.ragged_rank
        return tf.RaggedTensor.from_nested_row_splits(values, splits) if splits else values
    return tf.zeros(sizes, leaf.dtype)


def _concatenated(leaf: Any, first: Any, second: Any, padding: Any) -> Any:
    """Returns the examples of two batches, padded to the longest of both."""
    if isinstance(leaf, tf.SparseTensorSpec):
        return tf.sparse.concat(0, [first, second], expand_nonconcat_dims=True)
    if isinstance(leaf, tf.RaggedTensorSpec) or leaf.shape[1:].is_fully_defined():
        return tf.concat([first, second], 0)
    rank = leaf.shape.rank - 1
    both = tf.concat([tf.RaggedTensor.from_tensor(each, ragged_rank=rank) for each in (first, second)], 0)
    return tf.ensure_shape(both.to_tensor(default_value=padding), [None, *leaf.shape[1:]])


def without_options(dataset: Any) -> Any:
    """Returns the dataset below those that don't change its elements."""
    while type(dataset).__name__ in ("_PrefetchDataset", "_OptionsDataset"):
        dataset = dataset._input_dataset
    return dataset


def _padding_values(dataset: Any) -> Any:
    """Returns the padding values that `padded_batch` used or would use for each component."""

    def zero(leaf: Any) -> Any:
        return tf.zeros([], leaf.dtype)

    spec = dataset.element_spec
    values = getattr(without_options(dataset), "_padding_values", None)
    return tf.nest.map_structure(zero, spec) if values is None else values


def row_count(batch: Any) -> tf.Tensor:
    """Returns the number of examples of a batch, an int64 scalar."""
    first = next(leaf for leaf in tf.nest.flatten(batch) if hasattr(leaf, "shape"))
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    if isinstance(first, tf.RaggedTensor):
        return first.nrows(tf.int64)
    return tf.shape(first, tf.int64)[0]


def _slice(component: Any, start: tf.Tensor, stop: tf.Tensor) -> Any:
    if isinstance(component, tf.SparseTensor):
        rest = component.dense_shape[1:]
        return tf.sparse.slice(
            component, tf.concat([[start], tf.zeros_like(rest)], 0), tf.concat([[stop - start], rest], 0)
        )
    if not hasattr(component, "shape"):  # Keras puts an empty Optional in place of missing labels or weights.
        return component
    return component[start:stop]
