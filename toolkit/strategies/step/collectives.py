"""Exchanges between the replicas of a step, each with its gradient.

tf.distribute has an all-reduce, and an all-gather that asks for every shape first and whose gradient is a whole
all-reduce. Here are the exchanges that layers split over replicas need, none of which moves a byte too many. Within one
process a replica reads the others' tensors; between processes TensorFlow's own collective operations move them, each
call with its own keys (`_call`).

Call them in a replica context (`strategy.run`, or a layer in `fit`), by every replica, in the same order, with tensors
of the same shape. Each says among which replicas of the mesh it is, and takes a communication dtype, None for the
tensor's own, in which elements are sent, both in the exchange and in its gradient; sums are made in the tensor's own.

A new one is a public function by `_exchanged`, with the exchange that is its gradient, and a private one of three
cases: one replica, replicas of one process (`_within_process`), several processes (`_collective`). They are tested in
tests/strategies/test_mesh.py.
"""

import contextlib
import itertools
import os
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from toolkit import cluster as _cluster
from toolkit.errors import StrategyError
from toolkit.strategies.context import this_step
from toolkit.strategies.mesh import Among, mesh_of, replica_count
from toolkit.strategies.options import COMMUNICATIONS
from toolkit.strategies.processes.agreement import process_index, processes
from toolkit.strategies.upstream import private
from toolkit.strategies.upstream.wrapping import attach

_ALONE = [0], 0
_LONG = 64 << 10  # Bytes from which half the copies and sums of an all-reduce are worth another round.


def replica_id_and_count(among: Among = Among.ALL) -> tuple[int, int]:
    """Returns this replica's position among those that exchange, and their number; (0, 1) without an exchange.

    Among all, its place is its id. Parameter servers' workers train by themselves, and so does everything outside a
    replica context.
    """
    members, place = this_step.members.get(among, _ALONE)
    return place, len(members)


def local_step() -> contextlib.AbstractContextManager[None]:
    """A context in which a replica exchanges with none, for tracing a step that each replica makes alone."""
    return this_step.having(is_local=True, count=1, place=0, members={})


def check_piece() -> None:
    """Ends the trace of what XLA is to compile, where replicas are about to exchange something."""
    if this_step.piece is not None:
        this_step.piece.refuse()


