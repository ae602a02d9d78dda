"""Sends gradients between processes while other gradients are still being computed.

A collective without an ordering token begins when its own input is there. Three things keep TensorFlow from using it,
each of which alone hides nothing of an exchange: its executor computes the whole chain of input gradients before the
first weight's gradient, so every exchange waits for the end of the backward pass; all gradients are joined before they
are sent; and a process that has one core has one thread between operations, which computes while messages wait.

So a weight's gradient is computed before the gradient of its layer's input (`weights_first`), gradients travel in
packs (`packed`), the last layers' first, and there are two threads at least (`let_exchanges_begin`). What DDP does for
PyTorch (Li et al., "PyTorch Distributed", arXiv 2006.15704, section 3.2.3), in TensorFlow's graph.
"""

import contextlib
import graphlib
import os
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence

import tensorflow as tf

from toolkit.strategies.step import collectives
from toolkit.strategies.step.collectives import joined, shaped

BYTES_PER_PACK = 512 << 10  # The default: the best of 64 KiB to 4 MiB on two hosts at 1 Gbit/s.

_with_edges: weakref.WeakSet[tf.Graph] = weakref.WeakSet()


def let_exchanges_begin() -> None:
    """Gives a process with one core a second thread between operations, before TensorFlow starts.

    What was set before, by `tf.config.threading` or TF_NUM_INTEROP_THREADS, is kept.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    asked = tf.config.threading.get_inter_op_parallelism_threads() or "TF_NUM_INTEROP_THREADS" in os.environ
    if cores == 1 and not asked:
        with contextlib.suppress(RuntimeError):  # TensorFlow has already started; the strategy says so next.
            tf.config.threading.set_inter_op_parallelism_threads(2)


def note_edges(graph: tf.Graph) -> None:
    """Notes that a graph's operations aren't in the order of their inputs any more."""
    _with_edges.add(graph)


def weights_first(gradients: Sequence[tf.Tensor]) -> None:
    """Makes the computation of a weight's gradient go first among the operations that wait for the same tensor.

    Nothing else is changed, so every number is the same. What makes a gradient is all that only this gradient needs.
    Of what that is computed from, one operation is the last, such as the gradient of a layer's output; others that
    need it wait. They come after it in an order that the graph has already, in which what makes the gradient can stand
    directly behind that operation, so that waiting makes no circle.

    Args:
        gradients: In the graph of a step that is being traced; of any shape and dtype.
    """
    if tf.executing_eagerly() or not gradients:
        return
    graph = tf.compat.v1.get_default_graph()
    # A constant of an outer function isn't a tensor of this graph.
    made = dict.fromkeys(gradient.op for gradient in gradients if getattr(gradient, "graph", None) is graph)
    before = _stateful_before(graph)
    try:
        order = {operation: number for number, operation in enumerate(_in_order(graph, before))}
    except graphlib.CycleError:  # A loop of TensorFlow 1.
        return
    _with_edges.add(graph)
    makers = {operation: _only_for(operation, made) for operation in made}
    all_makers = set().union(*makers.values())
    for operation, only in makers.items():
        needed = {each for maker in only for each in _needed_by(maker, before)} - only
        last = max(needed, key=order.__getitem__, default=None)
        consumers = {each for tensor in last.outputs for each in tensor.consumers()} if last is not None else set()
        for other in consumers - all_makers:
            # `tf.control_dependencies` is public, but for operations that are still to be made.
            other._add_control_input(operation)


def _stateful_before(graph: tf.Graph) -> dict[tf.Operation, tf.Operation]:
    """Returns for each stateful operation, such as a variable's read, the one before it.

    When its function is traced, TensorFlow lets them run in the order in which they were made, by edges that aren't
    there yet. Collectives of the first kind (`collectives.gather_anywhere`) have none.
    """
    found, kinds, last = {}, dict[str, bool](), None
    for operation in graph.get_operations():
        kind = operation.type
        if kind not in kinds:
            kinds[kind] = operation.op_def.is_stateful and kind != "CollectiveGather"
        if kinds[kind]:
            if last is not None:
                found[operation] = last
            last = operation
    return found


def _in_order(graph: tf.Graph, before: Mapping[tf.Operation, tf.Operation]) -> Iterable[tf.Operation]:
    """Returns a graph's operations so that each comes after its inputs.

    They are made in such an order: sorting them, which took as long as all the rest, is for a graph with edges of ours.
    """
    if graph not in _with_edges and tf.compat.v1.control_flow_v2_enabled():
        return graph.get_operations()
    needed = {each: _needed_by(each, before) for each in graph.get_operations()}
    return graphlib.TopologicalSorter(needed).static_order()


def _needed_by(operation: tf.Operation, before: Mapping[tf.Operation, tf.Operation]) -> list[tf.Operation]:
    found = [tensor.op for tensor in operation.inputs] + operation.control_inputs
    return [*found, before[operation]] if operation in before else found


def _only_for(gradient: tf.Operation, others: Container[tf.Operation]) -> set[tf.Operation]:
    """Returns the operations that only this gradient needs, with its own."""
    waiting, found = [gradient], {gradient}
    while waiting:
        for each in {tensor.op for tensor in waiting.pop().inputs} - found:
            needed_by = {consumer for tensor in each.outputs for consumer in tensor.consumers()}
            if each not in others and needed_by <= found:
                found.add(each)
                waiting.append(each)
    return found


def packed(sizes: Sequence[int], bytes_per_pack: int) -> list[list[int]]:
    """Divides tensors into packs, each of which is one exchange.

    Args:
        sizes: Bytes of each tensor, in the order in which they are known.
        bytes_per_pack: A pack is full at so many bytes. Who has as many travels alone. 0 for one pack.

    Returns:
        The numbers of each pack's tensors. Every number is in one.
    """
    if not bytes_per_pack:
        return [list(range(len(sizes)))] if sizes else []
    packs: list[list[int]] = []
    filling: list[int] = []
    for number, size in enumerate(sizes):
        if size >= bytes_per_pack:
            packs.append([number])
            continue
        filling.append(number)
        if sum(sizes[each] for each in filling) >= bytes_per_pack:
            packs.append(filling)
            filling = []
    return [*packs, filling] if filling else packs


def summed(gradients: Sequence[tf.Tensor], *, bytes_per_pack: int | None, dtype: tf.DType | None) -> list[tf.Tensor]:
    """Returns the sums over all replicas, with one exchange for each pack.

    Args:
        gradients: Of any shape, in the order in which they are known.
        bytes_per_pack: As for `packed`, of what is sent; None for `BYTES_PER_PACK`.
        dtype: In which elements are sent; None for their own. Sums are made in their own.
    """
    limit = BYTES_PER_PACK if bytes_per_pack is None else bytes_per_pack
    totals: dict[int, tf.Tensor] = {}
    for kind in dict.fromkeys(gradient.dtype for gradient in gradients):
        numbers = [number for number, gradient in enumerate(gradients) if gradient.dtype == kind]
        width = (dtype or kind).size
        sizes = [width * (gradients[number].shape.num_elements() or 0) for number in numbers]
        for pack in packed(sizes, limit):
            each = [numbers[place] for place in pack]
            if len(each) == 1:
                totals[each[0]] = _alone(gradients[each[0]], sizes[pack[0]] // (limit or sizes[pack[0]] or 1), dtype)
            else:
                flat, split = joined([gradients[number] for number in each])
                totals.update(zip(each, split(collectives.all_reduce(flat, dtype=dtype)), strict=True))
    return [totals[number] for number in range(len(gradients))]


def _alone(gradient: tf.Tensor, pieces: int, dtype: tf.DType | None) -> tf.Tensor:
    """Sends a large tensor in pieces: while one is sent, another is copied and a third is added."""
    if pieces < 2:
        return collectives.all_reduce(gradient, dtype=dtype)
    flat = tf.reshape(gradient, [-1])
    size = -(-flat.shape[0] // pieces)
    each = [flat[first : first + size] for first in range(0, flat.shape[0], size)]
    return shaped(tf.concat([collectives.all_reduce(piece, dtype=dtype) for piece in each], 0), gradient)
