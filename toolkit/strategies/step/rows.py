"""Shows from a graph how what it computes of a batch depends on the batch's rows.

Each replica has a part of a batch's rows. Whether that part is enough follows from operations alone, never from values:
a sum over rows is the sum of the parts' sums, a sum divided by the number of rows is their weighted mean, and a tensor
with an entry for each row has its own entries on each replica. Whatever isn't shown to be one of these needs the whole
batch: a similarity of two rows, a root of a mean, a mean over what a mask leaves.

    x, y           ROWS          an entry for each row, computed from that row
    (x - y) ** 2   ROWS
    sum over it    SUM           over rows
    tf.shape(x)[0] ALIKE, n      the number of rows: a constant times n ** power
    sum / n        SUM, n ** -1  a mean over rows
    sqrt(sum / n)  WHOLE

An operation that this file doesn't know, of anything that differs between parts, is WHOLE.
"""

import dataclasses
import enum
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class Of(enum.Enum):
    """What a tensor is of a batch."""

    ALIKE = "the same for each part of the batch: computed from constants, variables and the number of rows"
    ROWS = "entries that are each computed from one row"
    SUM = "a sum over rows"
    SHAPE = "sizes, of which some are numbers of rows"
    WHOLE = "anything else"


@dataclasses.dataclass(frozen=True)
class Rows:
    """How a tensor depends on the rows of a batch.

    Attributes:
        of: What it is.
        power: It is multiplied by the number of rows to this power.
        axis: The axis that counts rows, of ROWS.
        parts: How many times the batch stands along that axis, one after another: 2 for `tf.concat([x, y], 0)`.
        sizes: Each element of a vector of sizes.
        size: The value of such an element, where it is known.
    """

    of: Of
    power: int = 0
    axis: int = -1
    parts: int = 1
    sizes: tuple["Rows", ...] = dataclasses.field(default=(), compare=False)
    size: int | None = dataclasses.field(default=None, compare=False)

    @property
    def is_mean(self) -> bool:
        """Whether the parts' weighted mean is the whole batch's: a mean over rows, or what doesn't depend on them."""
        return (self.of is Of.SUM and self.power == -1) or (self.of is Of.ALIKE and self.power == 0)

    @property
    def is_sum(self) -> bool:
        """Whether the sum of the parts' is the whole batch's."""
        return (self.of is Of.SUM and self.power == 0) or (self.of is Of.ALIKE and self.power == 1)

    @property
    def is_alike(self) -> bool:
        """Whether it is the same for each part."""
        return self.of is Of.ALIKE and self.power == 0

    @property
    def by_row(self) -> bool:
        """Whether it has an entry for each row along its first axis."""
        return self.of is Of.ROWS and self.power == 0 and self.axis == 0

    @property
    def in_order(self) -> bool:
        """Whether the parts' entries by row, one after another, are the whole batch's."""
        return self.by_row and self.parts == 1


ALIKE = Rows(Of.ALIKE)
ROWS = Rows(Of.ROWS, axis=0)
WHOLE = Rows(Of.WHOLE)
_COUNT = Rows(Of.ALIKE, power=1)
MEAN = Rows(Of.SUM, power=-1)


@dataclasses.dataclass
class Call:
    """Operations of a graph that count as one, such as those of a layer's call.

    Attributes:
        first: The number of its first operation in the graph.
        last: The number of the first that comes after it.
        inputs: The tensors that it was given.
        outputs: Those that it has returned.
        gives: Takes what the inputs are, and an output; returns what that is. None for entries by row of such.
        of: What was called.
        calls: The calls within it.
        losses: What a layer has added to the loss, but not layers within it.
        opened: Whether it needs the whole batch; see `trial`.
    """

    first: int
    last: int = 0
    inputs: list = dataclasses.field(default_factory=list)
    outputs: list = dataclasses.field(default_factory=list)
    gives: Callable[[list[Rows], Any], Rows] | None = None
    of: Any = None
    calls: list["Call"] = dataclasses.field(default_factory=list)
    losses: list = dataclasses.field(default_factory=list)
    opened: bool = False


