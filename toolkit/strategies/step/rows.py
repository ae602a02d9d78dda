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
    sqrt(sum / n)  OTHER

Each operation has a signature: a label for each axis of what it takes and returns, as of `einsum`, and how it combines
its arguments. One engine, `Graph._pushed`, pushes the label of the rows' axis through it:

    kept in the result              ROWS at its axis there
    summed over by a linear one     SUM
    "*", where entries are mixed    OTHER

Shapes aren't computed here. Where a size is asked for that the graph doesn't show, it is imported twice more, for two
numbers of rows (the script's Python isn't run again, and never sees them), and TensorFlow's own shape functions and
constant folding say of each tensor what its axes, and the sizes in it, are in both. An axis counts rows
if it is a multiple of the rows in both. Only what is made of sizes by products and by moving entries is read off so;
each such entry is a constant times n ** p for every n. `max(n, 16)` isn't, and is OTHER.

An operation without a signature, of anything that differs between parts, is OTHER.
"""

import dataclasses
import enum
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from toolkit.strategies.upstream import private


class Of(enum.Enum):
    """What a tensor is of a batch."""

    ALIKE = "the same for each part of the batch: computed from constants, variables and the number of rows"
    ROWS = "entries that are each computed from one row"
    SUM = "a sum over rows"
    OTHER = "anything else"


MIXED = 99  # The power of sizes of which each has its own, as of [n, 4].


@dataclasses.dataclass(frozen=True)
class Rows:
    """How a tensor depends on the rows of a batch.

    Attributes:
        of: What it is.
        power: It is multiplied by the number of rows to this power.
        axis: The axis that counts rows, of ROWS.
        parts: How many times the batch stands along that axis, one after another: 2 for `tf.concat([x, y], 0)`.
        free: Whether the entries along that axis are all alike, or drawn by a state, so that they stand in any order.
    """

    of: Of
    power: int = 0
    axis: int = -1
    parts: int = 1
    free: bool = dataclasses.field(default=False, compare=False)

    @property
    def is_mean(self) -> bool:
        """Whether the parts' weighted mean is the whole batch's: a mean over rows, or what doesn't depend on them."""
        return (self.of is Of.SUM and self.power == -1) or self.is_alike

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
OTHER = Rows(Of.OTHER)
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
        updates: What it has given metrics, but not what calls within it have: a list of tensors for each time.
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
    updates: list[list] = dataclasses.field(default_factory=list)
    opened: bool = False


def by_row(given: Sequence[Rows], output: Any) -> Rows:
    """Returns what has a row for each of its arguments' rows."""
    if all(each.is_alike for each in given):
        return ALIKE
    rank = getattr(output.shape, "rank", None)
    if rank and output.shape[0] is None and all(each.by_row or each.is_alike for each in given):
        return Rows(Of.ROWS, axis=0, parts=max(each.parts for each in given))
    return OTHER


def mean_of_rows(given: Sequence[Rows], output: Any) -> Rows:
    """Returns what a mean over rows is, of arguments that are by row; or a value for each row, if it isn't reduced."""
    if output.shape.rank:
        return by_row(given, output)
    return MEAN if all(each.by_row or each.is_alike for each in given) else OTHER


# What a graph's shapes and sizes are for two numbers of rows.


_N = (10007, 10037)  # Primes that are no multiple of a layer's width, and whose product is none.
_LENGTH = 31  # Of other axes of unknown size; the same in both.
_NODE = re.compile(r"node ([^\s}]+)\}\}")


