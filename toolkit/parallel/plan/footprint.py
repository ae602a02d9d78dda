"""The memory of a training step's tensors, found in TensorFlow's graph of a model's call and its gradients.

A tensor is there from the operation that makes it until the last one that reads it. Operations run in the order in
which they were made, forward and then backward; `benchmarks/predictions.py` holds what comes of it against what
TensorFlow's allocator hands out.
"""

import collections
from typing import Any, NamedTuple

from toolkit.parallel.plan.trace import Trace, size_of

__all__ = ["Footprint", "footprints"]

_SHARES = frozenset("EnsureShape ExpandDims Identity IdentityN PreventGradient Reshape Squeeze StopGradient".split())  # noqa: SIM905
_WEIGHTS = ("Const", "ReadVariableOp")  # Their results are counted elsewhere, or need no time.
_ARGUMENTS_OF_POOL = 3  # A maximum and its index in 64 bits, for each 32-bit result of a pooling.


class Footprint(NamedTuple):
    """Bytes of a layer's tensors for one example.

    Attributes:
        kept: From forward to backward, which reads them again.
        inside: Of these, what only its block reads: a layer that isn't in another, or what it is in that is no model.
        passed: What other blocks read, and either is kept or would be if all blocks that keep something inside were
            computed again.
        working: Beside what this layer and those before it keep, at most, while it computes.
    """

    kept: float = 0.0
    inside: float = 0.0
    passed: float = 0.0
    working: float = 0.0


def footprints(seen: Trace) -> dict[int, Footprint]:
    """Returns each layer's tensors, by the layer's id.

    Only tensors that have the examples in their shape count: gradients of weights are as large as these.
    """
    order = {id(layer): number for number, (_, layer) in enumerate(seen.layers)}
    owners = seen.owners()
    memory, reads = _memory(seen)
    alive: dict[int, tuple[float, int]] = {}  # Bytes, and the position of the operation that makes them.
    blocks = list(seen.blocks.values())
    kept, inside, passed, most = ([0.0] * len(order) for _ in range(4))
    # By other blocks: bytes, the operation that makes them, and these blocks.
    read: dict[int, tuple[float, int, set[str]]] = {}
    held, place = 0.0, 0
    for number, operation in enumerate(seen.operations):
        if number == seen.forward:
            returned = {id(memory.get(each)) for each in seen.returned}.intersection(alive)
            read = {each: (*alive[each], set[str]()) for each in returned} | read
            for each, (size, maker) in alive.items():
                kept[maker] += size
                inside[maker] += size if each not in read else 0.0
            again = {block for block, size in zip(blocks, inside, strict=True) if size}
            for each, (size, maker, readers) in read.items():
                passed[maker] += size if each in alive or readers & again else 0.0
        place = order.get(owners.get(operation.name, 0), place)
        beside = 0.0  # If another operation runs at the same time, it may need as much as this one makes.
        for tensor in operation.outputs:
            size = _bytes(tensor, seen.examples)
            beside += size
            if reads[id(tensor)] and memory.get(id(tensor)) is tensor:
                alive[id(tensor)] = size, place
                held += size
        if operation.type == "MaxPoolGrad":
            beside = max(beside, _ARGUMENTS_OF_POOL * _bytes(operation.inputs[1], seen.examples))
        most[place] = max(most[place], held + beside)
        for tensor in _reads(operation):
            mine = id(memory.get(id(tensor)))
            if number < seen.forward and mine in alive and blocks[alive[mine][1]] != blocks[place]:
                read.setdefault(mine, (*alive[mine], set()))[2].add(blocks[place])
            reads[mine] -= 1
            if not reads[mine] and mine in alive:
                held -= alive.pop(mine)[0]
    found, before = {}, 0.0
    for layer, number in order.items():
        before += kept[number]
        found[layer] = Footprint(kept[number], inside[number], passed[number], max(most[number] - before, 0.0))
    return found


def _memory(seen: Trace) -> tuple[dict[int, Any], collections.Counter]:
    """Returns, by ids of tensors, the tensor whose memory each shares, and how often that memory is read."""
    memory: dict[int, Any] = {}
    reads: collections.Counter = collections.Counter()
    for operation in seen.operations:
        for number, tensor in enumerate(operation.outputs):
            if operation.type in _SHARES:
                memory[id(tensor)] = memory.get(id(operation.inputs[number]))
            elif operation.type not in _WEIGHTS:
                memory[id(tensor)] = tensor
        reads.update(id(memory.get(id(tensor))) for tensor in _reads(operation))
    return memory, reads


def _reads(operation: Any) -> Any:
    return () if operation.type in _SHARES else operation.inputs


def _bytes(tensor: Any, examples: int) -> float:
    size = size_of(tensor)
    if not size or size % examples or tensor.dtype.name in ("resource", "variant", "string"):
        return 0.0
    return size * tensor.dtype.size / examples
