"""Whole weights in a step's graph: kept for no longer than a layer's forward pass, and gathered again for its gradient.

TensorFlow keeps a tensor until the last operation that reads it has run. A layer's gradient reads the layer's weights,
so all that the forward pass gathers would wait for the backward pass. When a tape has traced that, its readers are
given another gather, which waits for the gradient of the layer's output. What the forward pass has made of the weight
alone, such as its transpose, is made again, too.

A gather depends on a variable only, and TensorFlow starts whatever it can: without something to wait for all gathers
would start at once. For the same reason, what a layer hands to the one before it waits for its weights' gradients: else
the chain of those would run first, and then all weights' gradients together.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from toolkit.strategies.step import overlap

_LEAVES = ("ReadVariableOp", "Const", "Placeholder")
_SHAPES = ("Shape", "ShapeN", "Size", "Rank")


@dataclasses.dataclass(frozen=True)
class _Gather:
    whole: tf.Tensor
    make: Callable[[tf.Tensor], tf.Tensor]
    shard: tf.Tensor


class Gathers:
    """What one replica gathers in the graph of its step.

    Args:
        graph: The graph.
        keeps: Whether the backward pass reads what the forward pass has gathered. With NCCL it does: its collectives
            run in the order in which they were made, and a second gather is made after all of the backward pass.

    Attributes:
        gradients: This replica's gradients of whole weights, before they are exchanged.
    """

    def __init__(self, graph: tf.Graph, *, keeps: bool) -> None:
        self._graph, self._keeps = graph, keeps
        self._kept: list[_Gather] = []
        self._within = False
        self.gradients: list[tf.Tensor] = []

    def add(self, whole: tf.Tensor, make: Callable[[tf.Tensor], tf.Tensor], shard: tf.Tensor) -> None:
        """Notes a gather.

        Args:
            whole: Its result.
            make: Gathers once more, given this replica's shard.
            shard: As the step has read it.
        """
        self._kept.append(_Gather(whole, make, shard))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context for a tape's backward pass, at whose end its readers are given weights that are gathered again."""
        if self._within or tf.compat.v1.get_default_graph() is not self._graph:
            yield  # What is computed again in a backward pass reads its weights there.
            return
        before = self._graph.get_operations()[-1]._id
        self._within = True
        try:
            yield
        finally:
            self._within = False
        gradients, self.gradients = self.gradients, []
        for each in reversed(self._kept) if not self._keeps else ():
            if each.whole.op._id <= before:
                self._gather_again(each, before)
        if not self._keeps:
            overlap.note_edges(self._graph)
            overlap.weights_first(gradients)

    def _gather_again(self, gather: _Gather, before: int) -> None:
        made = _made_of(gather.whole, before)
        readers = [
            (op, place, tensor)
            for tensor in made
            for op in tensor.consumers()
            if op._id > before and op.type not in _SHAPES
            for place, given in enumerate(op.inputs)
            if given is tensor
        ]
        if not readers:
            return
        upstream = _upstream(min((op for op, *_ in readers), key=lambda op: op._id), before)
        if not upstream:  # Nothing to wait for.
            return
        with tf.control_dependencies(upstream):
            later = tf.identity(gather.shard)
        copies = {id(gather.whole): gather.make(later)}
        for op, place, tensor in readers:
            op._update_input(place, _copy(tensor, copies, upstream))


def _upstream(first: tf.Operation, before: int) -> list[tf.Tensor]:
    """Returns the gradient with which a backward pass first computes something of a weight; [] if it has none.

    The first reader may only cast or scale the weight, as where it has 8 bits. What was made before that reader can't
    need it, so waiting makes no circle.
    """
    waiting, seen = [first], {first}
    for each in waiting:
        for given in each.inputs:
            if before < given.op._id < first._id:
                return [given]
        further = dict.fromkeys(consumer for tensor in each.outputs for consumer in tensor.consumers())
        waiting += [consumer for consumer in further if consumer not in seen]
        seen.update(further)
    return []


def _made_of(whole: tf.Tensor, before: int) -> list[tf.Tensor]:
    """Returns a weight, and what the forward pass has made of it and of nothing else but weights and constants."""
    found, waiting = [whole], [whole]
    known = {id(whole)}
    while waiting:
        for op in waiting.pop().consumers():
            outputs = [each for each in op.outputs if id(each) not in known]
            if op._id > before or not outputs or op.type in _SHAPES or not _is_of_weights(op, known):
                continue
            known.update(map(id, outputs))
            found += outputs
            waiting += outputs
    return found


def _is_of_weights(op: tf.Operation, known: set[int], depth: int = 8) -> bool:
    """Whether an operation computes from weights and constants alone, and always the same."""
    if op.op_def.is_stateful or depth == 0:
        return False
    return all(
        id(each) in known
        or each.op.type in _LEAVES[:2]
        or (each.op.inputs and _is_of_weights(each.op, known, depth - 1))
        for each in op.inputs
    )


def _copy(tensor: tf.Tensor, copies: dict[int, tf.Tensor], waits: list[tf.Tensor]) -> tf.Tensor:
    """Returns what a tensor is, made again."""
    if id(tensor) not in copies:
        op = tensor.op
        if op.type in _LEAVES:
            with tf.control_dependencies(waits):
                copies[id(tensor)] = tensor if op.type == "Const" else tf.identity(tensor)
            return copies[id(tensor)]
        inputs = [_copy(each, copies, waits) for each in op.inputs]
        dtypes = [each.dtype for each in op.outputs]
        again: Any = op.graph.create_op(op.type, inputs, dtypes, attrs=dict(op.node_def.attr), op_def=op.op_def)
        copies.update((id(old), new) for old, new in zip(op.outputs, again.outputs, strict=True))
    return copies[id(tensor)]
