"""Where a step's batch comes from.

numbered     a function of the batch's number, which each worker computes for itself: nothing is sent, and
             a step that is run again on another worker sees the same examples
sent         any other dataset: the chief reads each batch once, and sends it along with the step
per worker   a dataset that each worker makes and reads for itself, endlessly
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.batches import row_count, row_range
from toolkit.strategies.pipelines import by_example

_TAG = "_toolkit_source"


def numbered(
    dataset: tf.data.Dataset, function: Callable, *, start: int = 0, count: int | None = None
) -> tf.data.Dataset:
    """Marks a dataset whose batches are functions of their numbers, so that workers compute them; returns it.

    Args:
        dataset: A dataset of global batches.
        function: Takes a batch's number, an int64 scalar, and which of how many shares of that batch
            is wanted, two ints or int64 scalars; returns the share. It is traced and runs on the worker.
        start: The number of the first batch.
        count: The number of batches; None without end.
    """
    setattr(dataset, _TAG, ("numbered", function, start, count))
    return dataset


def per_worker(dataset: tf.data.Dataset, function: Callable) -> tf.data.Dataset:
    """Records on a dataset that each worker creates its own, with a function of the worker's index; returns it."""
    # Iterators are kept from one `fit` to the next: ending one can take tf.data a minute (see `pipelines.untuned`).
    setattr(dataset, _TAG, ("per worker", function, {}))
    return dataset


class Stream:
    """What `experimental_distribute_dataset` returns to Keras for a dataset of global batches.

    Attributes:
        kind: One of the three above.
        element_spec: What TensorFlow says of a global batch.
        is_dense: Whether the batches hold nothing but dense tensors.
        tables: The numbers of flattened components that aren't by example and that no share divides.
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self.dataset = dataset
        tag: tuple = getattr(dataset, _TAG, ("sent",))
        self.kind: str = tag[0]
        self.facts: tuple = tag[1:]
        self.element_spec = dataset.element_spec
        flat = tf.nest.flatten(self.element_spec)
        # Keras has an empty Optional in place of missing labels or weights.
        self.present = [index for index, spec in enumerate(flat) if isinstance(spec, tf.TensorSpec)]
        examples = by_example(dataset)
        self._divided = [examples[index] for index in self.present]
        self.tables = frozenset(number for number, each in enumerate(examples) if not each)
        self.is_dense = all(
            isinstance(spec, tf.TensorSpec) or type(spec).__name__ in ("OptionalSpec", "NoneTensorSpec")
            for spec in flat
        )

    @property
    def key(self) -> Any:
        """What a function that was traced for this stream depends on."""
        return self.kind, self.facts[0] if self.kind == "numbered" else None, str(self.element_spec)

    def __iter__(self) -> "Reader":
        return Reader(self)

    def signature(self, count: int) -> list[tf.TensorSpec]:
        """Returns the specs of what is sent along with `count` steps: batches, the worker's iterator, or nothing."""
        if self.kind == "per worker":
            return [tf.data.IteratorSpec(self.element_spec)]
        if self.kind == "numbered":
            return []
        flat = tf.nest.flatten(self.element_spec)
        # A last batch, or a share of one, is smaller.
        sent = [
            tf.TensorSpec([None, *flat[index].shape[1:]], flat[index].dtype) if flat[index].shape.rank else flat[index]
            for index in self.present
        ]
        return sent * count

    def iterator(self, worker: int, *, restarted: bool) -> Any:
        """Returns a worker's iterator, created on that worker; call it where operations run there.

        Args:
            worker: The worker's index.
            restarted: Whether the worker may be another process than before.
        """
        make, iterators = self.facts
        if restarted or worker not in iterators:
            iterators[worker] = iter(make(worker))
        return iterators[worker]

    def batch(self, index: int, number: Any, data: Any, *, share: int = 0, shares: int = 1) -> Any:
        """Returns a batch while a step is traced.

        Args:
            index: The step's index in its dispatch.
            number: The batch's number, int64.
            data: What was sent along with the dispatch.
            share: Of a numbered batch, which share of `shares` is wanted.
            shares: The number of shares.
        """
        if self.kind == "numbered":
            return self.facts[0](number, share, shares)
        if self.kind == "per worker":
            return next(data[0])
        width = len(self.present)
        flat: list[Any] = [None] * len(tf.nest.flatten(self.element_spec))
        for position, value in zip(self.present, data[index * width : (index + 1) * width], strict=True):
            flat[position] = value
        return tf.nest.pack_sequence_as(self.element_spec, flat)

    def whole(self, item: Any) -> Any:
        """Returns the global batch of which a reader took this; not of data that each worker reads for itself."""
        return self.batch(0, np.int64(item) if self.kind == "numbered" else None, item)

    def number(self, item: Any) -> int:
        """Returns what `batch` and `rows` are given for a batch: its number; its rows, if it is sent along."""
        if self.kind == "numbered":
            return int(item)
        pairs = zip(item, self._divided, strict=True)
        return max((int(leaf.shape[0]) for leaf, examples in pairs if examples), default=0)

    def rows(self, number: Any) -> tf.Tensor:
        """Returns the number of examples of a batch while a share of it is traced; an int64 scalar.

        A numbered one is made for it: ask only where it is needed.
        """
        return self.rows_of(self.facts[0](number, 0, 1)) if self.kind == "numbered" else number

    def rows_of(self, batch: Any) -> tf.Tensor:
        """Returns the number of examples of a batch, or of a share of one; an int64 scalar."""
        leaves = [tf.nest.flatten(batch)[index] for index in self.present]
        return row_count([leaf for leaf, examples in zip(leaves, self._divided, strict=True) if examples])

    def shares(self, item: Any, count: int) -> list[tuple[int, list]]:
        """Returns the shares of a batch that hold examples, each with its index and what is sent along with it.

        Args:
            item: What the reader took for the batch.
            count: The number of shares.

        Raises:
            StrategyError: Each worker reads its own data.
        """
        if self.kind == "per worker":
            raise StrategyError(
                asked="synchronous rounds with distribute_datasets_from_function",
                found="the workers of a round share one batch, and that function gives each its own",
                remedy="Give fit one dataset of global batches",
            )
        if self.kind == "numbered":
            return [(share, []) for share in range(count)]
        pairs = list(zip(item, self._divided, strict=True))
        ranges = [row_range(self.number(item), share, count) for share in range(count)]
        return [
            (share, [_share(leaf, share, count) if examples else leaf for leaf, examples in pairs])
            for share, (start, stop) in enumerate(ranges)
            if stop > start
        ]


