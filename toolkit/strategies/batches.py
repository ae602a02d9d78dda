"""A replica's share of each global batch: every example once, and never an empty tensor.

A batch may have fewer examples than there are replicas. A replica without one is given a copy of the batch's last
example, so that whatever a script does with it is defined: a mean, a maximum, `x[0]`. Beside it stands that its share
has no rows, and the step makes it count for nothing (`state_of_own` in `step/train_step.py`).

Each worker reads the whole data set and keeps its share of every batch, so that the examples of a step are one
device's. What costs is rarely the reading: it is the functions that `map` calls for each example. So a chain such as

    files.shuffle(1000).map(decode).batch(64).prefetch(2)

is made again with batches of what comes before `map`: each worker calls `decode` for its own share only (`undecoded`).
The examples are the same, because a function is moved only where it has no state: random numbers, variables and Python
stay where they are. TensorFlow's datasets don't say in public what they are made of;
`tests/strategies/test_early_split.py` says so when that changes, and then everybody decodes everything.
"""

import functools
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.mesh import replica_count
from toolkit.strategies.pipelines import (
    Draw,
    by_example,
    draws_of,
    epoch_iterator,
    has_shape,
    in_order,
    other_in_each_process,
    untuned,
    whole_for_keras,
    without_options,
)
from toolkit.strategies.processes.agreement import (
    CALLS,
    call_of,
    calls_differ,
    difference,
    extremes,
    process_index,
    processes,
)
from toolkit.strategies.upstream import private


class Part(NamedTuple):
    """What one replica is given of a batch.

    Attributes:
        batch: Its share, in the batch's structure; a copy of an example where it has none.
        rows: How many of the batch's examples it has, an int64 scalar; where components differ, of the largest.
        tables: By their numbers among the flattened components, those without examples, which all replicas have.
    """

    batch: Any
    rows: Any
    tables: Any


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

    Components may have several rows for each example; one without examples is kept whole. Where their numbers of rows
    are no multiples of the smallest, as of nodes and edges of graphs, the first share has all of the batch.

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
    sizes = [_rows(leaf) if each else None for leaf, each in zip(leaves, divided, strict=True)]
    largest, divides = tf.reduce_max([size for size in sizes if size is not None]), _divides(sizes, index)
    smallest = tf.reduce_min([size for size in sizes if size is not None])
    start, stop = row_range(smallest, index, count)

    def own(size: Any) -> tuple[Any, Any]:
        each = size // tf.maximum(smallest, 1)
        if divides is True:  # Each component has a row for each example.
            return start, stop
        return tf.where(divides, each * start, tf.where(index == 0, tf.zeros_like(size), size)), tf.where(
            divides, each * stop, size
        )

    first, last = own(largest)
    shares = [leaf if size is None else _share(leaf, *own(size)) for leaf, size in zip(leaves, sizes, strict=True)]
    tables = {str(number): True for number, each in enumerate(divided) if not each}
    return Part(tf.nest.pack_sequence_as(batch, shares), last - first, tables)


def dealt(strategy: tf.distribute.Strategy, batch: Any, divided: Sequence[bool], *, alone: bool = False) -> Any:
    """Returns a batch, which all processes have, with replicas' shares in place of tensors.

    Args:
        strategy: Whose replicas get them.
        batch: Of tensors, in any structure; None stands for what isn't there.
        divided: As of `share_of`.
        alone: Whether the first replica has all examples, and the others count for nothing.

    Returns:
        The batch's structure, where each replica has as many rows of each component; a `Part` of it otherwise.
    """
    count, local = replica_count(strategy), len(strategy.extended.worker_devices)
    leaves = tf.nest.flatten(batch)
    own_rows = [int(_rows(leaf)) for leaf, each in zip(leaves, divided, strict=True) if each]
    rows = max(own_rows, default=0)

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
    if all(divided) and rows and all(each == rows for each in own_rows) and rows % count == 0 and not alone:
        return shares
    return Part(shares, distributed(lambda part: part.rows), parts[next(iter(parts))].tables)


def _divides(sizes: Sequence[Any], index: tf.Tensor) -> Any:
    """Returns whether the components of a batch have so many rows, or some for each example: a bool scalar, or True.

    A batch of graphs may have so many nodes and so many edges, and a row of the one belongs to none of the other. The
    first share of such a batch has everything.
    """
    sizes = [size for size in sizes if size is not None]
    known = {tf.get_static_value(size) for size in sizes}
    if len(sizes) == 1 or (None not in known and len(known) == 1):
        return True
    smallest = tf.reduce_min(sizes)
    several = [size % tf.maximum(smallest, 1) == 0 for size in sizes]
    found = tf.reduce_all([*several, (smallest > 0) | (tf.reduce_max(sizes) == 0)])
    # It is said when it happens, which no spec tells; what isn't used isn't called.
    return tf.cond(found, lambda: True, lambda: tf.ensure_shape(_say_undivided(index), ()))


