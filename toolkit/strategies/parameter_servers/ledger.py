"""What each ps has applied, once each, and how stale it was.

A worker that is killed may have sent its gradient before: TensorFlow then runs the step again, and
applies it twice. So each ps keeps, for every step, whether its own variables were updated by it; a
step that is run again leaves those alone. The staleness of a gradient is the number of updates that
were begun after its parameters were read and before it was applied itself, plus those that were
under way while they were read: never too small.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

__all__ = ["APPLIED", "CAPACITY", "INTERRUPTED", "NOTHING", "Ledger", "balance"]

CAPACITY = 4096  # Steps that are remembered; the chief takes them over before they are overwritten.
NOTHING, INTERRUPTED, APPLIED = 0, 1, 2  # What is noted for a step; APPLIED + its staleness.


class Ledger:
    """Of one ps.

    Args:
        device: Of the ps.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        with tf.device(device):
            self._begun = tf.Variable(0, dtype=tf.int64, trainable=False, name="updates_begun")
            self._finished = tf.Variable(0, dtype=tf.int64, trainable=False, name="updates_finished")
            self._steps = tf.Variable(tf.zeros([CAPACITY], tf.int32), trainable=False, name="updates_by_step")

    def version(self) -> tf.Tensor:
        """Returns, on the ps, how many updates are finished. Read the variables after it."""
        with tf.device(self.device):
            return self._finished.read_value()

    def begin(self, place: tf.Tensor, version: tf.Tensor) -> tf.Tensor:
        """Notes that an update begins; returns, on the ps, what is to be noted when it is finished.

        Args:
            place: int64, the step modulo CAPACITY, on the ps.
            version: What `version` was when the parameters were read.
        """
        with tf.device(self.device):
            # The one operation of TensorFlow's that adds and says what was there before in one go.
            ticket = tf.raw_ops.ResourceCountUpTo(resource=self._begun.handle, limit=2**62, T=tf.int64)
            with tf.control_dependencies([self._steps.scatter_update(_one(place, INTERRUPTED))]):
                return tf.cast(ticket - version, tf.int32) + APPLIED

    def finish(self, place: tf.Tensor, note: tf.Tensor) -> None:
        """Notes that the update is finished."""
        with tf.device(self.device):
            self._steps.scatter_update(_one(place, note))
            self._finished.assign_add(1)

    def look(self, steps: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns what is noted for some steps, now."""
        return self._steps.numpy()[np.asarray(steps) % CAPACITY]

    def clear(self) -> None:
        """Forgets all steps; none may be under way."""
        self._steps.assign(tf.zeros([CAPACITY], tf.int32))


def balance(ledgers: Iterable[Ledger], first: int, count: int) -> tuple[list[int], int]:
    """Takes over what was noted of some steps, all of them done, and forgets it.

    Args:
        ledgers: Of all ps.
        first: The first step.
        count: How many there are.

    Returns:
        How stale each step's gradient was, where it was latest, and how many steps some ps has not wholly applied.
    """
    ledgers = list(ledgers)
    if not ledgers:  # Nothing is trainable.
        return [], 0
    steps = np.arange(first, first + count)
    notes = np.stack([ledger.look(steps) for ledger in ledgers])
    for ledger in ledgers:
        ledger.clear()
    ages = (notes - APPLIED).max(axis=0)
    return [int(age) for age in ages if age >= 0], int((notes < APPLIED).any(axis=0).sum())


def _one(place: tf.Tensor, note: Any) -> tf.IndexedSlices:
    return tf.IndexedSlices(values=tf.reshape(tf.cast(note, tf.int32), [1]), indices=tf.reshape(place, [1]))