class Graph:
    """What the tensors of a traced graph are.

    Args:
        graph: A graph of one function. Its placeholders' first dimension is the number of rows, and unknown.
        given: What placeholders are, by their tensors' ids; others are ROWS.
        calls: Parts of the graph that count as one operation each, in the order in which they were made.
        within: The numbers of the first operation and of the one after the last, if only those count.

    Attributes:
        assigned: What variables are set to, by TensorFlow's operations.
        branches: What branches, loops and functions are given, of which nothing is known.
    """

    def __init__(
        self,
        graph: tf.Graph,
        given: Mapping[int, Rows] | None = None,
        calls: Iterable[Call] = (),
        within: tuple[int, int] | None = None,
    ) -> None:
        self._known: dict[int, Rows] = dict(given or {})
        self._captured = {id(inner): outer for outer, inner in getattr(graph, "captures", ())}
        self._set: dict[int, Rows] = {}  # By the handles of variables.
        self.assigned: list[tuple[tf.Operation, Rows]] = []
        self.branches: list[Rows] = []
        operations = graph.get_operations()
        number, end = within or (0, len(operations))
        for call in calls:
            self._look(operations[number : call.first])
            self._note(call)
            number = call.last
        self._look(operations[number:end])

    def __getitem__(self, tensor: Any) -> Rows:
        """Returns what a tensor is; what isn't one is the same everywhere."""
        if not tf.is_tensor(tensor) or not hasattr(tensor, "graph"):
            return ALIKE
        if isinstance(tensor, (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)):
            return self._joined([self[each] for each in tf.nest.flatten(tensor, expand_composites=True)])
        return self._known.get(id(tensor), WHOLE)

    def _joined(self, values: Sequence[Rows]) -> Rows:
        return ALIKE if all(each.is_alike for each in values) else WHOLE

    def _note(self, call: Call) -> None:
        given = [self[each] for each in call.inputs]
        for each in call.outputs:
            self._known[id(each)] = (call.gives or _by_row)(given, each)

    def _look(self, operations: Sequence[tf.Operation]) -> None:
        for op in operations:
            found = self._of(op)
            for tensor, value in zip(
                op.outputs, found if isinstance(found, list) else itertools.repeat(found), strict=False
            ):
                self._known.setdefault(id(tensor), value)

    def _of(self, op: tf.Operation) -> Rows | list[Rows]:
        kind = op.type
        if kind == "Placeholder":
            return self._placeholder(op.outputs[0])
        args = [self[each] for each in op.inputs]
        if kind == "ReadVariableOp":
            return self._set.get(id(op.inputs[0]), args[0])
        if _ASSIGNS.match(kind):
            return self._assign(op, args)
        if kind in _RULES:
            return _RULES[kind](op, args)
        if _DRAWS.search(kind):
            return _drawn(op, args)
        if kind in _FUNCTIONS:
            self.branches += args
        if all(each.is_alike for each in args) and not any(word in kind for word in _UNKNOWN):
            return ALIKE
        return WHOLE

    def _placeholder(self, tensor: tf.Tensor) -> Rows:
        if id(tensor) not in self._captured:
            rank = tensor.shape.rank
            return WHOLE if rank is None else ROWS if rank and tensor.shape[0] is None else ALIKE
        outer = self._captured[id(tensor)]
        if tensor.dtype == "resource":
            return WHOLE if _is_kept_by_replica(outer) else ALIKE
        return WHOLE if hasattr(outer, "graph") else ALIKE  # Of another graph's tensor nothing is known.

    def _assign(self, op: tf.Operation, args: list[Rows]) -> Rows:
        value = self._joined(args[1:])
        value = args[1] if len(args) == 2 and value is WHOLE else value
        self.assigned.append((op, value))
        if not value.is_alike:
            self._set[id(op.inputs[0])] = WHOLE
        return WHOLE if not value.is_alike else ALIKE


_ASSIGNS = re.compile("Assign(Add|Sub)?VariableOp|Resource(Scatter|Apply|SparseApply)")
_DRAWS = re.compile("Random|TruncatedNormal|Multinomial|Parameterized|Rng")
_FUNCTIONS = ("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile", "StatefulPartitionedCall")
_UNKNOWN = ("Iterator", "Optional", "PyFunc", "Collective")


def _is_kept_by_replica(handle: Any) -> bool:
    container = getattr(handle, "_distributed_container", None)
    variable = container() if container is not None else None
    return getattr(variable, "synchronization", None) == tf.VariableSynchronization.ON_READ


def _by_row(given: Sequence[Rows], output: Any) -> Rows:
    if all(each.is_alike for each in given):
        return ALIKE
    rank = getattr(output.shape, "rank", None)
    by_row = all(each.by_row or each.is_alike for each in given) and rank and output.shape[0] is None
    return Rows(Of.ROWS, axis=0, parts=max(each.parts for each in given)) if by_row else WHOLE


def mean_of_rows(given: Sequence[Rows], _: Any) -> Rows:
    """Returns what a mean over rows is, of arguments that are by row."""
    return MEAN if all(each.by_row or each.is_alike for each in given) else WHOLE


# What operations make of their arguments. Each rule takes the operation and what its inputs are.


def _static(tensor: tf.Tensor) -> Any:
    """Returns a tensor's value where the graph shows it; None otherwise."""
    value = tf.get_static_value(tensor)
    if value is None and tensor.op.type in _FOLDED:
        given = [_static(each) for each in tensor.op.inputs]
        value = None if any(each is None for each in given) else _FOLDED[tensor.op.type](*given)
    return None if value is None else np.asarray(value)


_FOLDED: dict[str, Callable] = {
    "Sub": np.subtract,
    "AddV2": np.add,
    "Mul": np.multiply,
    "Pack": lambda *each: np.stack(each),
    "ExpandDims": lambda x, axis: np.expand_dims(x, int(axis)),
    "Identity": np.asarray,
}


def _plain(args: Iterable[Rows]) -> bool:
    """Whether all are alike, or entries by row, without a factor."""
    return all(each.power == 0 and each.of in (Of.ALIKE, Of.ROWS) for each in args)