def _say_undivided(index: tf.Tensor) -> tf.Tensor:
    """Returns False, and says once that a batch isn't divided."""

    def say(_: np.int64) -> np.bool_:
        _say_once()
        return np.False_

    return tf.numpy_function(say, [index], tf.bool, stateful=False)


@functools.lru_cache(maxsize=1)
def _say_once() -> None:
    _LOG.warning(
        "The components of a batch have different numbers of rows, and not several for each example, as where graphs "
        "are joined into one: it isn't divided, and one replica computes all of it, so more of them gain nothing. "
        "Stack graphs along a separate axis, padded to one size, so that each component has a row for each graph"
    )


def without_copies(parts: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the shares of a dataset of parts, empty ones where they are copies: what a user's own loop expects."""

    def own(part: Part) -> Any:
        leaves = tf.nest.flatten(part.batch)
        shares = [
            leaf if str(number) in part.tables else _slice(leaf, 0, tf.where(part.rows > 0, _rows(leaf), 0))
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
    if isinstance(adapter, private.ArrayDataAdapter):
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


def _share(component: Any, start: Any, stop: Any) -> Any:
    """Returns some of a component's rows, or a copy of the row before them if these are none."""
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
_HARMLESS = frozenset(
    ["Assert", "HashTableV2", "LookupTableFindV2", "LookupTableSizeV2", "StatefulPartitionedCall", "If", "While"]
)


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
        found = function.function(*private.structure.to_tensor_list(takes, given))
        return private.structure.from_compatible_tensor_list(returns, found)

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
    definition = private.op_def_registry.get(operation)
    return definition is None or definition.is_stateful


# How a worker reads: the whole dataset, of which it keeps its share of each batch.
#
# If the processes read different data, each keeps a share of other examples. `Order` compares what they read: the first
# batch when all have trained on it, and an epoch's batches at its end, because tf.data's `shuffle` draws a new order
# for every iterator of a dataset: one that a single worker makes shifts that worker's orders. Where each worker reads
# its own data, a `JoinedDataset` ends an epoch on all workers with the shortest.


_LOG = logging.getLogger(__name__)

_SETS = (
    ". Sets of texts have another order in each worker, and so do labels that are numbered by it: use sorted(), or set "
    "PYTHONHASHSEED=0 before Python starts, as `toolkit launch` does"
)
_KEPT = 1024  # Batches by which a process may have read further than another.
_SHOWN = 64  # Elements of a batch's first example.


class Order:
    """The batches of each process's data, of which each keeps its share.

    Args:
        strategy: The strategy whose processes read the data.
        draws: Functions of the data that draw random numbers.
    """

    def __init__(self, strategy: tf.distribute.Strategy, draws: Sequence[Draw] = ()) -> None:
        self._strategy = strategy
        self._draws = draws
        self._differs = False
        self._sums: dict[int, int] = {}  # Of all batches up to one, by its index.
        self._first = 0

    def take(self, index: int, *parts: np.ndarray) -> None:
        """Records a batch when it is read.

        Args:
            index: Its index in its iterator.
            parts: The first batch, and the beginnings of others.
        """
        if index == 0:
            self._sums.clear()
        total = self._sums.get(index - 1, 0)
        for part in parts:
            raw = repr(part.tolist()).encode() if part.dtype == object else np.ascontiguousarray(part).tobytes()
            total = zlib.crc32(raw, total)
        self._sums[index] = total
        self._sums.pop(index - _KEPT, None)
        self._first = self._sums.get(0, self._first)

    def compare_first(self) -> None:
        """Warns if the processes' first batches differ. All must call it when they have read one."""
        found = difference(self._strategy, {"first batch": self._first})
        self._differs = found is not None
        if found is not None and (words := other_in_each_process(self._draws)):
            _LOG.warning(words)
        elif found is not None:
            sets = difference(self._strategy, {"order of sets": hash("a text")})
            _LOG.warning(
                "%s read a different first batch than %s. Each worker keeps its share of every batch and leaves the "
                "rest to the others, so if their data differ, most examples are never used. Give all workers the same "
                "data, or set AutoShardPolicy.OFF if each has its own%s",
                found.process,
                found.chief,
                "" if sets is None else _SETS,
            )

    def compare_epoch(self, epoch: int) -> None:
        """Warns once if the batches of an epoch differ. All must call it at the epoch's end."""
        if self._differs:  # All know it.
            return
        sums = dict(self._sums)
        last = int(extremes(self._strategy, np.array([max(sums, default=-1)], np.int64))[0][0])
        found = difference(self._strategy, {"order": sums.get(last)})
        self._differs = found is not None
        if found is not None:
            _LOG.warning(
                "In epoch %d %s read other batches than %s, so some examples were used twice and others not at all. A "
                "dataset shuffles differently on a worker that alone makes an iterator of it, as next(iter(data)) in a "
                "callback does: do that on all workers, or with another dataset. Leave deterministic=False out of "
                "the data's functions",
                epoch,
                found.process,
                found.chief,
            )


def show(dataset: tf.data.Dataset, look: Callable) -> tf.data.Dataset:
    """Returns the same dataset, which passes what it reads to a function.

    Args:
        dataset: Any dataset.
        look: Takes an element's index, and a NumPy array for each dense component: of the first element all of it, of
            others the beginning of the first row. What it returns isn't used. An iterator that goes on from a
            checkpoint goes on with its index.
    """

    def seen(index: np.int64, *parts: Any) -> np.bool_:
        look(int(index), *parts)
        return np.True_

    def beginning(leaf: tf.Tensor) -> tf.Tensor:
        return tf.reshape(leaf[:1] if leaf.shape.rank else leaf, [-1])[:_SHOWN]

    def keep(index: tf.Tensor, batch: Any) -> tf.Tensor:
        dense = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor) and leaf.dtype != tf.variant]

        # Stateless, so that the dataset's iterators can be saved. Only its result keeps it in the graph.
        def shown(parts: list) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(seen, [index, *parts], tf.bool, stateful=False), ())

        return tf.cond(tf.equal(index, 0), lambda: shown(dense), lambda: shown([beginning(leaf) for leaf in dense]))

    return with_cardinality(dataset.enumerate().filter(keep).map(lambda _, batch: batch), dataset.cardinality())


