"""Finds out from TensorFlow's graphs what a result is computed from, and how.

`outside` calls a function where none of its caller's graphs and scopes is entered.
"""

import collections
import concurrent.futures
import enum
import re
import sys
from collections.abc import Callable, Collection, Container, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import tensorflow as tf


# Operations whose results depend only on shapes, not on values.
_SHAPES = ("Shape", "ShapeN", "Size", "Rank")
# Operations whose results can't be known from the graph.
_UNKNOWN = ("Iterator", "Optional", "Call", "If", "While", "PyFunc")
# Operations that draw random numbers from their own state. Stateless ones compute from their seeds.
_DRAWS = re.compile("Random|TruncatedNormal|Multinomial|Parameterized|Stateful(Uniform|Standard|Truncated|Random)|Rng")
_ASSIGNS = re.compile("Assign(Add|Sub)?VariableOp|Resource(Scatter|Apply|SparseApply)")
_DECIDES = {"cond_v2": "pred", "indexed_case": "branch_index"}
# Elementwise operations.
_ELEMENTWISE = frozenset(
    """Abs Add AddN AddV2 Atan2 Cast Ceil ClipByValue Cos Div DivNoNan Elu EnsureShape Equal Erf Erfc Exp Expm1 Floor
    Greater GreaterEqual Identity IdentityN IsFinite LeakyRelu Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr
    Maximum Minimum Mul MulNoNan Neg NotEqual OnesLike Pow PreventGradient RealDiv Reciprocal Relu Relu6 Round Rsqrt
    Select SelectV2 Selu Sigmoid Sign Sin Softplus Softsign Sqrt Square SquaredDifference StopGradient Sub Tanh Xdivy
    ZerosLike""".split()  # noqa: SIM905 - A list of words.
)


def computed_from(operations: "Iterable[tf.Operation]", until: "Container[tf.Operation]" = ()) -> "list[tf.Operation]":
    """Returns operations and those whose values they need, up to some of them. Needing a shape doesn't count."""
    waiting, seen = list(operations), dict[Any, None]()
    while waiting:
        each = waiting.pop()
        if each not in seen and each.type not in _SHAPES:
            seen[each] = None
            if each not in until:
                waiting += [tensor.op for tensor in each.inputs]
    return list(seen)


def assigns_others(graph: "tf.Graph", own: "Iterable[tf.Tensor]") -> bool:
    """Returns whether a function assigns variables other than those of some handles, also in its branches."""
    handles = {id(each) for each in own}
    mine = {id(inner) for outer, inner in graph.captures if id(outer) in handles}
    assigned = [op.inputs[0] for op in graph.get_operations() if _ASSIGNS.match(op.type)]
    within = (node.op for function in graph.as_graph_def().library.function for node in function.node_def)
    return any(id(each) not in mine for each in assigned) or any(_ASSIGNS.match(op) for op in within)


def is_elementwise(operation: "tf.Operation") -> bool:
    """Returns whether each element of a result is computed only from elements at the same place."""
    if operation.type == "Reshape":  # Such as the steps of a sequence, which count as examples.
        before, after = operation.inputs[0].shape, operation.outputs[0].shape
        return bool(before.rank and after.rank) and before[-1] is not None and before[-1] == after[-1]
    return operation.type in _ELEMENTWISE


def same_everywhere(
    indices: Any, same: "Collection[tf.Tensor]" = (), is_alike: "Callable[[tf.Operation], bool]" = lambda _: False
) -> bool:
    """Returns whether indices depend on no example: only on constants, variables, known sizes, and what is given.

    Args:
        indices: A tensor.
        same: Those that are known to be the same on all replicas.
        is_alike: As of `differs`.
    """
    import tensorflow as tf

    return not tf.executing_eagerly() and differs([indices], same, is_alike=is_alike) is Differs.NOWHERE


class Differs(enum.IntEnum):
    """Finds out from a graph how tensors of several replicas differ."""

    NOWHERE = 0  # Computed from constants, variables and tensors that are known to be equal.
    BY_DRAWS = 1  # Also computed from random numbers.
    BY_DATA = 2  # Computed from anything else.


