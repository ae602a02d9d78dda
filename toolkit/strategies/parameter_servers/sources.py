"""Where a step's batch comes from.

numbered     a function of the step's number, which each worker computes for itself: nothing is sent, and
             a step that is run again on another worker sees the same examples
handed out   any other dataset: the chief reads each batch once, and sends it along with the step
per worker   a dataset that each worker makes and reads for itself, endlessly
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

__all__ = ["Reader", "Stream", "numbered", "per_worker", "reader_of"]

_TAG = "_toolkit_source"


def numbered(dataset: tf.data.Dataset, function: Callable, *, start: int, count: int | None) -> tf.data.Dataset:
    """Says of a dataset that its batches are a function of their number; returns it.

    Args:
        dataset: Of those batches.
        function: Takes (number, share, shares), the number an int64 tensor, and returns that share of that batch.
        start: Number of the first batch.
        count: Of batches; None without end.
    """
    setattr(dataset, _TAG, ("numbered", function, start, count))
    return dataset


def per_worker(dataset: tf.data.Dataset, function: Callable) -> tf.data.Dataset:
    """Says of a dataset that each worker makes one like it; returns it.

    Args:
        dataset: As the function makes it.
        function: Takes the number of the worker.
    """
    # Iterators stay from one `fit` to the next: an end of one can take tf.data a minute (see `data.pipeline`).
    setattr(dataset, _TAG, ("per worker", function, {}))
    return dataset


class Stream:
    """What `experimental_distribute_dataset` gives to Keras.

    Args:
        dataset: Any, of global batches.
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self.dataset = dataset
        tag: tuple = getattr(dataset, _TAG, ("handed out",))
        self.kind: str = tag[0]
        self.facts: tuple = tag[1:]
        self.spec = dataset.element_spec
        flat = tf.nest.flatten(self.spec)
        # Keras stands an empty Optional where there are no labels or weights.
        self.real = [number for number, spec in enumerate(flat) if isinstance(spec, tf.TensorSpec)]
        self._others = any(not _empty(spec) for spec in flat if not isinstance(spec, tf.TensorSpec))

    @property
    def key(self) -> Any:
        """What a function that was traced for it depends on."""
        return self.kind, self.facts[0] if self.kind == "numbered" else None, str(self.spec)

    @property
    def plain(self) -> bool:
        """Whether it holds nothing but tensors."""
        return not self._others

    def __iter__(self) -> "Reader":
        return Reader(self)

    def signature(self, count: int) -> list[tf.TensorSpec]:
        """Returns what is sent along with `count` steps: their batches, or the worker's iterator, or nothing."""
        if self.kind == "per worker":
            return [tf.data.IteratorSpec(self.spec)]
        if self.kind == "numbered":
            return []
        flat = [_of_any_size(spec) for spec in tf.nest.flatten(self.spec)]
        return [flat[number] for _ in range(count) for number in self.real]

    def iterator(self, worker: int, *, anew: bool) -> Any:
        """Returns a worker's iterator, made on it; call it where operations run there.

        Args:
            worker: Its number.
            anew: Whether the worker may be another process than before.
        """
        make, iterators = self.facts
        if anew or worker not in iterators:
            iterators[worker] = iter(make(worker))
        return iterators[worker]

    def batch(self, place: int, number: Any, data: Any, *, share: int = 0, shares: int = 1) -> Any:
        """Returns a batch, while a step is traced.

        Args:
            place: Of the step in its dispatch.
            number: Of the batch, int64.
            data: What was sent along.
            share: Which share of it is wanted, of a numbered one.
            shares: How many there are.
        """
        if self.kind == "numbered":
            return self.facts[0](number, share, shares)
        if self.kind == "per worker":
            return next(data[0])
        width = len(self.real)
        mine = data[place * width : (place + 1) * width]
        flat: list[Any] = [None] * len(tf.nest.flatten(self.spec))
        for position, value in zip(self.real, mine, strict=True):
            flat[position] = value
        return tf.nest.pack_sequence_as(self.spec, flat)


class Reader(Iterator):
    """Goes through a stream once."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.place = 0
        self._local: Any = None

    def __next__(self) -> Any:
        """Returns a batch here, on the chief: Keras builds the model with one, and predicts."""
        if self._local is None:
            self._local = iter(self.stream.dataset)
            # A stream that was taken from before goes on from there.
            skip = self.place if self.stream.kind == "handed out" else 0
            next(itertools.islice(self._local, skip, skip), None)
        return next(self._local)

    def take(self) -> Any:
        """Returns what a step needs for its batch: its number, or the batch itself.

        Raises:
            StopIteration: There is no further batch.
        """
        if self.stream.kind == "numbered":
            _, start, count = self.stream.facts
            if count is not None and self.place >= count:
                raise StopIteration
            self.place += 1
            return start + self.place - 1
        if self.stream.kind == "per worker":
            self.place += 1
            return self.place - 1
        if self._local is None:
            self._local = iter(self.stream.dataset)
        flat = tf.nest.flatten(next(self._local))
        self.place += 1
        return [flat[number] for number in self.stream.real]


def reader_of(given: Any) -> Reader:
    """Returns a reader, also where `train_on_batch` hands over a Python generator of one batch."""
    if isinstance(given, Reader):
        return given
    batch = tuple(part for part in next(given) if part is not None)
    return iter(Stream(tf.data.Dataset.from_tensors(tf.nest.map_structure(tf.convert_to_tensor, batch))))


def _of_any_size(spec: Any) -> Any:
    """A last batch, or a share of one, is smaller."""
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return spec
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _empty(spec: Any) -> bool:
    return type(spec).__name__ in ("OptionalSpec", "NoneTensorSpec")