class JoinedDataset:
    """A distributed dataset for Keras that ends on all workers when the first one runs out.

    TensorFlow gives a worker that has run out empty batches, whose mean is NaN, and Keras ends its
    epoch by itself, so that the others wait for ever. Here the workers ask one another, while a batch
    is read, whether each has one more: 1 to 2 ms a step.

    A generator, whose length nobody knows, is read by one iterator on all workers, so that they see
    the same batches.

    Args:
        strategy: The strategy whose workers read.
        source: The strategy's own distributed dataset.
    """

    def __init__(self, strategy: tf.distribute.Strategy, source: Any) -> None:
        self._strategy = strategy
        self._source = source
        self._warned = False

    @property
    def element_spec(self) -> Any:
        """TensorFlow's spec of an element."""
        return self._source.element_spec

    def __iter__(self) -> "_JoinedIterator":
        return _JoinedIterator(self, iter(self._source))

    def _warn(self) -> None:
        if not self._warned:
            _LOG.warning("The workers have different numbers of batches: an epoch ends when one runs out")
        self._warned = True


class _JoinedIterator(Iterator):
    def __init__(self, dataset: JoinedDataset, source: Iterator) -> None:
        self._dataset = dataset
        self._source = source
        self._begun = False

    def __next__(self) -> Any:
        # Workers can't exchange anything when an iterator is created: Keras creates some that it doesn't use, and not
        # on every worker.
        if not self._begun:
            self._begun = True
            self._read_ahead()
        if not self._more:
            # Keras takes this for the end; a StopIteration would be lost on the way.
            raise tf.errors.OutOfRangeError(None, None, "a worker has run out of data")
        batch = self._held
        self._read_ahead()
        return batch

    def _read_ahead(self) -> None:
        self._held = next(self._source, None)
        lowest, highest = extremes(self._dataset._strategy, np.array([self._is_whole(self._held)], np.int64))
        self._more = bool(lowest[0])
        if lowest[0] != highest[0]:
            self._dataset._warn()

    def _is_whole(self, batch: Any) -> bool:
        """Returns whether this worker has a batch, of which TensorFlow may have given a replica nothing."""
        if batch is None or isinstance(batch, Part):
            return batch is not None
        first = tf.nest.flatten(batch)[0]
        return all(int(tf.shape(part)[0]) > 0 for part in self._dataset._strategy.experimental_local_results(first))


_READ_AHEAD = 2  # Batches, where TensorFlow has no thread that copies them to devices.
_Policy = tf.data.experimental.AutoShardPolicy


