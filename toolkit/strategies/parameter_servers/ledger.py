"""What each ps has applied, each step once, and with which staleness.

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

CAPACITY = 4096  # The number of remembered steps, each in a slot. The chief collects them before they are overwritten.
NOTHING, INTERRUPTED, APPLIED = 0, 1, 2  # A slot's entry: one of these, or APPLIED + the staleness.


class Ledger:
    """What one ps, named by its device, has applied."""

    def __init__(self, device: str) -> None:
        self.device = device
        with tf.device(device):
            self._begun = tf.Variable(0, dtype=tf.int64, trainable=False, name="updates_begun")
            self._finished = tf.Variable(0, dtype=tf.int64, trainable=False, name="updates_finished")
            self._slots = tf.Variable(tf.zeros([CAPACITY], tf.int32), trainable=False, name="updates_by_step")

    def version(self) -> tf.Tensor:
        """Returns, on the ps, how many updates are finished. Read the variables after it."""
        with tf.device(self.device):
            return self._finished.read_value()

    def begin(self, slot: tf.Tensor, version: tf.Tensor) -> tf.Tensor:
        """Records that an update begins; returns, on the ps, the entry for `finish`.

        Args:
            slot: The step modulo CAPACITY, an int64 scalar on the ps.
            version: What `version` was when the parameters were read.
        """
        with tf.device(self.device):
            # The only operation of TensorFlow that adds and returns the earlier value atomically.
            ticket = tf.raw_ops.ResourceCountUpTo(resource=self._begun.handle, limit=2**62, T=tf.int64)
            with tf.control_dependencies([self._slots.scatter_update(_one(slot, INTERRUPTED))]):
                return tf.cast(ticket - version, tf.int32) + APPLIED

    def finish(self, slot: tf.Tensor, entry: tf.Tensor) -> None:
        """Records that the update is finished."""
        with tf.device(self.device):
            self._slots.scatter_update(_one(slot, entry))
            self._finished.assign_add(1)

    def entries(self, steps: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns the current entries of some steps."""
        return self._slots.numpy()[np.asarray(steps) % CAPACITY]

    def clear(self) -> None:
        """Forgets all steps; none may be under way."""
        self._slots.assign(tf.zeros([CAPACITY], tf.int32))


def collect(ledgers: Iterable[Ledger], first: int, count: int) -> tuple[list[int], int]:
    """Takes the entries of `count` steps from `first` on, all of them done, and clears the ledgers.

    Returns:
        The staleness of each step's gradient, in updates, on the ps where it was highest, and how
        many steps some ps has not wholly applied.
    """
    ledgers = list(ledgers)
    if not ledgers:  # Nothing is trainable.
        return [], 0
    entries = np.stack([ledger.entries(np.arange(first, first + count)) for ledger in ledgers])
    for ledger in ledgers:
        ledger.clear()
    staleness = (entries - APPLIED).max(axis=0)
    return [int(updates) for updates in staleness if updates >= 0], int((entries < APPLIED).any(axis=0).sum())


def _one(slot: tf.Tensor, entry: Any) -> tf.IndexedSlices:
    return tf.IndexedSlices(values=tf.reshape(tf.cast(entry, tf.int32), [1]), indices=tf.reshape(slot, [1]))