class Reader(Iterator):
    """Reads a stream once."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._taken = 0
        # Created at once, as Keras creates its iterators: each draws a seed for a shuffle, even if it isn't used.
        self._local: Any = iter(stream.dataset) if stream.kind == "sent" else None

    def __next__(self) -> Any:
        """Returns a batch on the chief, with which Keras builds the model, and predicts."""
        if self._local is None:
            self._local = iter(self.stream.dataset)
        return next(self._local)

    def take(self) -> Any:
        """Returns what a step needs for its batch: the number, or the tensors to send along.

        Raises:
            StopIteration: There is no further batch.
        """
        item: Any = None
        if self.stream.kind == "numbered":
            _, start, count = self.stream.facts
            if count is not None and self._taken >= count:
                raise StopIteration
            item = start + self._taken
        elif self.stream.kind == "sent":
            flat = tf.nest.flatten(next(self._local))
            item = [flat[index] for index in self.stream.present]
        self._taken += 1
        return item


class Again(Reader):
    """Reads what another reader has taken.

    Args:
        stream: The other's.
        items: What it took.
    """

    def __init__(self, stream: Stream, items: Sequence[Any]) -> None:
        self.stream = stream  # No iterator of its own: each draws a seed for a shuffle.
        self._items = iter(items)

    def take(self) -> Any:
        """As of every reader."""
        return next(self._items)


def reader_of(given: Any) -> Reader:
    """Returns a reader, also if `train_on_batch` passes a Python generator of one batch."""
    if isinstance(given, Reader):
        return given
    batch = tuple(part for part in next(given) if part is not None)
    return iter(Stream(tf.data.Dataset.from_tensors(tf.nest.map_structure(tf.convert_to_tensor, batch))))


def _share(leaf: Any, share: int, count: int) -> Any:
    """Returns a share of a component that may have fewer rows than others: a copy of one where it has none."""
    start, stop = row_range(int(leaf.shape[0]), share, count)
    return leaf[max(min(start, stop - 1), 0) : stop]