class ReadsShares:
    """A mixin in front of TensorFlow's strategies of several processes.

    Attributes:
        order: That of the data which Keras's loop was given last; None where each worker has its own data.
    """

    order: Order | None = None
    extended: Any
    num_replicas_in_sync: int
    distribute_datasets_from_function: Callable

    @whole_for_keras
    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Gives each replica its share of every global batch, unless the dataset's own options say otherwise.

        Every worker reads the whole dataset and keeps its share, so that no example counts twice;
        of what it reads it decodes its own share only, where that can be told. Under
        AutoShardPolicy.OFF each worker's batches are its own, and together they are the global
        batch; under FILE TensorFlow deals the files out. Both may leave one worker with less: an
        epoch of `fit` then ends for all with the first that runs out. A training loop of your own
        gets TensorFlow's own dataset there, and else empty shares of batches that are too small.
        """
        if not isinstance(dataset, tf.data.Dataset) or not any(by_example(dataset)):
            return super().experimental_distribute_dataset(dataset, options)  # type: ignore[misc]
        policy = dataset.options().experimental_distribute.auto_shard_policy
        self.order = None
        local = len(self.extended.worker_devices)
        # Only Keras's loop, in Python, may end together: a user's loop may be a tf.function.
        iterator = epoch_iterator()
        for_keras = iterator is not None and processes(self) > 1
        if policy not in (_Policy.AUTO, _Policy.DATA):
            if not for_keras or policy != _Policy.OFF:
                theirs = super().experimental_distribute_dataset(dataset, options)  # type: ignore[misc]
                return JoinedDataset(self, theirs) if for_keras else theirs
            own = split(dataset, indices=range(local), count=local)
            return JoinedDataset(self, self.distribute_datasets_from_function(lambda _: own, options))
        undivided, decode = undecoded(dataset)
        if for_keras:
            self.order = Order(self, draws_of(dataset))
            undivided = show(in_order(undivided), self.order.take)

        def share(context: tf.distribute.InputContext) -> tf.data.Dataset:
            mine = shares_of_worker(context)
            return decode(split(undivided, indices=mine, count=self.num_replicas_in_sync))

        if iterator is None:
            return self.distribute_datasets_from_function(lambda context: without_copies(share(context)), options)
        if not for_keras:
            return self.distribute_datasets_from_function(share, options)
        shared = self._read_evenly(share)
        # Keras also knows the length of arrays, whose datasets don't have it.
        batches = iterator.data_adapter.num_batches
        self._check_lengths(-1 if batches is None else int(batches))
        unknown = batches is None and dataset.cardinality() != tf.data.INFINITE_CARDINALITY
        return JoinedDataset(self, shared) if unknown else shared

    def _has_one_device(self) -> bool:
        return len(self.extended.worker_devices) == 1

    def _read_evenly(self, share: Callable) -> Any:
        """Returns what Keras reads this worker's shares from; no worker has more batches than another."""
        if self._has_one_device():
            # As Keras reads for one device without a strategy. TensorFlow's distributed iterators, which copy batches
            # to devices, take 80 ms to create in each epoch, and at times crash if one is dropped before its end, as
            # Keras does in each epoch (2.21: a SIGSEGV in MultiDeviceBuffer::BackgroundThread, in one of some hundred
            # evaluations on arrays).
            pipelines, index = processes(self), process_index(self)
            return untuned(share(tf.distribute.InputContext(pipelines, index, pipelines)).prefetch(_READ_AHEAD))
        extended = self.extended
        before = extended.experimental_enable_get_next_as_optional
        # Otherwise all workers ask one another in each step whether each has a batch.
        extended.experimental_enable_get_next_as_optional = False
        try:
            return self.distribute_datasets_from_function(lambda context: untuned(share(context)))
        finally:
            extended.experimental_enable_get_next_as_optional = before

    def _check_lengths(self, batches: int) -> None:
        """Checks that the workers read equally long data in the same call; otherwise they would wait for ever."""
        call = call_of()
        facts = np.array([batches, CALLS.index(call) if call in CALLS else -1], np.int64)
        (lowest, first), (highest, last) = (map(int, each) for each in extremes(self, facts))
        if first != last:
            raise calls_differ(self)
        if lowest != highest:
            raise StrategyError(
                asked="every worker is to read the whole data set, and to keep its share of each batch",
                found=f"the workers' data have different lengths, such as {lowest} and {highest} batches",
                remedy="Give all workers the same data, or set AutoShardPolicy.OFF where each has its own data",
            )
