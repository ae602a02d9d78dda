"""Values that the processes of a strategy exchange between steps, and the barrier at their end.

Each process contributes one value. Every process must make the same calls in the same order, or all hang:
they are collectives. Under a strategy of one process nothing is sent. `difference` compares facts that must be the same
in all processes, and `seed_alike` seeds their random numbers alike.
"""

import contextlib
import functools
import json
import logging
import pickle
import random
import re
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.support import status
from toolkit.support.frames import line_of, users_frame

_LOG = logging.getLogger(__name__)

_SILENCE = 20.0  # Seconds for which a process waits for the others without a message. TensorFlow gives up after 60.
_REMEDY = (
    "Every worker must make the same calls of fit, evaluate, predict and save: check that none of them leaves one out"
)
_ELSEWHERE = (
    "The others may be in a callback or in their input, which `toolkit launch` would name. Or not all workers make the "
    "same calls of fit, evaluate, predict and save"
)
_ANOTHER = "another worker makes another call meanwhile"
_LATE, _OTHER = "timed out waiting for other workers", re.compile(r"Collective instance \d+ expected type")
_LENGTHS = (256, 4096, 65536)
_CHUNK = 1 << 20  # Bytes broadcast at once. The exchange of as many needs some times their memory.
PATIENCE = 600.0  # Seconds for which processes wait for one that reads from a slow disk or writes to it.
_BARRIER, _BROADCAST = 1_000_003, 1_000_019  # Far from TensorFlow's keys, which count from 1.


def processes(strategy: tf.distribute.Strategy) -> int:
    """Returns how many processes train together; 1 for strategies of one process."""
    # The default strategy doesn't say which devices it uses. In a step of `fit`, `num_replicas_in_sync` is 1.
    replicas = strategy.extended._num_replicas_in_sync
    return replicas // len(strategy.extended.worker_devices) if replicas > 1 else 1


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether this process writes shared files: chief:0, or worker:0 without a chief."""
    resolver = strategy.cluster_resolver
    if resolver is None or not resolver.task_type:
        return True
    if resolver.task_type == "worker":
        return resolver.task_id == 0 and "chief" not in resolver.cluster_spec().jobs
    return resolver.task_type == "chief"


def broadcast(strategy: tf.distribute.Strategy, value: np.ndarray) -> np.ndarray:
    """Returns the chief's array on every process, bit for bit.

    Args:
        strategy: The strategy whose processes take part.
        value: An array of the same shape and dtype on every process; only the chief's elements matter.
    """
    value = np.array(value, order="C")
    set_to_chiefs(strategy, value)
    return value


def set_to_chiefs(strategy: tf.distribute.Strategy, array: np.ndarray) -> None:
    """Sets an array to the chief's, bit for bit. Beside the array it needs a few MiB.

    Args:
        strategy: The strategy whose processes take part.
        array: Contiguous, and of the same shape and dtype on every process; only the chief's elements matter.
    """
    if processes(strategy) == 1:
        return
    content = array.reshape(-1).view(np.uint8)
    with tf.device("CPU:0"), meeting(strategy):
        for start in range(0, len(content), _CHUNK):
            _broadcast_chunk(strategy, content[start : start + _CHUNK])


def _broadcast_chunk(strategy: tf.distribute.Strategy, content: np.ndarray) -> None:
    count = -(-len(content) // 8)  # Integers of 64 bits: TensorFlow broadcasts only a few dtypes.
    how = {
        "group_size": processes(strategy),
        "group_key": _BROADCAST,
        "instance_key": count,  # TensorFlow keeps the shape of each key for ever.
        "timeout_seconds": PATIENCE,
    }
    if is_chief(strategy):
        sent = np.zeros(count, np.int64)
        sent.view(np.uint8)[: len(content)] = content
        tf.raw_ops.CollectiveBcastSendV2(input=sent, **how)
    else:
        received = tf.raw_ops.CollectiveBcastRecvV2(T=tf.int64, shape=[count], **how)
        content[:] = np.asarray(received).view(np.uint8)[: len(content)]


def mean(strategy: tf.distribute.Strategy, value: Any) -> tf.Tensor:
    """Returns the mean of the processes' values, with the same bits on each."""
    value = tf.convert_to_tensor(value)
    return _sum(strategy, value) / processes(strategy) if processes(strategy) > 1 else value


