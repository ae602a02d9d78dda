"""The first rows of a batch that one device can't hold: a step is computed with those, both ways.

They are half of the batch's rows, then half of that, until one device holds them; as many as make uneven shares.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from toolkit.strategies.batches import Part, dealt, has_shape, row_count
from toolkit.strategies.check.state import Saved
from toolkit.strategies.mesh import replica_count

_WORDS = ("RESOURCE_EXHAUSTED", "ALLOC_FAILED", "out of memory")  # XLA's and CUDA's own errors have no class for it.


class Rows(NamedTuple):
    """How many rows a step has, and how it is made with fewer.

    Attributes:
        number: How many there are.
        least: With how many it can be made.
        taking: Takes how many, returns both ways of the step.
    """

    number: int
    least: int
    taking: Callable[[int], Any]


def is_too_large(error: Exception) -> bool:
    """Whether an error says that a device, or this machine, has too little memory."""
    known = isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError))
    return known or any(each.lower() in str(error).lower() for each in _WORDS)


def halved(rows: int, shares: int) -> int:
    """Returns about half as many rows, of which not all shares have as many, where that can be."""
    half = rows // 2
    if not half or half % shares:
        return half
    return half - 1 if half > shares else half + (half + 1 < rows)  # Each share has a row, where there are so many.


def row_counts(batch: Any, divided: Sequence[bool]) -> list[int]:
    """Returns how many rows each component of a batch has that is by example; [] if the first rows can't be taken."""
    sizes = [int(row_count(leaf)) for leaf, each in zip(tf.nest.flatten(batch), divided, strict=True) if each]
    smallest = min(sizes, default=0)
    return sizes if smallest and all(size % smallest == 0 for size in sizes) else []


def by_example(whole: Any, given: Any) -> list[bool]:
    """Returns for each component of a whole batch whether it has rows of its own.

    Args:
        whole: The batch.
        given: What replicas were given of it.
    """
    tables = set(map(int, given.tables)) if isinstance(given, Part) else set()
    leaves = enumerate(tf.nest.flatten(whole))
    return [number not in tables and has_shape(leaf) and bool(leaf.shape.rank) for number, leaf in leaves]


def first_rows(whole: Any, divided: Sequence[bool], rows: int) -> Any:
    """Returns a batch's first rows.

    Args:
        whole: The batch; of a component with several rows for each example all of these are taken.
        divided: Which of its components have rows.
        rows: How many.
    """
    smallest = min(row_counts(whole, divided))

    def one(leaf: Any) -> Any:
        count = min(rows, smallest) * (int(row_count(leaf)) // smallest)
        if isinstance(leaf, tf.SparseTensor):
            return tf.sparse.slice(leaf, [0] * leaf.shape.rank, [count, *leaf.dense_shape[1:].numpy()])
        return leaf[:count]

    leaves = zip(tf.nest.flatten(whole), divided, strict=True)
    return tf.nest.pack_sequence_as(whole, [one(leaf) if each else leaf for leaf, each in leaves])


def dealt_to_loop(strategy: tf.distribute.Strategy, whole: Any, divided: Sequence[bool]) -> Any:
    """Returns a batch as a script's own loop gives it to `strategy.run`: what isn't by example stays as it is."""
    leaves = tf.nest.flatten(whole)
    own = dealt(strategy, [leaf for leaf, each in zip(leaves, divided, strict=True) if each], [True] * sum(divided))
    shares = iter(own.batch if isinstance(own, Part) else own)
    return tf.nest.pack_sequence_as(
        whole, [next(shares) if each else leaf for leaf, each in zip(leaves, divided, strict=True)]
    )


def counted(strategy: tf.distribute.Strategy, batches: Sequence[Any], divided: Sequence[bool]) -> int:
    """Returns how many rows the largest of some batches has, 0 if the first ones of them can't be taken.

    Args:
        strategy: Whose replicas share them.
        batches: Whole ones.
        divided: Which of their components have rows.
    """
    every = [row_counts(each, divided) for each in batches]
    return max(min(sizes) for sizes in every) if all(every) and replica_count(strategy) > 1 else 0


@contextlib.contextmanager
def tried_again(saved: Saved, now: Saved) -> Iterator[None]:
    """A context in which replicas make the step once more; then variables and random numbers are what they were.

    Args:
        saved: What variables held before the step.
        now: What they hold.
    """
    pythons, numpys = random.getstate(), np.random.get_state(legacy=True)
    saved.put_back()
    try:
        yield
    finally:
        now.put_back()
        random.setstate(pythons)
        np.random.set_state(numpys)
