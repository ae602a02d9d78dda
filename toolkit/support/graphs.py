"""TensorFlow's graphs: what a result is computed from, and how."""

import re
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["assigns_others", "computed_from", "is_elementwise", "same_everywhere"]

# Operations whose result says nothing of the values of a batch, only of its shape.
_SHAPES = ("Shape", "ShapeN", "Size", "Rank")
# Operations of whose results nothing is known from here.
_UNKNOWN = ("Iterator", "Optional", "Random", "Call", "If", "While")
_ASSIGNS = re.compile("Assign(Add|Sub)?VariableOp|Resource(Scatter|Apply|SparseApply)")
# Operations that compute each element from those at its place.
_ELEMENTWISE = frozenset(
    """Abs Add AddN AddV2 Atan2 Cast Ceil ClipByValue Cos Div DivNoNan Elu EnsureShape Equal Erf Erfc Exp Expm1 Floor
    Greater GreaterEqual Identity IdentityN IsFinite LeakyRelu Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr
    Maximum Minimum Mul MulNoNan Neg NotEqual OnesLike Pow PreventGradient RealDiv Reciprocal Relu Relu6 Round Rsqrt
    Select SelectV2 Selu Sigmoid Sign Sin Softplus Softsign Sqrt Square SquaredDifference StopGradient Sub Tanh Xdivy
    ZerosLike""".split()  # noqa: SIM905 - A list of words.
)


def computed_from(operations: "Iterable[tf.Operation]", until: "Container[tf.Operation]" = ()) -> "list[tf.Operation]":
    """Returns operations and those whose values they need, not beyond some of them; shapes are no values."""
    waiting, seen = list(operations), dict[Any, None]()
    while waiting:
        each = waiting.pop()
        if each not in seen and each.type not in _SHAPES:
            seen[each] = None
            if each not in until:
                waiting += [tensor.op for tensor in each.inputs]
    return list(seen)


def assigns_others(graph: "tf.Graph", own: "Iterable[tf.Tensor]") -> bool:
    """Says whether a function assigns variables other than those of some handles, in its branches too."""
    handles = {id(each) for each in own}
    mine = {id(inner) for outer, inner in graph.captures if id(outer) in handles}
    assigned = [op.inputs[0] for op in graph.get_operations() if _ASSIGNS.match(op.type)]
    within = (node.op for function in graph.as_graph_def().library.function for node in function.node_def)
    return any(id(each) not in mine for each in assigned) or any(_ASSIGNS.match(op) for op in within)


def is_elementwise(operation: "tf.Operation") -> bool:
    """Says whether each element of a result is computed from those at its place."""
    if operation.type == "Reshape":  # Such as of steps of a sequence, which count as examples.
        before, after = operation.inputs[0].shape, operation.outputs[0].shape
        return bool(before.rank and after.rank) and before[-1] is not None and before[-1] == after[-1]
    return operation.type in _ELEMENTWISE


def same_everywhere(indices: Any) -> bool:
    """Says whether indices can be seen to depend on no example: on constants, variables and shapes only."""
    # Replicas may have different numbers of those whose number isn't known here.
    import tensorflow as tf

    if tf.executing_eagerly() or not indices.shape.is_fully_defined():
        return False
    waiting, seen = [indices], set()
    while waiting:
        tensor = waiting.pop()
        if not hasattr(tensor, "graph"):  # A constant from outside of the function.
            continue
        operation, graph = tensor.op, tensor.graph
        if operation in seen or operation.type in _SHAPES:
            continue
        seen.add(operation)
        if operation.type == "Placeholder":
            outer = {id(inner): given for given, inner in getattr(graph, "captures", ())}.get(id(tensor))
            if outer is None:  # An argument of the function.
                return False
            waiting.append(outer)
        elif any(word in operation.type for word in _UNKNOWN):
            return False
        waiting += operation.inputs
    return True