def extremes(strategy: tf.distribute.Strategy, value: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the smallest and the largest of the processes' values, element by element.

    Args:
        strategy: The strategy whose processes take part.
        value: A one-dimensional array of the same shape on every process.
    """
    # By a sum over a table with a row for each process: strategies reduce by sum and mean only.
    value = np.asarray(value)
    count = processes(strategy)
    if count == 1:
        return value, value
    rows = np.zeros((count, *value.shape), value.dtype)
    rows[process_index(strategy)] = value
    table = _sum(strategy, rows).numpy()
    return table.min(axis=0), table.max(axis=0)


def gather(strategy: tf.distribute.Strategy, text: bytes) -> list[bytes]:
    """Returns all processes' texts on each, in the order of the processes' indices.

    Args:
        strategy: The strategy whose processes take part.
        text: Some kilobytes at most; its length may differ from process to process.
    """
    count = processes(strategy)
    if count == 1:
        return [text]
    longest = int(extremes(strategy, np.array([len(text)], np.int64))[1][0])
    rows = np.zeros((count, 1 + -(-longest // 8)), np.int64)
    rows[process_index(strategy), 0] = len(text)
    rows[process_index(strategy), 1:] = np.frombuffer(text.ljust(8 * (rows.shape[1] - 1), b"\0"), np.int64)
    table = _sum(strategy, rows).numpy()
    return [row[1:].tobytes()[: row[0]] for row in table]


def barrier(strategy: tf.distribute.Strategy, *, seconds: float) -> None:
    """Returns when every process has called this.

    Raises:
        tf.errors.OpError: They haven't after so many seconds, or one of them is gone.
    """
    if processes(strategy) > 1:
        with tf.device("CPU:0"):
            # The barrier has its own group. In the sums' group, the value of a process at the barrier would be added
            # into a sum in which another process still is.
            tf.raw_ops.CollectiveReduceV2(
                input=[1.0],
                group_size=processes(strategy),
                group_key=_BARRIER,
                instance_key=_BARRIER,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
                communication_hint="auto",
                timeout_seconds=seconds,
            ).numpy()


def process_index(strategy: tf.distribute.Strategy) -> int:
    """Returns this process's index among several; the chief comes before the workers."""
    resolver = strategy.cluster_resolver
    return resolver.task_id + (resolver.task_type == "worker" and "chief" in resolver.cluster_spec().jobs)


def process_names(strategy: tf.distribute.Strategy) -> list[str]:
    """Returns the processes' names, such as "worker:0", in the order of their indices."""
    cluster = strategy.cluster_resolver.cluster_spec()
    jobs = [job for job in ("chief", "worker") if job in cluster.jobs]
    return [f"{job}:{index}" for job in jobs for index in cluster.task_indices(job)]


@contextlib.contextmanager
def meeting(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """A context for an exchange of all processes, outside of a step.

    Raises:
        StrategyError: Another process makes another call instead, or none at all.
    """
    with _waiting_aloud(strategy):
        try:
            yield
        except tf.errors.OpError as error:
            text = str(error)
            if _LATE not in text and not _OTHER.search(text):
                raise
            late = "not all of them make this call, and TensorFlow gives up after a minute"
            raise calls_differ(strategy, late if _LATE in text else _ANOTHER) from None


def calls_differ(strategy: tf.distribute.Strategy, found: str = _ANOTHER) -> StrategyError:
    """Returns the error of a process whose call of Keras isn't that of all others."""
    asked = f"{_own(strategy)} waits for the other workers, {_where(sys._getframe(1))}"
    return StrategyError(asked=asked, found=found, remedy=_REMEDY)


@contextlib.contextmanager
def _waiting_aloud(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Makes a process that waits long for the others log where: some may have made a call that others haven't."""
    thread = threading.get_ident()
    over = threading.Event()

    def tell() -> None:
        waited, pause = 0.0, _SILENCE
        while not over.wait(pause):
            waited += pause
            said = f"{waited:.0f} s for the other workers, {_where(sys._current_frames().get(thread))}"
            if status.listened():  # The launcher sees where the others are.
                status.report(waits={"seconds": waited, "words": said})
            else:
                _LOG.warning("%s has waited %s. %s", _own(strategy), said, _ELSEWHERE)
            pause = waited  # Until the waiting has doubled.

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        with status.in_phase(status.WAITING):
            yield
    finally:
        over.set()


def _own(strategy: tf.distribute.Strategy) -> str:
    return process_names(strategy)[process_index(strategy)]


def _where(frame: Any) -> str:
    """Returns which call of Keras's a thread is in, and the user's line that made it."""
    return f"in {call_of(frame)} at {line_of(users_frame(frame))}"


CALLS = ("fit", "evaluate", "predict", "save")


def call_of(frame: Any = None) -> str:
    """Returns the outermost call of Keras's that a thread is in, one of CALLS, or "a call" for any other.

    Args:
        frame: The thread's; None for this one's.
    """
    frame = frame or sys._getframe(1)
    call, users = "a call", users_frame(frame)
    while frame is not users:
        of_keras = frame.f_globals.get("__name__", "").startswith("keras.src.")
        if of_keras and frame.f_code.co_name in CALLS:
            call = frame.f_code.co_name
        frame = frame.f_back
    return call


def _sum(strategy: tf.distribute.Strategy, value: Any) -> tf.Tensor:
    """Sums arrays with one of a few lengths. Each length is traced once, and TensorFlow warns if there are many."""
    with meeting(strategy):
        return _added_up(strategy, value)


def _added_up(strategy: tf.distribute.Strategy, value: Any) -> tf.Tensor:
    value = np.asarray(value)
    length = next((length for length in _LENGTHS if length >= value.size), value.size)
    padded = np.zeros(length, value.dtype)
    padded[: value.size] = value.ravel()
    return tf.reshape(_summing(strategy)(tf.constant(padded))[: value.size], value.shape)


@functools.lru_cache(maxsize=4)  # A strategy lives as long as its program, but tests create several.
def _summing(strategy: tf.distribute.Strategy) -> Any:
    local = len(strategy.extended.worker_devices)

    @tf.autograph.experimental.do_not_convert
    def contribute(value: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        first = tf.equal(context.replica_id_in_sync_group % local, 0)
        return context.all_reduce("SUM", tf.where(first, value, tf.zeros_like(value)))

    @tf.function(reduce_retracing=False)
    @tf.autograph.experimental.do_not_convert
    def total(value: tf.Tensor) -> tf.Tensor:
        return strategy.experimental_local_results(strategy.run(contribute, args=(value,)))[0]

    return total


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
    seeded = zip(("Python's random", "NumPy", "TensorFlow"), (differ[0], differ[1], unseeded or differ[2]), strict=True)
    names = ", ".join(name for name, was in seeded if was)
    _LOG.info("Workers draw from %s with seed %d, so that their shuffles agree: it had no common seed", names, seed)