def differs(
    tensors: "Iterable[tf.Tensor]",
    same: "Collection[tf.Tensor]" = (),
    drawn: "Collection[tf.Tensor]" = (),
    is_alike: "Callable[[tf.Operation], bool]" = lambda _: False,
) -> Differs:
    """Returns how the replicas' tensors differ.

    Args:
        tensors: Of the graph that is being traced, or of one around it.
        same: Those that are known to be the same.
        drawn: Those from which each replica draws its own numbers, such as seeds.
        is_alike: Whether an operation's results are known to be the same.
    """
    known, seeds = {id(each) for each in same}, {id(each) for each in drawn}
    found = Differs.NOWHERE
    waiting: list[tuple[Any, Any]] = [(each, None) for each in tensors]
    seen = set()
    while waiting:
        tensor, reader = waiting.pop()
        if not hasattr(tensor, "graph") or id(tensor) in known:  # A constant captured from outside of the function.
            continue
        if id(tensor) in seeds:
            found = Differs.BY_DRAWS
            continue
        operation = tensor.op
        # Between two reads of a variable, each replica may have set it to another value.
        key = (operation, reader) if tensor.dtype == "resource" else operation
        if key in seen or _is_known_size(operation) or is_alike(operation):
            continue
        seen.add(key)
        if operation.type == "Placeholder":
            outer = _outside(tensor)
            if _kept_by_replica(outer):
                return Differs.BY_DATA
            # A variable is equal on all replicas unless this step has set it to a value that isn't.
            if tensor.dtype == "resource":
                waiting += _assigned(tensor, reader)
                waiting += [] if outer is None or not hasattr(outer, "graph") else [(outer, None)]
                continue
            if outer is None:  # An argument of the function.
                return Differs.BY_DATA
            waiting.append((outer, None))
        elif _DRAWS.match(operation.type):
            found = Differs.BY_DRAWS
        elif any(word in operation.type for word in _UNKNOWN):
            return Differs.BY_DATA
        waiting += [(each, operation) for each in operation.inputs]
    return found


def _is_known_size(operation: "tf.Operation") -> bool:
    """Whether an operation returns a size that all replicas have alike: not their own numbers of rows."""
    given = operation.inputs[0].op if operation.type == "StridedSlice" else operation
    if given.type not in _SHAPES:
        return False
    if given.type == "Rank" or all(each.shape.is_fully_defined() for each in given.inputs):
        return True
    import tensorflow as tf

    begin = None if given is operation else tf.get_static_value(operation.inputs[1])
    if begin is None or len(begin) != 1 or given.type != "Shape" or given.inputs[0].shape.rank is None:
        return False
    sizes = given.inputs[0].shape.as_list()[begin[0] :]  # Of tf.shape(x)[1], the first of these.
    return None not in (sizes[:1] if operation.get_attr("shrink_axis_mask") else sizes)


def derives_from(tensor: "tf.Tensor", given: "Collection[tf.Tensor]") -> bool:
    """Returns whether a tensor was computed from one of some others, in this graph or in an outer one."""
    wanted = {id(each) for each in given}
    waiting: collections.deque[tuple[Any, Any]] = collections.deque([(tensor, None)])  # The nearest first.
    seen = set()
    while waiting:
        each, reader = waiting.popleft()
        if id(each) in wanted:
            return True
        key = (id(each), reader) if each.dtype == "resource" else id(each)
        if not hasattr(each, "graph") or key in seen:
            continue
        seen.add(key)
        outer = _outside(each) if each.op.type == "Placeholder" else None
        waiting += [(of, each.op) for of in each.op.inputs] if outer is None else [(outer, None)]
        if each.dtype == "resource":
            waiting += _assigned(each, reader)
    return False


def _outside(placeholder: "tf.Tensor") -> Any:
    """Returns the outer tensor that a placeholder captures; None for an argument."""
    captures = getattr(placeholder.graph, "captures", ())
    return next((outer for outer, inner in captures if inner is placeholder), None)


def _kept_by_replica(handle: Any) -> bool:
    """Whether it is the handle of a variable such as a metric's sum, of which each replica has its part."""
    import tensorflow as tf

    container = getattr(handle, "_distributed_container", None)
    variable = container() if container is not None else None
    return getattr(variable, "synchronization", None) == tf.VariableSynchronization.ON_READ


def decided_by() -> "list[tf.Tensor]":
    """Returns what decides which branches are taken in the graph being traced: predicates, and numbers of cases.

    A branch's graph doesn't know it; TensorFlow's functions that trace branches have it among their arguments.
    """
    found: list[Any] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = _DECIDES.get(frame.f_code.co_name)
        if name is not None and frame.f_code.co_filename.endswith("cond_v2.py"):
            found.append(frame.f_locals[name])
        frame = frame.f_back
    return found


def _assigned(handle: "tf.Tensor", reader: Any) -> "list[tuple[tf.Tensor, tf.Operation]]":
    """Returns the value that a variable was set to before an operation reads it, and what sets it; None if unclear."""
    in_loop = getattr(handle.graph, "is_control_flow_graph", False)  # In a loop, the assignment may come around again.
    before = [each for each in handle.consumers() if _ASSIGNS.match(each.type)]
    if reader is not None and not in_loop:
        before = [each for each in before if each._id < reader._id]
    return [(value, each) for each in before for value in each.inputs[1:]]


_Result = TypeVar("_Result")


def outside(function: Callable[[], _Result]) -> _Result:
    """Calls a function in a new thread, waits for it, and returns its result or raises its exception.

    It sees no graph, strategy, replica, stateless scope or device that its caller has entered.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(function).result()