def overlaps_exchanges(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether an exchange between processes begins as soon as its own input is ready."""
    several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return several and not _are_ordered(strategy)


def _are_ordered(strategy: tf.distribute.Strategy) -> bool:
    """Whether a replica's exchanges between processes run in the order in which they were made, by a token.

    NCCL's must. Without a token TensorFlow lets each one of a graph wait for the one before it, and where a process has
    several replicas, that is another replica's, which waits for the first.
    """
    return communication_of(strategy) == "nccl" or len(strategy.extended.worker_devices) > 1


def all_gather(x: tf.Tensor, *, among: Among, dtype: tf.DType | None = None) -> tf.Tensor:
    """Returns all replicas' tensors: [n, ...] to [replicas, n, ...]."""
    return _exchanged(x, among, dtype, _gather, _scatter)


def gather_anywhere(x: tf.Tensor, *, among: Among) -> tf.Tensor:
    """Returns what `all_gather` does, with no place in the order of a graph's exchanges, and without a gradient.

    TensorFlow lets the collectives of a graph run in the order in which they were made, but for those of its first
    kind: `AutomaticControlDependencies` leaves them out. These know shapes and keys when they are traced. NCCL needs
    the order.

    Args:
        x: Of a shape that is known, and of any dtype.
        among: Which replicas exchange.
    """
    _, count = replica_id_and_count(among)
    if count == 1 or _is_one_process() or communication_of(tf.distribute.get_strategy()) == "nccl":
        return _gather(x, among, None)
    check_piece()
    members, place = this_step.members[among]
    sent = x if x.dtype in (tf.float32, tf.float64, tf.int32, tf.int64) else _as_words(x)
    size = sent.shape.num_elements()
    got = tf.raw_ops.CollectiveGather(
        input=tf.reshape(sent, [-1]),
        group_size=count,
        group_key=_group_key(among, members),
        instance_key=_numbered("CollectiveGather", sent.dtype, members[place], size) % _KEY_LIMIT,
        shape=[count * size],
        timeout_seconds=_TIMEOUT,
    )
    if sent.dtype != x.dtype:
        got = tf.reshape(tf.bitcast(tf.reshape(got, [count, size]), x.dtype), [count, -1])[:, : x.shape.num_elements()]
    return tf.reshape(got, [count, *x.shape])


def reduce_scatter(x: tf.Tensor, *, among: Among, dtype: tf.DType | None = None) -> tf.Tensor:
    """Sends row r to replica r, and returns the sum of what each sent here: [replicas, n, ...] to [n, ...]."""
    return _exchanged(x, among, dtype, _scatter, _gather)


def all_to_all(x: tf.Tensor, *, among: Among, dtype: tf.DType | None = None) -> tf.Tensor:
    """Sends row r to replica r, and returns the received rows: [replicas, n, ...] to the same."""
    return _exchanged(x, among, dtype, _swap, _swap)


def _exchanged(x: tf.Tensor, among: Among, dtype: tf.DType | None, forward: Callable, backward: Callable) -> tf.Tensor:
    x = tf.convert_to_tensor(x)  # A layer's constraint has the variable, which replicas would merge into one.
    if not private.could_possibly_record():  # TensorFlow walks through a step's graph for each custom gradient.
        return forward(x, among, dtype)

    @tf.custom_gradient
    def exchange(x: tf.Tensor) -> tuple:
        return forward(x, among, dtype), lambda dy: backward(dy, among, dtype)

    return exchange(x)


def all_reduce(x: tf.Tensor, *, among: Among = Among.ALL, dtype: tf.DType | None = None) -> tf.Tensor:
    """Returns the sum over replicas of tensors of any shape. It has no gradient."""
    _, count = replica_id_and_count(among)
    if count == 1:
        return x
    if _is_one_process():
        return _within_process(x, among, lambda values, _: _sum(_sent(values, dtype), x.dtype))
    if count == 2 and _adds_on_the_way(x, dtype):
        return tf.reshape(_collective(ring_sum, tf.reshape(x, [-1]), among), tf.shape(x))
    # Half the rounds of a reduce-scatter and a gather. Of two replicas each needs only the other's, and of a short
    # tensor a few more bytes take less time than a round.
    if count == 2 or (x.shape.num_elements() or _LONG) * x.dtype.size * count <= _LONG:
        return tf.reshape(tf.reduce_sum(_gather(tf.reshape(x, [1, -1]), among, dtype), 0), tf.shape(x))
    flat = tf.reshape(x, [-1])
    size = tf.size(flat)
    rows = tf.reshape(tf.pad(flat, [[0, -size % count]]), [count, -1])
    whole = _gather(_scatter(rows, among, dtype), among, dtype)
    return tf.reshape(tf.reshape(whole, [-1])[:size], tf.shape(x))


def all_reduce_here(gradients: Sequence[Any], dtype: tf.DType | None) -> list:
    """Returns the sums over the replicas of one process, of which `tf.IndexedSlices` are concatenated."""

    def sent(gradient: Any) -> Any:
        if dtype is None or not isinstance(gradient, tf.IndexedSlices):
            return gradient
        values = tf.cast(tf.cast(gradient.values, dtype), gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)

    def added(given: Sequence) -> Any:
        if not isinstance(given[0], tf.IndexedSlices):
            return _sum(_sent(list(given), dtype), given[0].dtype)
        values, indices = (
            tf.concat(each, 0) for each in zip(*((each.values, each.indices) for each in given), strict=True)
        )
        return tf.IndexedSlices(values, indices, given[0].dense_shape)

    return _within_process(
        [sent(each) for each in gradients],
        Among.ALL,
        lambda all_of_them, _: [added(each) for each in zip(*all_of_them, strict=True)],
    )


def of_each(x: tf.Tensor) -> tf.Tensor:
    """Returns all replicas' scalars, [replicas]."""
    return _gather(tf.reshape(x, [1]), Among.ALL, None)[:, 0]


def order_of_rows() -> list[int]:
    """Returns the replicas' ids in the order of a batch's rows, as `batches.shares_of_worker` has it."""
    in_process, count = len(tf.distribute.get_strategy().extended.worker_devices), this_step.count
    return sorted(range(count), key=lambda replica: (replica % in_process, replica // in_process))


def rows_of_all(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns all replicas' rows in the batch's order, and the index of this replica's first. It has no gradient."""
    sizes, order = _gather(tf.shape(x)[:1], Among.ALL, None)[:, 0], order_of_rows()
    first = tf.add_n([tf.zeros_like(sizes[0]), *(sizes[each] for each in order[: order.index(this_step.place)])])
    if _is_one_process():
        return _within_process(x, Among.ALL, lambda values, _: tf.concat([values[each] for each in order], 0)), first
    padding = [[0, tf.reduce_max(sizes) - tf.shape(x)[0]], *[[0, 0]] * (x.shape.rank - 1)]
    padded = _gather(tf.pad(x, padding), Among.ALL, None)
    return tf.concat([padded[each, : sizes[each]] for each in order], 0), first


def all_reduce_max(x: tf.Tensor, *, among: Among) -> tf.Tensor:
    """Returns the largest of the replicas' scalars."""
    _, count = replica_id_and_count(among)
    if count == 1:
        return x
    return tf.reduce_max(_gather(tf.reshape(x, [1]), among, None))


# One exchange each, without a gradient.


def _gather(x: tf.Tensor, among: Among, dtype: tf.DType | None) -> tf.Tensor:
    _, count = replica_id_and_count(among)
    if count == 1:
        return x[None]
    if _is_one_process():
        return _within_process(x, among, lambda values, _: tf.cast(tf.stack(_sent(values, dtype)), x.dtype))
    sent = tf.reshape(tf.cast(x, dtype or x.dtype), [-1])
    got = tf.reshape(_collective(tf.raw_ops.CollectiveGatherV2, sent, among), tf.concat([[count], tf.shape(x)], 0))
    got.set_shape([count, *x.shape])
    return tf.cast(got, x.dtype)


def _scatter(x: tf.Tensor, among: Among, dtype: tf.DType | None) -> tf.Tensor:
    _, count = replica_id_and_count(among)
    if count == 1:
        return x[0]
    if _is_one_process():
        return _within_process(x, among, lambda values, index: _sum(_sent([v[index] for v in values], dtype), x.dtype))
    return tf.reduce_sum(_swap(x, among, dtype), 0)


def _swap(x: tf.Tensor, among: Among, dtype: tf.DType | None) -> tf.Tensor:
    _, count = replica_id_and_count(among)
    if count == 1:
        return x
    if _is_one_process():
        return _within_process(
            x, among, lambda values, index: tf.cast(tf.stack(_sent([v[index] for v in values], dtype)), x.dtype)
        )
    sent = tf.reshape(tf.cast(x, dtype or x.dtype), [count, -1])
    return _as(x, _collective(tf.raw_ops.CollectiveAllToAllV2, sent, among))


def _adds_on_the_way(x: tf.Tensor, dtype: tf.DType | None) -> bool:
    """Returns whether TensorFlow's own all-reduce exchanges a tensor of two replicas.

    It copies and adds half as much as a gather and a sum of both, but has two rounds: a short tensor is gathered. It
    adds in the dtype that is sent, and with two summands the order doesn't change the sum.
    """
    long = (x.shape.num_elements() or 0) * x.dtype.size >= _LONG
    on_ring = communication_of(tf.distribute.get_strategy()) != "nccl"
    return long and on_ring and dtype in (None, x.dtype) and x.dtype in (tf.float32, tf.float64)


def _as(x: tf.Tensor, got: tf.Tensor) -> tf.Tensor:
    got = tf.reshape(got, tf.shape(x))
    got.set_shape(x.shape)
    return tf.cast(got, x.dtype)


def _is_one_process() -> bool:
    return isinstance(tf.distribute.get_strategy(), tf.distribute.MirroredStrategy)


def _within_process(x: Any, among: Among, result: Callable[[list, int], tf.Tensor]) -> tf.Tensor:
    """Computes each replica's result in one thread, from its group's tensors and its position in the group."""
    check_piece()
    context = tf.distribute.get_replica_context()
    replica_id, groups = this_step.place, this_step.groups[among]

    def all_results(strategy: tf.distribute.Strategy, value: Any) -> list:
        # Gradients are each exchange's own. TensorFlow walks back from the result of each to its input, and would go on
        # from the other replicas' tensors through all that they have computed.
        values = [_without_gradient(each) for each in strategy.experimental_local_results(value)]
        results = []
        for index, device in enumerate(strategy.extended.worker_devices):
            members = groups[index]
            with tf.device(device):
                results.append(result([values[member] for member in members], members.index(index)))
        return results

    try:
        return context.merge_call(all_results, args=(x,))[replica_id]
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise StrategyError(
            asked="the replicas of this process exchange values in a step",
            found="the step does so in a tf.function, a branch or a loop, where TensorFlow doesn't allow it",
            remedy="Compute masked or weighted losses outside of it; Keras compiles the whole step anyway",
        ) from error


def _without_gradient(value: Any) -> Any:
    return tf.nest.map_structure(tf.stop_gradient, value, expand_composites=True)


def _sent(values: list, dtype: tf.DType | None) -> list:
    """Returns tensors as they arrive."""
    return values if dtype is None else [tf.cast(value, dtype) for value in values]


def _sum(values: list, dtype: tf.DType) -> tf.Tensor:
    return tf.add_n([tf.cast(value, dtype) for value in values])


def _collective(operation: Callable, x: tf.Tensor, among: Among) -> tf.Tensor:
    check_piece()
    return _call(operation, x, among, *this_step.members.get(among, _ALONE))


# Far from TensorFlow's keys, which count from 1, and from one another: for all, for the first group, for a shard.
_KEYS = {Among.ALL: 1_000_007, Among.GROUP: 1_100_000, Among.PEERS: 1_200_000}
_KEY_LIMIT = 2**31 - 1
_TIMEOUT = 0.0  # Seconds. TensorFlow's own heartbeat ends a collective whose peer is lost.


class _Eager:
    """Stands for no function."""


_EAGER = _Eager()
_counts: weakref.WeakKeyDictionary[Any, dict[int, itertools.count]] = weakref.WeakKeyDictionary()


def ring_sum(**given: Any) -> tf.Tensor:
    """TensorFlow's own all-reduce, for `_call`."""
    return tf.raw_ops.CollectiveReduceV2(merge_op="Add", final_op="Id", **given)


def _call(operation: Callable, x: tf.Tensor, among: Among, members: Sequence[int], place: int) -> tf.Tensor:
    """Runs one of TensorFlow's collectives on this replica. They don't accept bfloat16, so its bits are sent.

    On the ring of a process with one replica no token orders it: it begins when its own input is there, beside others
    that wait for theirs. Other calls are in the order of TensorFlow's own.
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
        return tf.bitcast(_call(operation, tf.bitcast(x, tf.float16), among, members, place), tf.bfloat16)
    strategy, replica_id = tf.distribute.get_strategy(), members[place]
    in_process = len(strategy.extended.worker_devices)
    number = _numbered(operation.__name__, x.dtype, replica_id, tf.size(x, tf.int64))
    return operation(
        input=x,
        group_size=len(members),
        group_key=_group_key(among, members),
        instance_key=tf.cast(tf.math.floormod(number, _KEY_LIMIT), tf.int32),
        ordering_token=[ordering_token(strategy, replica_id % in_process)] if _are_ordered(strategy) else [],
        communication_hint="nccl" if communication_of(strategy) == "nccl" else "auto",
        timeout_seconds=_TIMEOUT,
    )


def _group_key(among: Among, members: Sequence[int]) -> int:
    return _KEYS[among if len(members) < replica_count() else Among.ALL] + members[0]


def _numbered(operation: str, dtype: tf.DType, replica_id: int, size: Any) -> Any:
    """Returns what a replica's next call is known by, a number as `size` is one."""
    kind = zlib.crc32(f"{operation} {dtype.name}".encode())
    return (next(_places(replica_id)) * 1_000_003 + kind) % _KEY_LIMIT * 1_000_003 + size


def _as_words(x: tf.Tensor) -> tf.Tensor:
    """Returns a tensor's bytes as elements of 32 bits, which every collective accepts."""
    each = tf.int32.size // x.dtype.size
    flat = tf.reshape(x, [-1])
    return tf.bitcast(tf.reshape(tf.pad(flat, [[0, -flat.shape[0] % each]]), [-1, each]), tf.int32)


def _places(replica_id: int) -> Iterator[int]:
    """Returns the counter of a replica's calls in the function being traced, branches and loops included."""
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
        graph = graph.outer_graph
    return _counts.setdefault(graph or _EAGER, defaultdict(itertools.count))[replica_id]


def joined(tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, Callable[[tf.Tensor], list[tf.Tensor]]]:
    """Returns tensors of one dtype as one flat tensor, and a function that unpacks such a tensor."""

    def split(flat: tf.Tensor) -> list[tf.Tensor]:
        parts = tf.split(flat, tf.stack([tf.size(each) for each in tensors]), num=len(tensors))
        return [shaped(part, each) for part, each in zip(parts, tensors, strict=True)]

    return tf.concat([tf.reshape(each, [-1]) for each in tensors], 0), split


def shaped(part: tf.Tensor, like: Any) -> tf.Tensor:
    """Returns a tensor with another's shape, as far as it is known statically."""
    part = tf.reshape(part, tf.shape(like))
    part.set_shape(like.shape)
    return part


# How several processes exchange tensors: with NCCL between GPUs, or TensorFlow's ring over gRPC.
#
# TensorFlow takes the ring unless it is asked for NCCL, with GPUs too. NCCL wants a GPU for each replica, and all its
# calls in one order on every device. What is read and wrapped of private parts of TensorFlow here is tested in
# `tests/strategies/test_exchange_internals.py`.


_IMPLEMENTATIONS = {
    "nccl": tf.distribute.experimental.CommunicationImplementation.NCCL,
    "ring": tf.distribute.experimental.CommunicationImplementation.RING,
}


def choose(
    asked: str,
    *,
    gpus: Sequence[int],
    addresses: Sequence[str],
    own: str,
    environ: Mapping[str, str] = os.environ,
) -> tuple[str, str]:
    """Returns "nccl" or "ring", and why it isn't NCCL.

    Args:
        asked: "auto", "nccl" or "ring".
        gpus: Of each GPU that this process uses, how many logical devices it has.
        addresses: "host:port" of each process that trains.
        own: This one's.
        environ: Environment variables.

    Raises:
        StrategyError: There is no such way, or NCCL is asked for where it can't be.
    """
    StrategyError.check_choice(asked, COMMUNICATIONS, asked=f"communication={asked!r}")
    host = own.rpartition(":")[0]
    here = sum(address.rpartition(":")[0] == host for address in addresses)
    if asked == "ring":
        return "ring", "communication='ring' was set"
    if why := _lacking(gpus):
        if asked == "nccl":
            raise StrategyError(
                asked="communication='nccl'", found=why, remedy="Leave it out, or give each replica its own GPU"
            )
    elif asked == "auto" and here > 1 and "CUDA_VISIBLE_DEVICES" not in environ:
        why = f"{here} workers on {host} may use the same GPUs, because CUDA_VISIBLE_DEVICES isn't set"
    return ("ring" if why else "nccl"), why


def _lacking(gpus: Sequence[int]) -> str:
    if not gpus:
        return "there is no GPU to use"
    return "a GPU is split into several logical devices" if max(gpus) > 1 else ""


def options_for(options: Any, asked: str, resolver: Any) -> tuple[Any, str]:
    """Returns TensorFlow's options for a strategy, and why they don't choose NCCL; a given implementation is kept.

    Args:
        options: TensorFlow's `CommunicationOptions`; None for its defaults.
        asked: As `choose` takes it.
        resolver: A resolver of TensorFlow's, or None.
    """
    options = options or tf.distribute.experimental.CommunicationOptions()
    if options.implementation != tf.distribute.experimental.CommunicationImplementation.AUTO and asked == "auto":
        return options, "" if kind_of(options) == "nccl" else "CommunicationOptions ask for it"
    jobs = resolver.cluster_spec().as_dict() if resolver is not None else {}
    addresses, own = [], ""
    if jobs and resolver.task_type:
        together = _cluster.Cluster(jobs)
        addresses = [together.address(task) for task in together.synchronous]
        own = together.address(_cluster.Task(resolver.task_type, resolver.task_id))
    gpus = [len(tf.config.get_logical_device_configuration(gpu) or [1]) for gpu in tf.config.get_visible_devices("GPU")]
    kind, why = choose(asked, gpus=gpus, addresses=addresses, own=own)
    if kind == "ring" and asked == "auto":  # TensorFlow chooses it.
        return options, why
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=options.bytes_per_pack,
        timeout_seconds=options.timeout_seconds,
        implementation=_IMPLEMENTATIONS[kind],
    ), why


def kind_of(options: Any) -> str:
    """Returns TensorFlow's choice for some options: "nccl" or "ring"."""
    return "nccl" if options.implementation == _IMPLEMENTATIONS["nccl"] else "ring"


def number_by_call(strategy: tf.distribute.Strategy) -> None:
    """Allows functions with collectives in loops under a strategy. Later calls do nothing."""
    ways = (getattr(strategy.extended, name, None) for name in ("_cross_device_ops", "_collective_ops"))
    for launcher in {id(each): each for way in ways for each in getattr(way, "_launchers", ())}.values():
        attach(launcher, _use_unique_instance_key=_unique_outside_loops)


def communication_of(strategy: tf.distribute.Strategy) -> str:
    """Returns how the processes of a strategy exchange tensors: "nccl" or "ring"."""
    return kind_of(strategy.extended._communication_options)


def ordering_token(strategy: tf.distribute.Strategy, replica: int) -> tf.Tensor:
    """Returns the resource with which TensorFlow orders its calls of NCCL on one of this process's replicas.

    Other calls on the same device must be ordered by the same one.
    """
    return strategy.extended._cross_device_ops._launchers[replica]._get_ordering_token()


def _unique_outside_loops(original: Callable, launcher: Any) -> bool:
    """Numbers the collectives of a function that is traced in a branch or a loop.

    Else TensorFlow numbers them when it is called, through a placeholder that nothing feeds there:
    `compile(steps_per_execution=2)` then fails on several replicas with "You must feed a value for
    placeholder". All workers trace the same functions in the same order.
    """
    outer = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)
    return not getattr(outer, "is_control_flow_graph", False) and bool(original(launcher))


# Measures how long this process waits in each step for the slowest one: the time around a step's first exchange.
#
# That exchange is of the replicas' numbers of examples, which are known as soon as a replica has its input: who comes
# to it last keeps the others waiting, by its input or by what it does between steps, such as in callbacks. Two readings
# of a clock and an addition, in the graph.


_handle: Any = None  # The sum of waited seconds, for the whole process.


def timed(exchange: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """Returns a step's first exchange of a tensor; with several processes, it measures the exchange's time.

    Args:
        exchange: A collective.
        x: Known as soon as this replica has its input.
    """
    strategy = tf.distribute.get_strategy()
    if processes(strategy) == 1 or this_step.replica != _first_here(strategy):
        return exchange(x)
    with tf.device("CPU:0"):
        with tf.control_dependencies([x]):
            before = tf.timestamp()
        with tf.control_dependencies([before]):
            x = tf.identity(x)
    found = exchange(x)
    with tf.device("CPU:0"), tf.control_dependencies([found]):
        tf.raw_ops.AssignAddVariableOp(resource=_counter(), value=tf.timestamp() - before)
    return found


def waited() -> float:
    """Returns how many seconds this process has waited for others at the beginning of steps."""
    if _handle is None:
        return 0.0
    return float(tf.raw_ops.ReadVariableOp(resource=_handle, dtype=tf.float64).numpy())


def _first_here(strategy: Any) -> int:
    """Returns the id of this process's first replica."""
    mesh = mesh_of()
    return process_index(strategy) * (mesh.shards * mesh.groups // processes(strategy))


def _counter() -> Any:
    global _handle
    if _handle is None:
        # Not with tf.Variable, of which a strategy would create one for all replicas.
        with tf.init_scope(), tf.device("CPU:0"):
            _handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=[], shared_name="toolkit_waited")
            tf.raw_ops.AssignVariableOp(resource=_handle, value=tf.zeros([], tf.float64))
    return _handle
