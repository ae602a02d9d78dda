"""What must be the same in all processes: facts, which are compared, and random numbers, which are seeded alike."""

import json
import logging
import pickle
import random
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from toolkit.strategies.processes.agreement import broadcast, extremes, gather, process_names, processes

__all__ = ["Difference", "difference", "seed_alike"]

_LOG = logging.getLogger(__name__)
_UNSEEDED, _ASKED_FOR = -1, -2  # Stands for a seed: none was given, or TensorFlow demands the user's own.


class Difference(NamedTuple):
    """Where a process differs from the chief.

    Attributes:
        process: The first one that differs, such as "worker:1".
        theirs: That process's facts.
        chief: The process that all others are held against.
        chiefs: The chief's facts.
        keys: Which of them differ.
    """

    process: str
    theirs: dict[str, Any]
    chief: str
    chiefs: dict[str, Any]
    keys: list[str]


def difference(strategy: tf.distribute.Strategy, facts: Mapping[str, Any]) -> Difference | None:
    """Compares every process's facts with the chief's. All must call it, and all get the same result.

    Args:
        strategy: The strategy whose processes are compared.
        facts: Values that JSON can hold.
    """
    if processes(strategy) == 1:
        return None
    chiefs, *others = map(json.loads, gather(strategy, json.dumps(dict(facts), default=str).encode()))
    chief, *names = process_names(strategy)
    for process, theirs in zip(names, others, strict=True):
        keys = [key for key in {**chiefs, **theirs} if chiefs.get(key) != theirs.get(key)]
        if keys:
            return Difference(process, theirs, chief, chiefs, keys)
    return None


def _seed_of_tensorflow() -> int:
    try:
        seed = tf.compat.v1.random.get_seed(None)[0]
    except RuntimeError:  # With enable_op_determinism, TensorFlow demands a seed from the user if one is needed.
        return _ASKED_FOR
    return _UNSEEDED if seed is None else int(seed)


def seed_alike(strategy: tf.distribute.Strategy) -> None:
    """Seeds those of TensorFlow's, NumPy's and Python's generators that differ between the processes.

    Each worker takes its share of every global batch. If their shuffles differed, some examples of
    an epoch would be used twice and others not at all, and nothing would say so. A generator that the
    user seeded alike everywhere is left alone. The common seed is drawn from the chief's `random`.
    """
    states = (random.getstate(), np.random.get_state(legacy=True))
    facts = [*(zlib.crc32(pickle.dumps(state)) for state in states), _seed_of_tensorflow()]
    lowest, highest = extremes(strategy, np.array(facts, np.int64))
    differ = lowest != highest
    given = int(highest[2])
    unseeded = given == _UNSEEDED
    if not unseeded and not differ.any():
        return
    # The decisions below depend only on what all processes have seen, so all take part in the same exchanges.
    drawn = random.getrandbits(31) if differ[0] or unseeded else 0
    seed = int(broadcast(strategy, np.array([drawn], np.int64))[0])
    if unseeded or differ[2]:
        seed = given if given >= 0 else seed  # One of the workers has the user's own seed.
        tf.random.set_seed(seed)
    if differ[0]:
        random.seed(seed)
    if differ[1]:
        np.random.seed(seed)
    _LOG.info("All workers use seed %d, so that their shuffles agree", seed)