class Sizes:
    """The shapes and constants of a graph for two numbers of rows.

    Args:
        graph: Its placeholders' first dimension is the number of rows, and unknown.
        given: Tensors in whose places others of as many rows are put.
        whole: The graph's own, if these are some given tensors'.
    """

    def __init__(self, graph: tf.Graph, given: Sequence[tf.Tensor] = (), whole: "Sizes | None" = None) -> None:
        self._graph, self._given, self._whole = graph, given, whole

    @functools.cached_property
    def _graphs(self) -> list[tuple]:  # Imported where something asks for a size that the graph doesn't show.
        if self._whole is not None and all((self._whole.shape(each) or [()])[0] == _N for each in self._given):
            return self._whole._graphs
        definition, mapped = self._graph.as_graph_def(), list(self._given)
        mapped += [op.outputs[0] for op in self._graph.get_operations() if op.type == "Placeholder"]
        failing: list[tf.Tensor] = []  # Of other numbers of rows nobody knows them: x + tf.zeros([7, 4]).
        while True:
            try:
                return [_imported(definition, mapped, failing, rows) for rows in _N]
            except ValueError as error:
                names = _NODE.findall(str(error))
                at = [n for n, each in enumerate(definition.node) if each.name in names[:1]]
                if not at:
                    raise
                del definition.node[at[0]]
                failing += self._graph.get_operation_by_name(names[0]).outputs

    def shape(self, tensor: tf.Tensor) -> list[tuple] | None:
        """Returns the size of each axis for both numbers of rows; None where the number of axes isn't known."""
        both = [tensor] * 2 if tensor.shape.is_fully_defined() else self._both(tensor)
        one, two = (each.shape for each in both)
        return None if one.rank is None or one.rank != two.rank else list(zip(one, two, strict=True))

    def value(self, tensor: tf.Tensor) -> list[np.ndarray] | None:
        """Returns what a small tensor of constants and sizes is for both."""
        shown = tf.get_static_value(tensor)
        if shown is not None:
            return [np.asarray(shown)] * 2
        both = self._both(tensor)
        if any(
            each.dtype in (tf.resource, tf.variant)
            or each.shape.num_elements() is None
            or each.shape.num_elements() > 64
            for each in both
        ):
            return None
        found = [private.smart_constant_value(each) for each in both]  # Also what TensorFlow's C++ can fold.
        return None if any(each is None for each in found) else [np.asarray(each) for each in found]

    def constant(self, tensor: tf.Tensor) -> list | None:
        """Returns a constant's elements, which are the same for both numbers of rows."""
        found = self.value(tensor)
        return None if found is None or not np.array_equal(found[0], found[1]) else found[0].reshape(-1).tolist()

    def _both(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        return [
            mapped.get(tensor.name) if tensor.name in mapped else graph.get_tensor_by_name(tensor.name)
            for graph, mapped in self._graphs
        ]


def _imported(definition: Any, given: Iterable[tf.Tensor], failing: Iterable[tf.Tensor], rows: int) -> tuple:
    found, mapped = tf.Graph(), {}
    with found.as_default():
        for x in given:
            mapped[x.name] = tf.compat.v1.placeholder(x.dtype, _sized(x.shape, rows), name="toolkit_given")
            if x.dtype == tf.resource:
                private.copy_handle_data(x, mapped[x.name])
        mapped |= {x.name: tf.compat.v1.placeholder(x.dtype, name="toolkit_unknown") for x in failing}
        read = {name if ":" in name else f"{name}:0" for each in definition.node for name in each.input}
        tf.import_graph_def(definition, input_map={name: x for name, x in mapped.items() if name in read}, name="")
    return found, mapped


def _sized(shape: tf.TensorShape, rows: int) -> list[int] | None:
    if shape.rank is None:
        return None
    return [size if size is not None else _LENGTH if n else rows for n, size in enumerate(shape)]


def counts_rows(size: tuple) -> bool:
    """Whether an axis of these sizes, for both numbers of rows, counts them, once or so many times."""
    return None not in size and size[0] % _N[0] == 0 < size[0] and size[0] // _N[0] * _N[1] == size[1]


def _power(one: Any, two: Any) -> int | None:
    """Returns p of a constant times n ** p that has these values; None if it is none."""
    return next((p for p in (0, 1, -1, 2, 3) if math.isclose(one * _N[1] ** p, two * _N[0] ** p, rel_tol=1e-7)), None)


# What a graph computes.


class Form(NamedTuple):
    """The signature of an operation.

    Attributes:
        given: For each argument, the labels of its axes. "*" is one along which entries aren't kept apart.
        made: The same of each result.
        how: "mul", "div": a product, and sums of it along the axes that no result has; "add": the same multiple of
            each argument; "sum": a sum of what each row makes; "": anything, of each row.
        data: How many arguments it combines so; others are numbers, such as indices.
    """

    given: list[list]
    made: list[list]
    how: str = ""
    data: int = 1


class Graph:
    """What the tensors of a traced graph are.

    Args:
        graph: A graph of one function. Its placeholders' first dimension is the number of rows, and unknown.
        given: What placeholders are, by their tensors' ids; others are ROWS.
        calls: Parts of the graph that count as one operation each, in the order in which they were made.
        within: The numbers of the first operation and of the one after the last, if only those count.
        inputs: Tensors that are given in place of what the graph computes.

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
        inputs: Iterable[tf.Tensor] = (),
    ) -> None:
        self.sizes = _sizes_of(graph, [each for each in inputs if isinstance(each, tf.Tensor)])
        self._known: dict[int, Rows] = dict(given or {})
        self._captured = {id(inner): outer for outer, inner in getattr(graph, "captures", ())}
        self._set: dict[int, Rows] = {}  # By the handles of variables.
        self.assigned: list[tuple[tf.Operation, Rows]] = []
        self.branches: list[Rows] = []
        operations = graph.get_operations()
        number, end = within or (0, len(operations))
        for call in calls:
            self._look(operations[number : call.first])
            found = [self[each] for each in call.inputs]
            gives = call.gives or by_row
            if any(each.parts > 1 for each in found) and _draws(call, operations[call.first : call.last]):
                # A replica draws for rows that are together in the batch, and here its rows are in several places.
                gives = lambda *_: OTHER  # noqa: E731
            self._known |= {id(each): gives(found, each) for each in call.outputs}
            number = call.last
        self._look(operations[number:end])

    def __getitem__(self, tensor: Any) -> Rows:
        """Returns what a tensor is; what isn't one is the same everywhere."""
        if not tf.is_tensor(tensor) or not hasattr(tensor, "graph"):
            return ALIKE
        if isinstance(tensor, (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)) and id(tensor) not in self._known:
            return _joined([self[each] for each in tf.nest.flatten(tensor, expand_composites=True)])
        if id(tensor) not in self._known and id(tensor) in self._captured:  # By an earlier part of the graph.
            return self._placeholder(tensor)
        return self._known.get(id(tensor), OTHER)

    def _look(self, operations: Sequence[tf.Operation]) -> None:
        for op in operations:
            found = self._of(op, [self[each] for each in op.inputs])
            for tensor, value in zip(op.outputs, found if isinstance(found, list) else itertools.repeat(found)):  # noqa: B905
                self._known.setdefault(id(tensor), value)

    def _of(self, op: tf.Operation, args: list[Rows]) -> Rows | list[Rows]:
        kind = op.type
        if kind == "Placeholder":
            return self._placeholder(op.outputs[0])
        if kind == "ReadVariableOp":
            return self._set.get(id(op.inputs[0]), args[0])
        if _ASSIGNS.match(kind):
            return self._assign(op, args)
        if _is_draw(kind):
            return self._drawn(op, args)
        if kind in _FUNCTIONS:
            self.branches += args
        if all(each.is_alike for each in args):
            return OTHER if any(word in kind for word in _UNKNOWN) else ALIKE
        if kind in _SPECIAL:
            return _SPECIAL[kind](self, op, args)
        if OTHER in args:
            return OTHER
        form = _form(self.sizes, op)
        if all(each.of is Of.ALIKE for each in args):
            return self._counted(op, args, form)
        return OTHER if form is None else self._pushed(op, args, form)

    def _placeholder(self, tensor: tf.Tensor) -> Rows:
        if id(tensor) not in self._captured:
            rank = tensor.shape.rank
            return OTHER if rank is None else ROWS if rank and tensor.shape[0] is None else ALIKE
        outer = self._captured[id(tensor)]
        if tensor.dtype == "resource":
            return OTHER if _is_kept_by_replica(outer) else ALIKE
        return OTHER if hasattr(outer, "graph") else ALIKE  # Of another graph's tensor nothing is known.

    def _assign(self, op: tf.Operation, args: list[Rows]) -> Rows:
        value = args[1] if len(args) == 2 else _joined(args[1:])
        self.assigned.append((op, value))
        if not value.is_alike:
            self._set[id(op.inputs[0])] = OTHER
        return OTHER if not value.is_alike else ALIKE

    def _pushed(self, op: tf.Operation, args: list[Rows], form: Form) -> Rows | list[Rows]:
        """Pushes the label of the rows' axis through an operation, one of whose arguments is ROWS or SUM."""
        data, numbers = args[: form.data], args[form.data :]
        rows = [(each, labels[each.axis]) for each, labels in zip(args, form.given) if each.of is Of.ROWS]  # noqa: B905
        sums = [each for each in data if each.of is Of.SUM]
        if any(
            each.of is Of.SUM or (each.power and (each.of is Of.ROWS or op.type not in _SLICES)) for each in numbers
        ):
            return OTHER
        power = self._power(data, form.how)
        if power is None or (sums and (rows or form.how not in ("mul", "div", "add"))):
            return OTHER
        if sums:
            return Rows(Of.SUM, power=power)
        label = rows[0][1]
        parts = {each.parts for each, _ in rows if not each.free}
        if label == "*" or any(other != label for _, other in rows) or len(parts) > 1:
            return OTHER
        for each, labels, tensor in zip(args, form.given, op.inputs):  # noqa: B905
            places = [n for n, other in enumerate(labels) if other == label]
            if each.of is Of.ROWS and len(places) > 1:
                return OTHER  # A diagonal, whose entries are at the rows' numbers.
            shape = self.sizes.shape(tensor) if each.of is not Of.ROWS and places else None
            if each.of is not Of.ROWS and places and (shape is None or any(shape[n] != (1, 1) for n in places)):
                return OTHER  # A factor for each row's number.
        if len(form.given) < len(args) and any(not each.is_alike for each in args[len(form.given) :]):
            return OTHER
        summed = Rows(Of.SUM, power=power - (op.type == "Mean")) if form.how in ("mul", "sum") else OTHER
        free = not parts and form.how != "sum"
        found = [
            Rows(Of.ROWS, power, labels.index(label), parts.copy().pop() if parts else 1, free)
            if label in labels
            else summed
            for labels in form.made
        ]
        return found if len(found) > 1 else found[0]

    def _power(self, data: list[Rows], how: str) -> int | None:
        """Returns the power of a result; None if it has none."""
        sums, rows = (sum(each.of is of for each in data) for of in (Of.SUM, Of.ROWS))
        if any(each.power == MIXED for each in data):
            return None
        if how in ("mul", "div"):
            signs = [-1 if how == "div" and n else 1 for n in range(len(data))]
            if sums > 1 or (how == "div" and data[-1].of is Of.SUM):
                return None
            return sum(sign * each.power for sign, each in zip(signs, data, strict=True))
        if how == "add":
            # n times a constant is a sum over rows, and a constant is a mean over them.
            powers = {each.power + (each.of is Of.SUM) for each in data} if not rows else {each.power for each in data}
            return powers.pop() - bool(sums) if len(powers) == 1 else None
        return 0 if not any(each.power for each in data) else None

    def _counted(self, op: tf.Operation, args: list[Rows], form: Form | None) -> Rows | list[Rows]:
        """What is computed from constants and numbers of rows."""
        how = form.how if form is not None else None
        if op.type in _MOVES or how == "mul":
            found = [self._read(each) for each in op.outputs]
            if OTHER not in found:
                return found
        if op.type == "Maximum":  # There is at least one row.
            (one, a), (two, b) = sorted(
                zip(args, map(self.sizes.value, op.inputs), strict=True), key=lambda each: each[0].power
            )
            least = (
                a is not None and b is not None and (one.power, two.power) == (0, 1) and (a[0] <= b[0] / _N[0]).all()
            )
            return two if least else OTHER
        if form is None or form.how in ("", "sum") or any(each.power for each in args[form.data :]):
            return OTHER
        power = self._power(args[: form.data], form.how)
        return OTHER if power is None else Rows(Of.ALIKE, power)

    def _read(self, tensor: tf.Tensor) -> Rows:
        """What sizes are. Each is a constant times a power of the rows, as they are moved and multiplied only."""
        found = self.sizes.value(tensor)
        if found is None or found[0].shape != found[1].shape:
            return OTHER
        found_of = [_power(*each) for each in zip(*(value.reshape(-1).tolist() for value in found), strict=True)]
        powers = {each for each in found_of if each is not None} or {0}
        return OTHER if None in found_of else Rows(Of.ALIKE, power=powers.pop() if len(powers) == 1 else MIXED)

    # Operations whose result depends on how often the batch stands along an axis, or on sizes.

    def _shape(self, op: tf.Operation, args: list[Rows]) -> list[Rows]:
        return [
            self._read(made) if x.of is not Of.OTHER else ALIKE if given.shape.is_fully_defined() else OTHER
            for x, given, made in zip(args, op.inputs, op.outputs, strict=True)
        ]

    def _each(self, _: tf.Operation, args: list[Rows]) -> list[Rows]:
        return args

    def _cast(self, op: tf.Operation, args: list[Rows]) -> Rows:
        before, after = op.inputs[0].dtype, op.outputs[0].dtype
        rounds = after.is_bool or (before.is_floating and not after.is_floating)
        return OTHER if rounds and (args[0].of is Of.SUM or args[0].power) else args[0]

    def _chosen(self, op: tf.Operation, args: list[Rows]) -> Rows | list[Rows]:
        """One of two by a third: by one that is alike as a sum of both is; by rows as anything of them."""
        form = _form(self.sizes, op)
        if OTHER in args or form is None:
            return OTHER
        if not args[0].is_alike or any(each.of is Of.ROWS for each in args):
            return self._pushed(op, args, form) if any(each.of is Of.ROWS for each in args) else OTHER
        power = self._power(args[1:], "add")
        return OTHER if power is None else Rows(Of.SUM if any(x.of is Of.SUM for x in args) else Of.ALIKE, power)

    def _like(self, op: tf.Operation, args: list[Rows]) -> Rows:
        """Zeros or ones in the shape of the argument."""
        if args[0].of is Of.ROWS:
            return dataclasses.replace(args[0], power=0, free=True, parts=1)
        return ALIKE if args[0].of is not Of.OTHER or op.outputs[0].shape.is_fully_defined() else OTHER

    def _filled(self, op: tf.Operation, args: list[Rows]) -> Rows:
        """What is repeated up to a shape: entries for each row, if they are alike before."""
        x, sizes = (args[1], args[0]) if op.type == "Fill" else args[:2]
        tensor, shape = op.inputs[1 if op.type == "Fill" else 0], self.sizes.shape(op.outputs[0])
        before = self.sizes.shape(tensor)
        if sizes.of is not Of.ALIKE or x.of is Of.OTHER or not shape or before is None or (None, None) in shape:
            return OTHER
        before = [(1, 1)] * (len(shape) - len(before)) + before
        counted = [n for n, size in enumerate(shape) if size[0] != size[1] and size != before[n]]
        if x.of is Of.ROWS:
            axis = x.axis + len(shape) - tensor.shape.rank
            if [n for n in counted if n != axis]:
                return OTHER
            times = shape[axis][0] // before[axis][0]
            return dataclasses.replace(x, axis=axis, parts=x.parts * times)
        if not counted:
            return x
        rows = x.is_alike and len(counted) == 1 and before[counted[0]] == (1, 1) and counts_rows(shape[counted[0]])
        return Rows(Of.ROWS, axis=counted[0], free=True) if rows else OTHER

    def _drawn(self, op: tf.Operation, args: list[Rows]) -> Rows:
        """Random numbers: each row's, if there is one for each; of a state they are otherwise the whole batch's."""
        if op.type in ("Multinomial", "StatelessMultinomial"):
            return args[0] if args[0].by_row else OTHER
        shape = self.sizes.shape(op.outputs[0]) if op.outputs else None
        counted = [n for n, size in enumerate(shape or ()) if size[0] != size[1]]
        if "Shuffle" in op.type or not args or args[0].of is not Of.ALIKE or not all(x.is_alike for x in args[1:]):
            return OTHER
        if shape is not None and not counted and op.type.startswith("Stateless"):
            return ALIKE  # All replicas have the same seed.
        rows = shape is not None and len(counted) == 1 and counts_rows(shape[counted[0]])
        # Replicas draw those of a row together. Of numbers drawn by a state nobody promises which they are.
        return Rows(Of.ROWS, axis=counted[0], free=not op.type.startswith("Stateless")) if rows else OTHER

    def _reshaped(self, op: tf.Operation, args: list[Rows]) -> Rows:
        x, before, after = args[0], self.sizes.shape(op.inputs[0]), self.sizes.shape(op.outputs[0])
        if args[1].of is not Of.ALIKE or x.of is Of.OTHER:
            return OTHER
        if x.of is not Of.ROWS:
            return self._read(op.outputs[0]) if x.power == MIXED else x
        if before is None or after is None or any(None in size for size in before + after):
            return OTHER
        counted = [n for n, size in enumerate(after) if counts_rows(size)]
        outer = math.prod(size for size, _ in after[: counted[0]]) if len(counted) == 1 else 0
        if not outer:
            return OTHER
        if x.free:
            return dataclasses.replace(x, axis=counted[0])
        # Rows stand so many times one after another, whatever the axes: [2, n, 4] as [2 n, 4], as [2, 2 n, 2].
        times, rest = divmod(math.prod(size for size, _ in before[: x.axis]) * x.parts, outer)
        own = [size / max(times * n, 1) for size, n in zip(after[counted[0]], _N, strict=True)]
        by_row = not rest and times and own[0] == own[1] == int(own[0])
        return dataclasses.replace(x, axis=counted[0], parts=times) if by_row else OTHER

    def _convolved_back(self, op: tf.Operation, args: list[Rows]) -> Rows:
        """A transposed convolution, which is told the sizes of its result."""
        sizes, kernel, x = args
        before, after = self.sizes.shape(op.inputs[2]), self.sizes.shape(op.outputs[0])
        same = before is not None and after is not None and before[0] == after[0]
        return x if sizes.of is Of.ALIKE and kernel.is_alike and x.axis == 0 and same else OTHER

    def _concatenated(self, op: tf.Operation, args: list[Rows]) -> Rows | list[Rows]:
        *values, _ = args
        axis, rank = self.sizes.constant(op.inputs[-1]), op.outputs[0].shape.rank
        if axis is None or rank is None or OTHER in args:
            return OTHER
        if all(each.of is Of.ALIKE for each in values):
            return self._read(op.outputs[0])
        axis = axis[0] % rank
        if values[0].of is not Of.ROWS or values[0].axis != axis:
            labels = [n if n != axis else "*" for n in range(rank)]
            return self._pushed(op, args, Form([labels] * len(values) + [[]], [labels], "add", len(values)))
        if any((each.of, each.axis, each.power) != (Of.ROWS, axis, values[0].power) for each in values):
            return OTHER
        own = [(self.sizes.shape(each) or [])[axis][0] for each in list(op.inputs)[:-1]]  # Of rows, so of known rank.
        each = min(size // x.parts for size, x in zip(own, values, strict=True))
        parts = [size // each if x.free else x.parts for size, x in zip(own, values, strict=True)]
        if any(size != each * n for size, n in zip(own, parts, strict=True)):
            return OTHER
        return dataclasses.replace(values[0], parts=sum(parts), free=False)

    def _split(self, op: tf.Operation, args: list[Rows]) -> Rows:
        where, data = (0, 1) if op.type == "Split" else (2, 0)
        x, axis = args[data], self.sizes.constant(op.inputs[where])
        rank, count = op.inputs[data].shape.rank, len(op.outputs)
        if axis is None or rank is None or x.of is not Of.ROWS or axis[0] % rank != x.axis:
            return x if axis is not None and x.power != MIXED else OTHER
        halves = op.type == "Split" and x.parts % count == 0
        return dataclasses.replace(x, parts=x.parts // count) if halves else OTHER


def _sizes_of(graph: tf.Graph, inputs: list) -> Sizes:
    """Returns a graph's sizes, made once, unless what is given has others there."""
    count, kept = getattr(graph, "_toolkit_sizes", (-1, Sizes(graph)))  # It may be a weak proxy.
    if count != len(graph.get_operations()):
        kept = Sizes(graph)
        graph._toolkit_sizes = (len(graph.get_operations()), kept)
    rows = [each for each in inputs if each.shape.rank and each.shape[0] is None]
    return Sizes(graph, rows, kept) if rows else kept


def _draws(call: Call, operations: Iterable[tf.Operation]) -> bool:
    """Whether a layer's call draws random numbers, as its operations show, or as it may in a loop of them."""
    types = {op.type for op in operations}
    kept = getattr(call.of, "non_trainable_variables", ())
    seeded = any(getattr(each, "name", "") == _SEED_STATE for each in kept)
    return any(_is_draw(each) for each in types) or (seeded and not types.isdisjoint(_FUNCTIONS))


def _is_draw(kind: str) -> bool:
    return bool(_DRAWS.search(kind)) and not kind.startswith("StatelessRandomGet")


_SEED_STATE = "seed_generator_state"  # Keras's name of what a seed generator counts.
_ASSIGNS = re.compile("Assign(Add|Sub)?VariableOp|Resource(Scatter|Apply|SparseApply)")
_DRAWS = re.compile("Random|TruncatedNormal|Multinomial|Parameterized|Rng")
_FUNCTIONS = ("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile", "StatefulPartitionedCall")
_UNKNOWN = ("Iterator", "Optional", "PyFunc", "Collective")


def _joined(values: Sequence[Rows]) -> Rows:
    return ALIKE if all(each.is_alike for each in values) else OTHER


def _is_kept_by_replica(handle: Any) -> bool:
    container = getattr(handle, "_distributed_container", None)
    variable = container() if container is not None else None
    return getattr(variable, "synchronization", None) == tf.VariableSynchronization.ON_READ


# Which sizes count rows, in a graph that replicas run.


class _Shown(Sizes):
    """Sizes as far as a graph shows them by itself."""

    def shape(self, tensor: tf.Tensor) -> list[tuple] | None:
        """Returns the axes' sizes; None for those that aren't known."""
        return None if tensor.shape.rank is None else [(size, size) for size in tensor.shape]

    def value(self, tensor: tf.Tensor) -> list[np.ndarray] | None:
        """Returns a constant."""
        shown = tf.get_static_value(tensor)
        return None if shown is None else [np.asarray(shown)] * 2


def counts_the_batch(shape: tf.Tensor, n: int, batch: Iterable[tf.Tensor]) -> bool:
    """Whether a size that isn't known when it is traced is a number of rows, and not a length that batches differ in.

    Args:
        shape: The sizes.
        n: The place of the one.
        batch: The tensors of a batch, whose first axis is the rows.

    Returns:
        False only where the graph shows that another axis of the batch's counts so many.
    """
    given = {id(each) for each in batch}
    if all(None not in each.shape[1:] for each in batch if each.shape.rank):
        return True  # There is no other such size.
    found = _axis_of(shape, n)
    while found is not None:
        tensor, axis = found
        if id(tensor) in given:
            return axis == 0
        found = _axis_before(tensor, axis)
    return True


def _axis_of(sizes: tf.Tensor, n: int) -> tuple[tf.Tensor, int] | None:
    """Returns the tensor and the axis of it whose size is an entry of some sizes; None if that isn't shown."""
    op = sizes.op
    if op.type in ("Identity", "Cast"):
        return _axis_of(op.inputs[0], n)
    if op.type == "Shape":
        return op.inputs[0], n
    if op.type == "Pack" and op.get_attr("axis") == 0:
        return _axis_of(op.inputs[n], 0)
    if op.type == "ConcatV2":
        for each in op.inputs[:-1]:
            if each.shape.rank != 1 or each.shape[0] is None:
                return None
            if n < each.shape[0]:
                return _axis_of(each, n)
            n -= each.shape[0]
    if op.type == "StridedSlice" and not any(op.get_attr(f"{name}_mask") for name in ("ellipsis", "new_axis")):
        begin, stride = (tf.get_static_value(each) for each in (op.inputs[1], op.inputs[3]))
        count = op.inputs[0].shape[0] if op.inputs[0].shape.rank == 1 else None
        if begin is not None and stride is not None and len(begin) == 1 and (begin[0] >= 0 or count is not None):
            before = 0 if begin[0] >= 0 else count or 0  # Some axes are counted from the end.
            first = 0 if op.get_attr("begin_mask") else int(begin[0]) + before
            return _axis_of(op.inputs[0], first + n * int(stride[0]))
    return None


def _axis_before(tensor: tf.Tensor, axis: int) -> tuple[tf.Tensor, int] | None:
    """Returns which axis of an argument an operation has kept as this one of its result; None if that isn't shown."""
    op = tensor.op
    if op.type == "Reshape":
        return _axis_of(op.inputs[1], axis)
    if op.type == "PlaceholderWithDefault":
        return op.inputs[0], axis
    form = _form(_Shown(op.graph), op)
    if form is None:
        return None
    place = next(n for n, each in enumerate(op.outputs) if each is tensor)
    label = form.made[place][axis]
    for labels, each in zip(form.given, op.inputs):  # noqa: B905
        if label != "*" and label in labels and each.shape[labels.index(label)] is None:
            return each, labels.index(label)
    return None


# The signatures of operations, and what makes those that depend on axes which an operation is given.


def _form(sizes: Sizes, op: tf.Operation) -> Form | None:
    """Returns an operation's signature; None if it has none that is known."""
    ranks = [each.shape.rank for each in op.inputs]
    if None in ranks or any(each.shape.rank is None for each in op.outputs) or op.type not in _TABLE:
        return None
    how, signature = _TABLE[op.type]
    how, _, data = how.partition(":")
    found = signature(sizes, op) if callable(signature) else _written(signature, op)
    return None if found is None else Form(found[0], found[1], how, int(data or len(ranks)))


def _written(signature: str, op: tf.Operation) -> tuple[list, list]:
    """Reads a signature. "..." are axes from the right on that are kept, "~" axes that are mixed."""
    given, _, made = (side.split(",") for side in signature.partition("->"))

    def labels(terms: list[str], tensors: Sequence[tf.Tensor]) -> list:
        return [_labels(term, each.shape.rank) for term, each in zip(terms, tensors)]  # noqa: B905

    given = given * len(op.inputs) if signature == "...->..." else given
    return labels(given, op.inputs), labels(made * len(op.outputs) if len(made) == 1 else made, op.outputs)


def _labels(term: str, rank: int) -> list:
    head, dots, tail = re.findall(r"([^.~]*)(\.\.\.|~)?(.*)", term)[0]
    width = rank - len(head) - len(tail)
    return [*head, *(n - width if dots == "..." else "*" for n in range(width)), *tail]


def _along(where: Any, what: str) -> Callable:
    """Of operations along axes that an argument or an attribute names.

    Args:
        where: The argument's number, or the attribute.
        what: "sum": they are gone; "mix": entries along them are mixed; "drop": then gone; "new": they are new.
    """

    def found(sizes: Sizes, op: tf.Operation) -> tuple | None:
        shape = (op.outputs[0] if what == "new" else op.inputs[0]).shape
        axes = sizes.constant(op.inputs[where]) if isinstance(where, int) else op.get_attr(where)
        if axes is None:
            return None
        axes = {each % max(shape.rank, 1) for each in (axes if isinstance(axes, list) else [axes])}
        if where == "squeeze_dims" and not axes:
            axes = {n for n, size in enumerate(shape) if size == 1}
        marked = ["*" if n in axes else n for n in range(shape.rank)]
        rest, others = [each for each in marked if each != "*"], [list[Any]()] * (len(op.inputs) - 1)
        if what == "new":
            return [rest, *([rest] * len(others) if op.type == "Pack" else others)], [marked]
        if what == "sum":
            return [list(range(shape.rank)), []], [marked if op.get_attr("keep_dims") else rest]
        return [marked, *others], [rest if what == "drop" else marked] * len(op.outputs)

    return found


def _transposed(sizes: Sizes, op: tf.Operation) -> tuple | None:
    order, own = sizes.constant(op.inputs[1]), list(range(op.inputs[0].shape.rank))
    return None if order is None else ([own, []], [order])


def _padded(sizes: Sizes, op: tf.Operation) -> tuple | None:
    padding = sizes.constant(op.inputs[1])
    own = [n if padding and not any(padding[2 * n : 2 * n + 2]) else "*" for n in range(op.inputs[0].shape.rank)]
    return [own] + [[]] * (len(op.inputs) - 1), [own]


def _sliced(sizes: Sizes, op: tf.Operation) -> tuple | None:
    """An axis stays where the slice takes all of it, which no literal end does for every number of rows."""
    shape, values = sizes.shape(op.inputs[0]), [sizes.value(each) for each in list(op.inputs)[1:]]
    if shape is None:
        return None

    def at(number: int, n: int) -> tuple | None:
        value = values[number]
        return None if value is None else (int(value[0][n]), int(value[1][n]))

    if op.type == "Slice":
        if None in values:
            return None
        own = [_kept(n, at(0, n), at(1, n), full, -1) for n, full in enumerate(shape)]
        return None if None in own else ([own, [], []], [own])
    length = op.inputs[1].shape[0]
    if length is None:
        return None
    begins, ends, dots, news, shrinks = (
        op.get_attr(f"{each}_mask") for each in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    )
    own, made = [], []  # The labels of the axes that it takes and returns.
    used = sum(not (dots | news) >> n & 1 for n in range(length))
    for n in range(length):
        axis = len(own)
        if dots >> n & 1:
            own += range(axis, axis + len(shape) - used)
            made += own[axis:]
        elif news >> n & 1:
            made.append("1")
        else:
            shrink = shrinks >> n & 1
            begin = (0, 0) if begins >> n & 1 else at(0, n)
            end = shape[axis] if ends >> n & 1 and not shrink else at(1, n)
            kept = _kept(axis, begin, end, shape[axis]) if at(2, n) == (1, 1) else "*"
            if kept is None:
                return None
            own.append("*" if shrink else kept)  # One entry of an axis is no entry for each row, even of one.
            made += own[axis:] if not shrink else []
    rest = list(range(len(own), len(shape)))
    return [own + rest, [], [], []], [made + rest]


def _kept(axis: int, begin: tuple | None, end: tuple | None, full: tuple, rest: int | None = None) -> Any:
    """The label of an axis that a slice takes some of; None if how much it takes of another depends on the rows."""
    if begin == (0, 0) and end in (full, (rest, rest)):
        return axis
    return "*" if all(each is None or each[0] == each[1] for each in (begin, end)) else None


def _gathered(sizes: Sizes, op: tf.Operation) -> tuple | None:
    x, indices, made = op.inputs[0].shape.rank, op.inputs[1].shape.rank, op.outputs[0].shape.rank
    if op.type.endswith("Nd"):
        own = [f"i{n}" for n in range(indices - 1)]
        return [["*"] * x, [*own, "*"]], [own + ["*"] * (made - indices + 1)]
    batch = op.get_attr("batch_dims") if op.type != "Gather" else 0
    axes = sizes.constant(op.inputs[2]) if op.type == "GatherV2" else [batch]
    if axes is None:
        return None
    labels: list = list(range(x if op.type != "ResourceGather" else made - indices + 1 + batch))
    axis = axes[0] % max(len(labels), 1)
    before, after = labels[:axis], labels[axis + 1 :]
    named = labels[:batch] + [f"i{n}" for n in range(batch, indices)]
    return [[*before, "*", *after], named, []], [[*before, *named[batch:], *after]]


def _matmul(_: Sizes, op: tf.Operation) -> tuple:
    turned = [
        op.get_attr(each) for each in (("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y"))
    ]
    given = [
        [*range(2 - x.shape.rank, 0), *(names[::-1] if turn else names)]
        for x, names, turn in zip(op.inputs, ("ij", "jk"), turned, strict=True)
    ]
    return given, [[*range(2 - op.outputs[0].shape.rank, 0), "i", "k"]]


def _einsum(_: Sizes, op: tf.Operation) -> tuple:
    equation = op.get_attr("equation")
    return _written((equation.decode() if isinstance(equation, bytes) else equation).replace(" ", ""), op)


_SLICES = ("StridedSlice", "Slice")
# Operations that make of sizes what is each a product of sizes.
_MOVES = frozenset(
    """ConcatV2 ExpandDims Gather GatherV2 Identity Pack Prod Reshape Shape ShapeN Size Slice Squeeze StridedSlice
    Transpose Unpack""".split()  # noqa: SIM905 - A list of words.
)
_RULES: dict[Callable, str] = {
    Graph._shape: "Shape ShapeN Size",
    Graph._like: "ZerosLike OnesLike",
    Graph._filled: "Fill BroadcastTo Tile",
    Graph._reshaped: "Reshape",
    Graph._concatenated: "ConcatV2",
    Graph._split: "Split SplitV",
    Graph._each: "IdentityN",
    Graph._cast: "Cast",
    Graph._chosen: "Select SelectV2",
    Graph._convolved_back: "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput",
}
# How an operation combines its arguments, after a colon how many of them these are, and its signature.
_SIGNATURES: dict[tuple[str, Any], str] = {
    ("add", "...->..."): "Add AddV2 AddN Sub Identity StopGradient PreventGradient CheckNumerics Snapshot EnsureShape "
    "Neg DebugIdentityV2 DebugIdentityV3 DebugNumericSummaryV2 Real Imag Conj",
    ("mul", "...->..."): "Mul MulNoNan",
    ("div", "...->..."): "Div RealDiv DivNoNan",
    ("", "...->..."): "Abs Acos Acosh Angle ApproximateEqual Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e Betainc "
    "BitwiseAnd BitwiseOr BitwiseXor Ceil ClipByValue ComplexAbs Complex Cos Cosh Digamma Elu Equal Erf Erfc Erfinv "
    "Exp Expm1 Floor FloorDiv FloorMod Gelu Greater GreaterEqual Igamma Igammac Inv Invert IsFinite IsInf IsNan "
    "LeakyRelu LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Ndtri "
    "NextAfter NotEqual Polygamma Pow Reciprocal Relu Relu6 RightShift Rint Round Rsqrt Select SelectV2 Selu Sigmoid "
    "Sign Sin Sinh Softplus Softsign Sqrt Square SquaredDifference StringLower Tan Tanh TruncateDiv TruncateMod "
    "Xdivy Xlog1py Xlogy Zeta",
    ("", "...*->...*"): "Softmax LogSoftmax FFT IFFT RFFT IRFFT MatrixDiagPart",
    ("", "...*,->...*"): "TopKV2",
    ("", "n*,n*->n,n*"): "SoftmaxCrossEntropyWithLogits",
    ("", "n*,n->n,n*"): "SparseSoftmaxCrossEntropyWithLogits",
    ("", "n*,n,->n"): "InTopKV2",
    ("", "...*->...**"): "MatrixDiag",
    ("", "...*,,,,->...**"): "MatrixDiagV2 MatrixDiagV3",
    ("", "...**,,->...*"): "MatrixDiagPartV2 MatrixDiagPartV3",
    ("", "...**,,->...**"): "MatrixBandPart MatrixInverse Cholesky FFT2D IFFT2D RFFT2D IRFFT2D",
    ("", "...**->..."): "MatrixDeterminant",
    ("", "...**->...*,...**"): "SelfAdjointEigV2",
    ("", "...**->...*,...**,...**"): "Svd",
    ("", "n~,~,~->n~"): "Conv2D Conv3D DepthwiseConv2dNative AvgPool AvgPool3D MaxPool MaxPool3D ResizeBilinear "
    "ResizeNearestNeighbor ResizeBicubic ResizeArea DepthToSpace SpaceToDepth BiasAdd",
    ("sum", "n~->"): "L2Loss",
    ("sum", "n~,n~,->~"): "UnsortedSegmentSum ScatterNd",
    ("sum", "n,,n->~"): "DenseBincount",
    ("mul:1", _along(1, "sum")): "Sum Mean",
    (":1", _along(1, "sum")): "Max Min Prod All Any EuclideanNorm",
    (":1", _along(1, "drop")): "ArgMax ArgMin",
    (":1", _along(1, "mix")): "Cumsum Cumprod CumulativeLogsumexp ReverseV2",
    (":1", _along(2, "mix")): "Roll",
    ("add:1", _along(1, "new")): "ExpandDims",
    ("add", _along("squeeze_dims", "drop")): "Squeeze",
    ("add:1", _transposed): "Transpose",
    ("add", _along("axis", "new")): "Pack",
    ("add", _along("axis", "drop")): "Unpack",
    ("add:1", _padded): "Pad MirrorPad",
    (":1", _padded): "PadV2",
    ("add:1", _sliced): "StridedSlice Slice",
    ("add:1", _gathered): "Gather GatherV2 GatherNd ResourceGather ResourceGatherNd",
    (":1", _along("axis", "new")): "OneHot",
    ("mul", _matmul): "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3",
    ("mul", _einsum): "Einsum",
}
_SPECIAL = {name: rule for rule, names in _RULES.items() for name in names.split()}
_TABLE = {name: signature for signature, names in _SIGNATURES.items() for name in names.split()}
