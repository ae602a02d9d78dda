"""The same random numbers on every process, where the user has not seen to it.

Each worker takes its share of every global batch. If their shuffles differ, some examples of an
epoch are used twice and others not at all, and nothing says so.
"""

import logging
import pickle
import random
import zlib

import numpy as np
import tensorflow as tf

from toolkit.strategies.agreement import broadcast, extremes

__all__ = ["agree"]

_LOG = logging.getLogger(__name__)


def agree(strategy: tf.distribute.Strategy) -> None:
    """Seeds those of TensorFlow's, NumPy's and Python's generators that differ between the processes.

    A generator that the user seeded alike everywhere is left alone. The common seed is drawn from
    the chief's `random`.
    """
    states = (random.getstate(), np.random.get_state(legacy=True))
    marks = np.array([zlib.crc32(pickle.dumps(state)) for state in states], np.int64)
    lowest, highest = extremes(strategy, marks)
    differ = lowest != highest
    unseeded = tf.compat.v1.random.get_seed(None) == (None, None)
    if not unseeded and not differ.any():
        return
    drawn = random.getrandbits(31) if differ[0] or unseeded else 0
    seed = int(broadcast(strategy, np.array([drawn], np.int64))[0])
    if unseeded:
        tf.random.set_seed(seed)
    if differ[0]:
        random.seed(seed)
    if differ[1]:
        np.random.seed(seed)
    _LOG.info("Random generators set alike on all workers, so that shuffles agree: seed %d", seed)
