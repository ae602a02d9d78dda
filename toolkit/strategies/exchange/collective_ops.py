"""TensorFlow's collective operations between processes, each call with its own keys."""

import itertools
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from toolkit.strategies.exchange import internals
from toolkit.strategies.exchange.mesh import Among, replicas

__all__ = ["call", "ring_sum"]

# Far from TensorFlow's keys, which count from 1, and from one another: for all, for the first group, for a shard.
_KEYS = {Among.ALL: 1_000_007, Among.GROUP: 1_100_000, Among.PEERS: 1_200_000}
_TIMEOUT = 0.0  # Seconds. TensorFlow's own heartbeat ends a collective whose peer is lost.


class _Eager:
    """Stands for no function."""


_EAGER = _Eager()
_counts: weakref.WeakKeyDictionary[Any, dict[int, itertools.count]] = weakref.WeakKeyDictionary()


def ring_sum(**given: Any) -> tf.Tensor:
    """TensorFlow's own all-reduce, for `call`."""
    return tf.raw_ops.CollectiveReduceV2(merge_op="Add", final_op="Id", **given)


def call(operation: Callable, x: tf.Tensor, among: Among, members: Sequence[int], place: int) -> tf.Tensor:
    """Runs one of TensorFlow's collectives on this replica. They don't accept bfloat16, so its bits are sent.

    On the ring no token orders it: it begins when its own input is there, beside others that wait for theirs. NCCL's
    calls are in the order of TensorFlow's own.
    All replicas make the same calls in the same order in each function, so that its place there identifies a call; not
    a count of all that were traced, because one worker alone may have to trace a function again, for a last batch of
    another size. TensorFlow keeps the type and shape of what was sent under an instance key, and a smaller batch would
    end the training with an error: so the key is made of the place, of the operation and of the tensor's size, and
    what is sent is flat, or has a row for each replica. Two calls with one key by chance differ in operation, dtype or
    size, because the same ones at two places never have one key: TensorFlow ends the step with an error.

    Args:
        operation: `ring_sum`, or of `tf.raw_ops` such as `CollectiveGatherV2`.
        x: What is sent.
        among: Which replicas exchange, as the mesh names them.
        members: Their ids.
        place: This replica's position in that list.
    """
    if x.dtype == tf.bfloat16:  # Bits aren't added on the way.
        return tf.bitcast(call(operation, tf.bitcast(x, tf.float16), among, members, place), tf.bfloat16)
    strategy, replica_id = tf.distribute.get_strategy(), members[place]
    nccl = internals.communication_of(strategy) == "nccl"
    in_process = len(strategy.extended.worker_devices)
    kind = zlib.crc32(f"{operation.__name__} {x.dtype.name}".encode())
    number = (next(_places(replica_id)) * 1_000_003 + kind) % (2**31 - 1) * 1_000_003 + tf.size(x, tf.int64)
    return operation(
        input=x,
        group_size=len(members),
        group_key=_KEYS[among if len(members) < replicas() else Among.ALL] + members[0],
        instance_key=tf.cast(tf.math.floormod(number, 2**31 - 1), tf.int32),
        ordering_token=[internals.ordering_token(strategy, replica_id % in_process)] if nccl else [],
        communication_hint="nccl" if nccl else "auto",
        timeout_seconds=_TIMEOUT,
    )


def _places(replica_id: int) -> Iterator[int]:
    """Returns the counter of a replica's calls in the function being traced, branches and loops included."""
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
        graph = graph.outer_graph
    return _counts.setdefault(graph or _EAGER, defaultdict(itertools.count))[replica_id]