def _aligned(op: tf.Operation, args: Sequence[Rows], inputs: Sequence[tf.Tensor] | None = None) -> Rows | None:
    """Returns where the rows of a result are if its entries are computed from those at the same place of each input.

    None where an entry would be computed from those of several rows, or from a row's number.
    """
    rank, inputs = op.outputs[0].shape.rank, op.inputs if inputs is None else inputs
    if rank is None or any(each.shape.rank is None for each in inputs):
        return None
    rows = [(each, x) for each, x in zip(args, inputs, strict=True) if each.of is Of.ROWS]
    found = {(each.axis + rank - x.shape.rank, each.parts) for each, x in rows}
    if len(found) != 1:
        return None
    axis, parts = found.pop()
    for each, x in zip(args, inputs, strict=True):
        own = axis - (rank - x.shape.rank)
        if each.of is not Of.ROWS and own >= 0 and x.shape[own] != 1:
            return None  # It has a value for each row's number.
    return Rows(Of.ROWS, axis=axis, parts=parts)


def _same(_: tf.Operation, args: Sequence[Rows]) -> list[Rows] | Rows:
    return list(args) if len(args) > 1 else args[0]


def _elementwise(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    if all(each.is_alike for each in args):
        return ALIKE
    if not _plain(args):
        return WHOLE
    return _aligned(op, args) or WHOLE


def _cast(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    before, after = op.inputs[0].dtype, op.outputs[0].dtype
    rounds = after.is_bool or (before.is_floating and not after.is_floating)
    return WHOLE if rounds and (args[0].of is Of.SUM or args[0].power) else args[0]


def _added(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    if all(each.of is Of.ALIKE for each in args):
        return args[0] if len({each.power for each in args}) == 1 else WHOLE
    # n times a constant is a sum over rows, and a constant is a mean over them.
    sums = {each.power + 1 if each.of is Of.SUM else each.power for each in args}
    if all(each.of in (Of.ALIKE, Of.SUM) for each in args):
        return Rows(Of.SUM, power=sums.pop() - 1) if len(sums) == 1 else WHOLE
    if all(each.of is Of.ROWS for each in args) and len({each.power for each in args}) == 1:
        where = _aligned(op, args)
        return WHOLE if where is None else dataclasses.replace(where, power=args[0].power)
    if any(each.of is Of.SUM for each in args) and all(each.of in (Of.ROWS, Of.SUM, Of.ALIKE) for each in args):
        return WHOLE  # Such as x - mean(x).
    return _elementwise(op, args)


def _multiplied(op: tf.Operation, args: Sequence[Rows], sign: int = 1) -> Rows:
    one, two = args
    power = one.power + sign * two.power
    if Of.WHOLE in (one.of, two.of) or Of.SHAPE in (one.of, two.of):
        return WHOLE
    if one.of is Of.ALIKE and two.of is Of.ALIKE:
        return Rows(Of.ALIKE, power=power)
    if one.of is Of.SUM and two.of is Of.ALIKE:
        return Rows(Of.SUM, power=power)
    if sign == 1 and one.of is Of.ALIKE and two.of is Of.SUM:
        return Rows(Of.SUM, power=power)
    if Of.SUM in (one.of, two.of):
        return WHOLE
    where = _aligned(op, args)
    return WHOLE if where is None else dataclasses.replace(where, power=power)


def _divided(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    return _multiplied(op, args, sign=-1)


def _largest(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    """As of other elements, but a number of rows is at least 1."""
    for one, two in ((0, 1), (1, 0)):
        least = _static(op.inputs[two])
        if args[one] == _COUNT and least is not None and (least <= 1).all():
            return _COUNT
    return _elementwise(op, args)


def _chosen(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    if args[0].is_alike and args[1] == args[2]:
        return args[1] if args[1].of is not Of.ROWS else _elementwise(op, args)
    return _elementwise(op, args)


def _reduced(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    x, linear = args[0], op.type in ("Sum", "Mean")
    if x.of is Of.SHAPE and op.type == "Prod":
        product = Rows(Of.ALIKE)
        for each in x.sizes:
            if each.of is not Of.ALIKE:
                return WHOLE
            product = Rows(Of.ALIKE, power=product.power + each.power)
        return product
    if x.of is Of.WHOLE or x.of is Of.SHAPE:
        return WHOLE
    if x.of is not Of.ROWS:
        return x if linear or x.is_alike else WHOLE
    axes, rank = _static(op.inputs[1]), op.inputs[0].shape.rank
    if axes is None or rank is None:
        return WHOLE
    axes = {int(each) % rank for each in axes.reshape(-1)}
    if x.axis in axes:
        return Rows(Of.SUM, power=x.power - (op.type == "Mean")) if linear else WHOLE
    if x.power and not linear:
        return WHOLE
    before = 0 if op.get_attr("keep_dims") else len([each for each in axes if each < x.axis])
    return dataclasses.replace(x, axis=x.axis - before)


def _l2(_: tf.Operation, args: Sequence[Rows]) -> Rows:
    if args[0].is_alike:
        return ALIKE
    return Rows(Of.SUM) if args[0].of is Of.ROWS and not args[0].power else WHOLE


def _shape(op: tf.Operation, args: Sequence[Rows]) -> Rows | list[Rows]:
    found = [_sizes(x, tensor) for x, tensor in zip(args, op.inputs, strict=True)]
    return found if len(found) > 1 else found[0]


def _sizes(x: Rows, tensor: tf.Tensor) -> Rows:
    if tensor.shape.rank is None:
        return ALIKE if x.is_alike else WHOLE
    if x.of is Of.ROWS:
        return Rows(
            Of.SHAPE,
            sizes=tuple(
                Rows(Of.ALIKE, power=1, parts=x.parts) if n == x.axis else _of_size(size)
                for n, size in enumerate(tensor.shape)
            ),
        )
    if x.of is Of.WHOLE:
        return Rows(Of.SHAPE, sizes=tuple(WHOLE if size is None else _of_size(size) for size in tensor.shape))
    return ALIKE


def _of_size(size: int | None) -> Rows:
    return Rows(Of.ALIKE, size=size)


def _size(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    return {Of.ROWS: _COUNT, Of.WHOLE: ALIKE if op.inputs[0].shape.is_fully_defined() else WHOLE}.get(args[0].of, ALIKE)


def _elements(x: Rows, tensor: tf.Tensor) -> list[Rows] | None:
    """Returns what the elements of a vector of sizes are."""
    if x.sizes:
        return list(x.sizes)
    if tensor.shape.rank == 0:
        return [x]
    if x.of is Of.ALIKE and tensor.shape.rank == 1 and tensor.shape[0] is not None:
        value = _static(tensor)
        return [x] * tensor.shape[0] if value is None else [Rows(Of.ALIKE, size=int(each)) for each in value]
    return None


def _with_value(x: Rows, tensor: tf.Tensor) -> Rows:
    """Returns what a scalar is, with its value if that is a known size."""
    value = _static(tensor) if x.is_alike and x.size is None and tensor.dtype.is_integer else None
    return x if value is None else Rows(Of.ALIKE, size=int(value))


def _vector(sizes: Sequence[Rows]) -> Rows:
    return Rows(Of.ALIKE if all(each.is_alike for each in sizes) else Of.SHAPE, sizes=tuple(sizes))


def _fill(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    """A constant of a shape, or an argument that is broadcast to one."""
    shape, value = (0, 1) if op.type == "Fill" else (1, 0)
    sizes = _elements(args[shape], op.inputs[shape])
    x, tensor = args[value], op.inputs[value]
    if sizes is None or any(each.of is not Of.ALIKE for each in sizes):
        return ALIKE if all(each.is_alike for each in args) else WHOLE
    counted = [n for n, each in enumerate(sizes) if each.power]
    if x.of is Of.ROWS and tensor.shape.rank is not None and not x.power:
        axis = x.axis + len(sizes) - tensor.shape.rank
        return dataclasses.replace(x, axis=axis) if counted in ([], [axis]) else WHOLE
    if x.is_alike and not counted:
        return ALIKE
    if not x.is_alike or len(counted) != 1 or sizes[counted[0]].power != 1 or tensor.shape.rank is None:
        return WHOLE
    own = counted[0] - (len(sizes) - tensor.shape.rank)
    rows = Rows(Of.ROWS, axis=counted[0], parts=sizes[counted[0]].parts)
    return rows if own < 0 or tensor.shape[own] == 1 else WHOLE


def _drawn(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    """Random numbers: each row's, if there is one for each; otherwise they are the whole batch's."""
    if any(_is_constant_seed(each) for each in op.inputs[1:]):  # Each replica would draw the first rows'.
        return WHOLE
    if op.type in ("Multinomial", "StatelessMultinomial"):
        return args[0] if args[0].by_row else WHOLE
    sizes = _elements(args[0], op.inputs[0]) if args else None
    others = [each for each in args[1:] if not each.is_alike]
    counted = [n for n, each in enumerate(sizes or ()) if each.power]
    if others or sizes is None or any(each.of is not Of.ALIKE for each in sizes) or "Shuffle" in op.type:
        return WHOLE
    if sizes and len(counted) == 1 and sizes[counted[0]].power == 1:
        return Rows(Of.ROWS, axis=counted[0], parts=sizes[counted[0]].parts)
    return WHOLE


def _is_constant_seed(tensor: tf.Tensor) -> bool:
    """Whether a draw's input is a seed that the script has written out, or what is made of one."""
    if tensor.op.type.startswith("StatelessRandomGetKeyCounter"):
        return _is_written_out(tensor.op.inputs[0])
    return tensor.dtype.is_integer and tensor.shape == [2] and _is_written_out(tensor)


def _is_written_out(tensor: tf.Tensor) -> bool:
    op = tensor.op
    return op.type == "Const" or (bool(op.inputs) and all(_is_written_out(each) for each in op.inputs))


def _packed(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    axis = op.get_attr("axis")
    if op.outputs[0].shape.rank == 1 and all(each.of in (Of.ALIKE, Of.WHOLE) for each in args):
        return _vector([_with_value(each, tensor) for each, tensor in zip(args, op.inputs, strict=True)])
    if all(each.is_alike for each in args):
        return ALIKE
    if not all(each == args[0] for each in args) or args[0].of in (Of.WHOLE, Of.SHAPE):
        return WHOLE
    rank = op.outputs[0].shape.rank
    if args[0].of is not Of.ROWS or rank is None:
        return args[0] if args[0].of is Of.SUM else WHOLE
    return dataclasses.replace(args[0], axis=args[0].axis + (axis % rank <= args[0].axis))


def _unpacked(op: tf.Operation, args: Sequence[Rows]) -> Rows | list[Rows]:
    x = args[0]
    if x.of is Of.SHAPE:
        return list(x.sizes)
    if x.of is not Of.ROWS:
        return x
    axis = op.get_attr("axis") % op.inputs[0].shape.rank
    return WHOLE if axis == x.axis else dataclasses.replace(x, axis=x.axis - (axis < x.axis))


def _concatenated(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    values, tensors, axis = args[:-1], list(op.inputs)[:-1], _static(op.inputs[-1])
    rank = op.outputs[0].shape.rank
    if all(each.is_alike for each in values) and not any(each.sizes for each in values):
        return ALIKE
    if rank is None or axis is None:
        return WHOLE
    if rank == 1 and all(each.of in (Of.ALIKE, Of.SHAPE) for each in values):
        found = [_elements(each, tensor) for each, tensor in zip(values, tensors, strict=True)]
        return WHOLE if any(each is None for each in found) else _vector([e for part in found for e in part or ()])
    if not all(each.of is Of.ROWS for each in values):
        return WHOLE
    if len({(each.axis, each.power) for each in values}) != 1:
        return WHOLE
    if int(axis) % rank == values[0].axis:
        return dataclasses.replace(values[0], parts=sum(each.parts for each in values))
    return values[0] if len({each.parts for each in values}) == 1 else WHOLE


def _split(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    where, x = (op.inputs[0], args[1]) if op.type == "Split" else (op.inputs[2], args[0])
    tensor, axis = op.inputs[1 if op.type == "Split" else 0], _static(where)
    if x.of is not Of.ROWS or axis is None or tensor.shape.rank is None:
        return x if x.of in (Of.ALIKE, Of.SUM) else WHOLE
    if int(axis) % tensor.shape.rank != x.axis:
        return x
    count = len(op.outputs)
    if op.type == "Split" and x.parts % count == 0:
        return dataclasses.replace(x, parts=x.parts // count)
    return WHOLE


def _sliced(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    """A slice: rows stay rows where the slice takes all of them."""
    x, tensor = args[0], op.inputs[0]
    if x.sizes:
        return _of_sizes(op, x)
    if x.of is not Of.ROWS:
        alike = all(each.is_alike for each in args[1:])
        return x if alike and x.of in (Of.ALIKE, Of.SUM) else WHOLE
    if not all(each.is_alike for each in args[1:]):  # Such as up to the longest sentence of the batch.
        return WHOLE
    begin, end, strides = (_static(each) for each in list(op.inputs)[1:4])
    if op.type == "Slice":
        if begin is None or end is None:
            return WHOLE
        whole = begin[x.axis] == 0 and end[x.axis] == -1
        return x if whole else WHOLE
    masks = {name: op.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    length = op.inputs[1].shape[0]
    rank = tensor.shape.rank
    if length is None or rank is None:
        return WHOLE
    at, out = 0, 0  # The axis of the tensor, and of the result.
    used = sum(1 for n in range(length) if not any(masks[each] >> n & 1 for each in ("ellipsis", "new_axis")))
    for n in range(length):
        if masks["new_axis"] >> n & 1:
            out += 1
            continue
        if masks["ellipsis"] >> n & 1:
            if at <= x.axis < at + rank - used:
                return dataclasses.replace(x, axis=out + x.axis - at)
            at, out = at + rank - used, out + rank - used
            continue
        shrinks = bool(masks["shrink_axis"] >> n & 1)
        if at == x.axis:
            all_of_it = masks["begin"] >> n & 1 or (begin is not None and begin[n] == 0)
            all_of_it = all_of_it and masks["end"] >> n & 1 and strides is not None and strides[n] == 1
            return dataclasses.replace(x, axis=out) if all_of_it and not shrinks else WHOLE
        at, out = at + 1, out + (not shrinks)
    return dataclasses.replace(x, axis=out + x.axis - at)


def _of_sizes(op: tf.Operation, x: Rows) -> Rows:
    """An element, or some, of a vector of sizes."""
    if op.type == "Slice":
        begin, size = _static(op.inputs[1]), _static(op.inputs[2])
        if begin is None or size is None:
            return WHOLE
        stop = len(x.sizes) if size[0] == -1 else int(begin[0] + size[0])
        return _vector(x.sizes[int(begin[0]) : stop])
    begin, end, strides = (_static(each) for each in list(op.inputs)[1:4])
    if begin is None or end is None or strides is None or len(begin) != 1 or op.get_attr("new_axis_mask"):
        return WHOLE
    if op.get_attr("shrink_axis_mask"):
        return x.sizes[int(begin[0])]
    first = None if op.get_attr("begin_mask") or op.get_attr("ellipsis_mask") else int(begin[0])
    last = None if op.get_attr("end_mask") or op.get_attr("ellipsis_mask") else int(end[0])
    return _vector(x.sizes[first : last : int(strides[0])])


def _reshaped(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    x, tensor = args[0], op.inputs[0]
    sizes = _elements(args[1], op.inputs[1])
    if x.of is Of.SHAPE:
        return x if op.outputs[0].shape.rank == 1 else (x.sizes[0] if len(x.sizes) == 1 else WHOLE)
    if x.of is not Of.ROWS:
        shaped = sizes is not None and all(each.is_alike for each in sizes)
        return x if x.of is not Of.WHOLE and (shaped or args[1].is_alike) else WHOLE
    if sizes is None or any(each.of is not Of.ALIKE for each in sizes):
        return WHOLE
    if x.axis == 0:
        if not sizes or any(each.power for each in sizes[1:]):
            return WHOLE
        counted = sizes[0].power == 1 and x.parts in (1, sizes[0].parts)
        return x if counted or _divides_rows(list(tensor.shape)[1:], op.outputs[0].shape, sizes) else WHOLE
    before = list(tensor.shape)[: x.axis]
    after = list(op.outputs[0].shape)[: x.axis]
    same = None not in before and before == after and len(sizes) > x.axis
    return x if same and not any(each.power for n, each in enumerate(sizes) if n != x.axis) else WHOLE


def _divides_rows(before: list[int | None], shape: tf.TensorShape, sizes: Sequence[Rows]) -> bool:
    """Whether each entry of the result comes from one row: a row's entries are a multiple of the result's."""
    if shape.rank is None or shape[0] is not None:
        return False
    after = [size if size is not None else each.size for size, each in zip(shape, sizes, strict=True)][1:]
    if any(size is not None and size < 0 for size in after):
        return False
    if None in before or None in after:
        return after == before[len(before) - len(after) :] and after.count(None) <= 1
    own, entry = (math.prod(size or 0 for size in sizes) for sizes in (before, after))
    return own % max(entry, 1) == 0


def _expanded(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    x, axis = args[0], _static(op.inputs[1])
    if x.of is Of.ALIKE and op.inputs[0].shape.rank == 0 and x.power:
        return Rows(Of.SHAPE, sizes=(x,))
    if x.of is not Of.ROWS:
        return x
    rank = op.outputs[0].shape.rank
    if axis is None or rank is None:
        return WHOLE
    return dataclasses.replace(x, axis=x.axis + (int(axis.reshape(-1)[0]) % rank <= x.axis))


def _squeezed(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    x, shape = args[0], op.inputs[0].shape
    if x.of is not Of.ROWS:
        return x if x.of is not Of.SHAPE else (x.sizes[0] if len(x.sizes) == 1 else x)
    if shape.rank is None:
        return WHOLE
    axes = [each % shape.rank for each in op.get_attr("squeeze_dims")]
    axes = axes or [n for n, size in enumerate(shape) if size == 1]
    return WHOLE if x.axis in axes else dataclasses.replace(x, axis=x.axis - sum(each < x.axis for each in axes))


def _transposed(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    x, order = args[0], _static(op.inputs[1])
    if x.of is not Of.ROWS:
        return x
    return WHOLE if order is None else dataclasses.replace(x, axis=[int(each) for each in order].index(x.axis))


def _tiled(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    x, tensor = args[0], op.inputs[0]
    times = _elements(args[1], op.inputs[1])
    if all(each.is_alike for each in args):
        return ALIKE
    if times is None or any(each.of is not Of.ALIKE for each in times):
        return WHOLE
    counted = [n for n, each in enumerate(times) if each.power]
    if x.is_alike and len(counted) == 1 and times[counted[0]].power == 1 and tensor.shape[counted[0]] == 1:
        return Rows(Of.ROWS, axis=counted[0])
    if x.of is Of.SUM and not counted:
        return x
    if x.of is not Of.ROWS or counted:
        return WHOLE
    static = _static(op.inputs[1])
    along = None if static is None else int(static[x.axis])
    if along is None:
        along = _tile_along(op.inputs[1], x.axis)
    return WHOLE if along is None else dataclasses.replace(x, parts=x.parts * along)


def _tile_along(multiples: tf.Tensor, axis: int) -> int | None:
    """How often rows are repeated where other multiples are only known when the step runs."""
    if multiples.op.type != "Pack":
        return None
    found = _static(multiples.op.inputs[axis])
    return None if found is None else int(found)


def _padded(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    x, padding = args[0], _static(op.inputs[1])
    if x.of is not Of.ROWS or x.power or padding is None:
        return ALIKE if all(each.is_alike for each in args) else WHOLE
    return x if not padding[x.axis].any() and all(each.is_alike for each in args[1:]) else WHOLE


def _along(op: tf.Operation, args: Sequence[Rows]) -> Rows | list[Rows]:
    """What is computed along axes: of each row for itself, unless the rows' axis is among them."""
    x, rank = args[0], op.inputs[0].shape.rank
    if all(each.is_alike for each in args):
        return ALIKE
    if not _plain(args) or rank is None or any(not each.is_alike for each in args[1:]) or x.of is not Of.ROWS:
        return WHOLE
    axes = _static(op.inputs[1])
    if axes is None:
        return WHOLE
    axes = {int(each) % rank for each in axes.reshape(-1)}
    if x.axis in axes:
        return WHOLE
    return dataclasses.replace(x, axis=x.axis - any(each < x.axis for each in axes)) if "Arg" in op.type else x


def _rolled(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    x, axes, rank = args[0], _static(op.inputs[2]), op.inputs[0].shape.rank
    if x.of is not Of.ROWS or axes is None or rank is None or not args[1].is_alike:
        return ALIKE if all(each.is_alike for each in args) else WHOLE
    return WHOLE if x.axis in {int(each) % rank for each in axes.reshape(-1)} else x


def _last(op: tf.Operation, args: Sequence[Rows], width: int = 1) -> Rows:
    """What is computed along the last axes of the first argument."""
    if all(each.is_alike for each in args):
        return ALIKE
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if not _plain(args) or None in ranks:
        return WHOLE
    if args[0].of is not Of.ROWS or args[0].axis >= ranks[0] - width:
        return WHOLE
    for each, tensor, rank in zip(args[1:], list(op.inputs)[1:], ranks[1:], strict=True):
        if each.of is Of.ROWS and (each.axis, each.parts) != (args[0].axis, args[0].parts):
            return WHOLE
        if each.of is not Of.ROWS and rank > args[0].axis and op.type in _PAIRS and tensor.shape[args[0].axis] != 1:
            return WHOLE
    return args[0]


def _matrices(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    return _last(op, args, 1 if op.type in ("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3") else 2)


def _images(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    """What is computed of each picture, by constants."""
    if all(each.is_alike for each in args):
        return ALIKE
    return args[0] if args[0].by_row and all(each.is_alike for each in args[1:]) else WHOLE


def _gathered(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    x, indices = args[:2]
    if all(each.is_alike for each in args):
        return ALIKE
    if x.sizes and op.inputs[1].shape.rank == 0:
        index = _static(op.inputs[1])
        return WHOLE if index is None else x.sizes[int(index)]
    if op.type in ("ResourceGather", "Gather", "GatherNd", "ResourceGatherNd"):
        if op.type.endswith("Nd"):
            last = (op.inputs[1].shape.rank or 0) - 1
            return indices if x.is_alike and indices.of is Of.ROWS and indices.axis < last else WHOLE
        return indices if x.is_alike and indices.of is Of.ROWS and not indices.power else WHOLE
    axis, rank, batch = _static(op.inputs[2]), op.inputs[0].shape.rank, op.get_attr("batch_dims")
    if not _plain(args) or axis is None or rank is None or op.inputs[1].shape.rank is None:
        return WHOLE
    axis = int(axis) % rank
    wide = op.inputs[1].shape.rank - batch
    if x.of is Of.ROWS and indices.of is Of.ROWS:
        return x if x.axis == indices.axis < batch and x.parts == indices.parts else WHOLE
    if indices.of is Of.ROWS:
        if indices.axis < batch:
            return WHOLE
        return dataclasses.replace(indices, axis=axis + indices.axis - batch)
    if x.axis == axis or x.axis < batch:
        return WHOLE
    return dataclasses.replace(x, axis=x.axis if x.axis < axis else x.axis - 1 + wide)


def _one_hot(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    x = args[0]
    if all(each.is_alike for each in args):
        return ALIKE
    rank, axis = op.outputs[0].shape.rank, op.get_attr("axis")
    if x.of is not Of.ROWS or x.power or rank is None or not all(each.is_alike for each in args[1:]):
        return WHOLE
    return dataclasses.replace(x, axis=x.axis + (axis % rank <= x.axis))


def _matmul(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    if op.type == "MatMul":
        turned = [op.get_attr("transpose_a"), op.get_attr("transpose_b")]
    else:
        turned = [op.get_attr("adj_x"), op.get_attr("adj_y")]
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks:
        return WHOLE
    width = max(ranks) - 2
    batch = [f"b{n}" for n in range(width)]
    left, right = (["i", "j"], ["j", "k"])
    given = [
        batch[width - (rank - 2) :] + (names[::-1] if turn else names)
        for rank, names, turn in zip(ranks, (left, right), turned, strict=True)
    ]
    return _contracted(op, args, given, [*batch, "i", "k"])


def _einsum(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    equation = op.get_attr("equation")
    equation = equation.decode() if isinstance(equation, bytes) else equation
    before, _, after = equation.replace(" ", "").partition("->")
    terms = before.split(",")
    ranks = [tensor.shape.rank for tensor in op.inputs]
    if None in ranks:
        return WHOLE
    widths = [rank - len(term.replace("...", "")) for rank, term in zip(ranks, terms, strict=True)]
    most = max((width for width, term in zip(widths, terms, strict=True) if "..." in term), default=0)

    def labels(term: str, width: int) -> list[str]:
        head, dots, tail = term.partition("...")
        return [*head, *([f".{n}" for n in range(most - width, most)] if dots else []), *tail]

    given = [labels(term, width) for term, width in zip(terms, widths, strict=True)]
    return _contracted(op, args, given, labels(after, most))


def _contracted(op: tf.Operation, args: Sequence[Rows], given: list[list[str]], result: list[str]) -> Rows:
    """Products of entries, summed along the axes that the result lacks."""
    if all(each.is_alike for each in args):
        return ALIKE
    if any(each.of in (Of.WHOLE, Of.SHAPE) for each in args):
        return WHOLE
    power = sum(each.power for each in args)
    sums = [each for each in args if each.of is Of.SUM]
    rows = [(each, labels) for each, labels in zip(args, given, strict=True) if each.of is Of.ROWS]
    if sums:
        return Rows(Of.SUM, power=power) if len(sums) == 1 and not rows else WHOLE
    if not rows:
        return Rows(Of.ALIKE, power=power)
    if any(labels.count(labels[each.axis]) > 1 for each, labels in rows):
        return WHOLE  # A diagonal, whose entries are at the rows' numbers.
    names = {labels[each.axis] for each, labels in rows}
    if len(names) != 1 or len({each.parts for each, _ in rows}) != 1:
        return WHOLE
    name = names.pop()
    for each, labels, tensor in zip(args, given, op.inputs, strict=True):
        if each.of is not Of.ROWS and name in labels and tensor.shape[labels.index(name)] != 1:
            return WHOLE  # A factor for each row's number.
    if name in result:
        return Rows(Of.ROWS, power=power, axis=result.index(name), parts=rows[0][0].parts)
    return Rows(Of.SUM, power=power)


def _scattered(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    """Sums of rows that are put at places which the rows name, such as in a confusion matrix."""
    if all(each.is_alike for each in args):
        return ALIKE
    *rows, size = args if op.type != "DenseBincount" else (args[0], args[2], args[1])
    tensors = list(op.inputs) if op.type != "DenseBincount" else [op.inputs[0], op.inputs[2]]
    if op.type == "DenseBincount" and tensors[0].shape.rank != 1:
        return WHOLE
    given = [each for each, tensor in zip(rows, tensors, strict=False) if tensor.shape.rank and tensor.shape[0] != 0]
    return Rows(Of.SUM) if size.is_alike and all(each.by_row for each in given) else WHOLE


def _seeds(_: tf.Operation, args: Sequence[Rows]) -> Rows:
    return ALIKE if all(each.is_alike for each in args) else WHOLE


def _range(_: tf.Operation, args: Sequence[Rows]) -> Rows:
    return ALIKE if all(each.is_alike for each in args) else WHOLE


def _constant(op: tf.Operation, args: Sequence[Rows]) -> Rows:
    """Zeros or ones in the shape of the argument."""
    if args[0].of is Of.ROWS:
        return dataclasses.replace(args[0], power=0)
    return ALIKE if args[0].of in (Of.ALIKE, Of.SUM) or op.outputs[0].shape.is_fully_defined() else WHOLE


def _rules() -> dict[str, Callable]:
    of = {
        _same: "Identity IdentityN StopGradient PreventGradient CheckNumerics Snapshot EnsureShape Neg DebugIdentityV2 "
        "DebugIdentityV3 DebugNumericSummaryV2 Real Imag Conj",
        _cast: "Cast",
        _added: "Add AddV2 AddN Sub",
        _multiplied: "Mul MulNoNan",
        _divided: "Div RealDiv DivNoNan",
        _elementwise: "Abs Acos Acosh Angle ApproximateEqual Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e Betainc "
        "Bitcast BitwiseAnd BitwiseOr BitwiseXor Ceil ClipByValue ComplexAbs Complex Cos Cosh Digamma Elu "
        "Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod Gelu Greater GreaterEqual Igamma Igammac "
        "Inv Invert IsFinite IsInf IsNan LeakyRelu LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd "
        "LogicalNot LogicalOr Minimum Mod Ndtri NextAfter NotEqual Polygamma Pow Reciprocal Relu Relu6 "
        "RightShift Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square "
        "SquaredDifference StringLower Tan Tanh TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta",
        _largest: "Maximum",
        _chosen: "Select SelectV2",
        _reduced: "Sum Mean Max Min Prod All Any EuclideanNorm",
        _l2: "L2Loss",
        _shape: "Shape ShapeN",
        _size: "Size",
        _fill: "Fill BroadcastTo",
        _packed: "Pack",
        _unpacked: "Unpack",
        _concatenated: "ConcatV2",
        _split: "Split SplitV",
        _sliced: "StridedSlice Slice",
        _reshaped: "Reshape",
        _expanded: "ExpandDims",
        _squeezed: "Squeeze",
        _transposed: "Transpose",
        _tiled: "Tile",
        _padded: "Pad PadV2 MirrorPad",
        _along: "ArgMax ArgMin Cumsum Cumprod CumulativeLogsumexp ReverseV2",
        _rolled: "Roll",
        _last: "Softmax LogSoftmax SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits TopKV2 InTopKV2 "
        "FFT IFFT RFFT IRFFT",
        _matrices: "MatrixBandPart MatrixDiag MatrixDiagV2 MatrixDiagV3 MatrixDiagPart MatrixDiagPartV2 "
        "MatrixDiagPartV3 MatrixInverse MatrixDeterminant Cholesky SelfAdjointEigV2 Svd FFT2D IFFT2D RFFT2D IRFFT2D",
        _images: "Conv2D Conv3D DepthwiseConv2dNative AvgPool AvgPool3D MaxPool MaxPool3D ResizeBilinear "
        "ResizeNearestNeighbor ResizeBicubic ResizeArea DepthToSpace SpaceToDepth BiasAdd",
        _gathered: "Gather GatherV2 GatherNd ResourceGather ResourceGatherNd",
        _one_hot: "OneHot",
        _matmul: "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3",
        _einsum: "Einsum",
        _range: "Range",
        _scattered: "UnsortedSegmentSum ScatterNd DenseBincount",
        _seeds: "StatelessRandomGetKeyCounter StatelessRandomGetAlg StatelessRandomGetKeyCounterAlg",
        _constant: "ZerosLike OnesLike",
    }
    return {name: rule for rule, names in of.items() for name in names.split()}


_PAIRS = ("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits", "InTopKV2")
_RULES = _rules()
