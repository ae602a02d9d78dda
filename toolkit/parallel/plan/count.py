"""The cost of each layer of a model: operations, weights, activations, memory. Nothing is computed for it.

A multiplication and an addition are two operations. They are counted in TensorFlow's graph of one call of the model, so
that one's own layers count as Keras's do. What the graph doesn't show, such as loops over steps and what Keras
compiles, has a formula; or it isn't known. Backward, a product is computed again for each of its factors that needs a
gradient, and what is elementwise once. `tests/parallel/test_count.py` holds the counts against TensorFlow's profiler.

A tensor takes memory from the operation that makes it until the last one that reads it. Operations run in the order in
which they were made, forward and then backward; `benchmarks/predictions.py` holds what comes of it against what
TensorFlow's allocator hands out.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit.parallel.plan.trace import Call, Trace, size_of, trace
from toolkit.support.graphs import is_elementwise

if TYPE_CHECKING:
    import keras


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCost:
    """A layer's costs; activations and operations are for one example.

    Attributes:
        name: The layer's name, such as "head/fc1".
        kind: Its class.
        forward: Operations forward; None where they aren't known.
        backward: Operations backward; None where they aren't known.
        multiply_adds: Multiplications of matrices and convolutions forward, as published tables count them.
        parameters: Elements of its trained weights.
        state: Elements of its other weights.
        inputs: Elements of its inputs.
        outputs: Elements of its outputs.
        splits: What can be divided, and how many there are of it: "outputs" (units or filters), "inputs" (input
            features), "heads", "columns" and "rows" (of a table). Empty where nothing can be.
        shapes: The shapes of its trained weights.
        whole: Elements of its trained weights that every replica has in full, split by inputs or heads: a bias of the
            sums.
        passes_gradient: Something before it is trained, so that gradients go on through it.
        statistics: Elements that it sums over replicas, forward and again backward, of the whole batch's statistics.
        synchronized: Whether it does so even if each replica normalises its own share.
        kept: Bytes that one example has from forward to backward.
        block: The outermost layer that it is in, models aside, or itself, by name: what can be computed again as one.
        inside: Bytes of `kept` that nothing but its block reads forward.
        passed: Bytes that one example has of what other blocks read, where all are computed again for which that saves.
        working: Bytes that one example has at most while the layer computes, beside what layers keep until then.
        workspace: Bytes that a library takes to compute it, for any number of examples.
        activation_bytes: Bytes of an element of its activations.
        weight_bytes: Bytes of an element of its weights.
        elementwise: Its output can be left sharded by features.
        takes_split_from: The layer whose output comes here through nothing but elementwise operations.
        note: Why it can't be split, or counted; "" where it can.
    """

    name: str
    kind: str
    forward: int | None
    backward: int | None
    parameters: int
    state: int
    multiply_adds: int = 0
    inputs: int = 0
    outputs: int = 0
    splits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ()
    whole: int = 0
    passes_gradient: bool = True
    statistics: int = 0
    synchronized: bool = False
    kept: float = 0.0
    block: str = ""
    inside: float = 0.0
    passed: float = 0.0
    working: float = 0.0
    workspace: int = 0
    activation_bytes: int = 4
    weight_bytes: int = 4
    elementwise: bool = False
    takes_split_from: str | None = None
    note: str = ""

    @property
    def operations(self) -> int | None:
        """Operations of a training step for one example, forward and backward."""
        return None if self.forward is None or self.backward is None else self.forward + self.backward


def costs(model: "keras.Model", *, length: int | None = None) -> tuple[LayerCost, ...]:
    """Returns the costs of each layer, in the order of their calls.

    Args:
        model: A built Keras model of any kind, which is traced. Models and one's own layers are taken apart.
        length: How long sequences are, where the model takes any length: what stands for each dimension that it leaves
            open, beside that of examples. Without it, what such layers compute isn't known.

    Raises:
        ModelError: The model isn't built, or can't be called on symbolic tensors.
    """
    return costs_seen(trace(model, length=length, backward=True))


def costs_seen(seen: Trace) -> tuple[LayerCost, ...]:
    """Returns the costs of each layer of a traced model, as `costs` does."""
    found = []
    taken = _footprints(seen)
    for name, layer in seen.layers:
        kept, inside, passed, working = taken[id(layer)]
        loops = sum(_bytes_in_loops(layer, call) for call in seen.calls(layer)) / seen.examples
        cost = dataclasses.replace(
            _cost(name, layer, seen),
            kept=kept + loops,
            block=seen.blocks[id(layer)],
            inside=inside + loops,
            passed=passed,
            working=working,
            workspace=_workspace(layer),
        )
        # A layer that only calls others costs nothing.
        if cost.operations != 0 or cost.parameters or cost.state or not seen.is_divided(layer):
            found.append(cost)
    return tuple(_with_sources(found, dict(seen.layers), seen))


def _cost(name: str, layer: Any, seen: Trace) -> LayerCost:
    kind = type(layer).__name__
    calls = seen.calls(layer)
    trained, others = seen.weights(layer)
    given = [tensor for call in calls for tensor in call.inputs]
    inputs = [tensor for tensor in given if tensor.dtype.is_floating] or given  # Masks are separate.
    outputs = [tensor for call in calls for tensor in call.outputs]
    passes = any(id(tensor) in seen.trained for tensor in inputs)
    cost = LayerCost(
        name=name,
        kind=kind,
        forward=None,
        backward=None,
        parameters=_elements_of_weights(trained),
        state=_elements_of_weights(others),
        shapes=tuple(tuple(each.shape) for each in trained),
        passes_gradient=passes,
        activation_bytes=_bytes(layer.compute_dtype),
        weight_bytes=_bytes(layer.variable_dtype),
    )
    if any(size_of(tensor) is None for tensor in (*inputs, *outputs)):
        return dataclasses.replace(cost, note="the sizes of its activations depend on a length that isn't given")
    cost = dataclasses.replace(
        cost, inputs=_elements(inputs) // seen.examples, outputs=_elements(outputs) // seen.examples
    )
    counted = _operations(layer, calls, seen.trained)
    if counted is None:
        return dataclasses.replace(cost, note=f"what {kind} computes isn't known")
    forward, backward, multiplied = counted
    from toolkit.parallel.layers.base import acts_elementwise

    division = _division(layer, inputs) if len(calls) == 1 else {"note": "it is called several times"}
    return dataclasses.replace(
        cost,
        forward=forward // seen.examples,
        backward=backward // seen.examples,
        multiply_adds=multiplied // seen.examples,
        elementwise="inputs" in division.get("splits", ()) and acts_elementwise(layer.activation),
        statistics=_statistics(layer),
        synchronized=getattr(layer, "synchronized", False),
        **(division if trained else {}),
    )


def _elements_of_weights(variables: Sequence) -> int:
    # A seed's counter isn't a weight.
    return sum(math.prod(each.shape) for each in variables if "seed" not in each.name)


def _bytes(dtype: str) -> int:
    import tensorflow as tf

    return tf.as_dtype(dtype).size


def _elements(tensors: Sequence) -> int:
    return sum(size_of(tensor) or 0 for tensor in tensors)


def _statistics(layer: Any) -> int:
    import keras

    if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
        return 2 * math.prod(layer.moving_mean.shape) + 1  # Sums, sums of squares, and their count.
    return 0


def _workspace(layer: Any) -> int:
    # XLA compiles grouped convolutions. On CPUs it expands their kernels to those of one group, forward and backward.
    groups = getattr(layer, "groups", 1)
    return 2 * math.prod(layer.kernel.shape) * groups * _bytes(layer.variable_dtype) if groups > 1 else 0


def _with_sources(found: Sequence[LayerCost], layers: Mapping[str, Any], seen: Trace) -> "list[LayerCost]":
    """Finds for each layer that can be split by inputs the layer that feeds it through elementwise operations."""
    dense = [cost for cost in found if cost.kind in ("Dense", "ShardedDense") and cost.splits]
    takers = {id(seen.calls(layers[cost.name])[0].inputs[0]): cost.name for cost in dense}
    sources = {}
    for cost in (each for each in dense if each.elementwise):
        tensor = seen.calls(layers[cost.name])[0].outputs[0]
        while id(tensor) not in takers:
            reader = seen.only_reader(tensor)
            if reader is None or not is_elementwise(reader) or len(reader.outputs) != 1:
                break
            tensor = reader.outputs[0]
        else:
            if seen.only_reader(tensor) is not None:
                sources[takers[id(tensor)]] = cost.name
    return [dataclasses.replace(cost, takes_split_from=sources.get(cost.name)) for cost in found]


def _division(layer: Any, inputs: Sequence) -> dict[str, Any]:
    """Returns what can be divided among replicas, or why nothing can."""
    import keras

    from toolkit.parallel.layers.kinds import plain_class

    if getattr(layer, "lora_rank", None) or getattr(layer, "quantization_mode", None):
        return {"note": "it is quantized, or has LoRA weights"}
    if getattr(layer, "groups", 1) > 1:
        return {"note": "its channels are in groups, which can't be split"}
    divide: Any = {
        keras.layers.Conv2D: lambda: {"splits": {"outputs": layer.filters}},
        keras.layers.Dense: lambda: {
            "splits": {"outputs": layer.units, "inputs": inputs[0].shape[-1]},
            "whole": layer.units if layer.use_bias else 0,
        },
        keras.layers.EinsumDense: lambda: _einsum_division(layer),
        keras.layers.Embedding: lambda: {"splits": {"columns": layer.output_dim, "rows": layer.input_dim}},
        keras.layers.GroupQueryAttention: lambda: _heads(layer, layer.num_key_value_heads),
        keras.layers.MultiHeadAttention: lambda: _heads(layer, layer.num_heads),
    }.get(plain_class(layer))
    return divide() if divide else {"note": f"{type(layer).__name__} can't be split"}


def _heads(layer: Any, heads: int) -> dict[str, Any]:
    bias = layer._output_dense.bias  # Keras has no public name for the output projection.
    return {"splits": {"heads": heads}, "whole": 0 if bias is None else math.prod(bias.shape)}


def _einsum_division(layer: Any) -> dict[str, Any]:
    from toolkit.parallel.layers.dense import equation_parts, split_letter

    weights = equation_parts(layer.equation)[1]
    letters = {split: split_letter(layer.equation, split) for split in ("outputs", "inputs")}
    sizes = {split: layer.kernel.shape[weights.index(letter)] for split, letter in letters.items() if letter}
    if not sizes:
        return {"note": f"{layer.equation!r} has no axis to split"}
    return {"splits": sizes, "whole": 0 if layer.bias is None else math.prod(layer.bias.shape)}


# TensorFlow's operations by type. Types that aren't listed here count one operation for each element of the result.

_MOVES = frozenset(
    """Assert BatchToSpaceND BroadcastTo Cast Concat ConcatV2 Const ExpandDims Fill Gather GatherNd GatherV2 Identity
    IdentityN MirrorPad NoOp OnesLike Pack Pad PadV2 Placeholder PreventGradient Range ReadVariableOp Reshape
    ResourceGather ReverseV2 Roll Shape ShapeN Size Rank Slice SpaceToBatchND Split SplitV Squeeze StopGradient
    StridedSlice Tile Transpose Unpack ZerosLike ResizeNearestNeighbor SpaceToDepth DepthToSpace""".split()  # noqa: SIM905
)
_HIDDEN = frozenset(
    """While StatelessWhile If StatelessIf Case StatelessCase PyFunc PyFuncStateless EagerPyFunc PartitionedCall
    StatefulPartitionedCall XlaLaunch MapDefun""".split()  # noqa: SIM905
)
_REDUCTIONS = frozenset(
    "Sum Mean Max Min Prod All Any ArgMax ArgMin EuclideanNorm L2Loss Cumsum Cumprod TopKV2".split()  # noqa: SIM905
)
_NORMALIZATIONS = {"FusedBatchNormV3": 8, "Softmax": 5, "LogSoftmax": 5}  # Operations per element.


def _operations(layer: Any, calls: Sequence[Call], trained: Container[int]) -> tuple[int, int, int] | None:
    """Returns operations forward and backward, and multiplications forward, for all examples; None if unknown.

    Args:
        layer: The layer that made them.
        calls: Its calls.
        trained: The ids of tensors that something trained was before.
    """
    if formula := _formula(layer):
        forward = sum(formula(layer, call.inputs, call.outputs) for call in calls)
        passes = any(id(tensor) in trained for call in calls for tensor in call.inputs)
        return forward, forward * (bool(layer.trainable_variables) + passes), forward // 2
    forward = backward = multiplied = 0
    for operation in (each for call in calls for each in call.operations):
        product = _PRODUCTS.get(operation.type)
        multiplications = product(operation, *operation.inputs) if product else 0
        found = 2 * multiplications if product else _simple(operation)
        if found is None:
            return None
        needed = sum(id(tensor) in trained for tensor in operation.inputs)
        forward += found
        backward += found * (needed if product else min(needed, 1))
        multiplied += multiplications
    return forward, backward, multiplied


def _contracted(operation: Any, *factors: Any) -> int:
    parts = operation.get_attr("equation").decode().split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for part, factor in zip(parts, factors, strict=True):
        before, _, after = part.partition("...")
        shape = factor.shape.as_list()
        middle = [f"-{n}" for n in range(len(shape) - len(before) - len(after), 0, -1)]
        sizes.update(zip([*before, *middle, *after], shape, strict=True))
    return math.prod(sizes.values())


def _result(operation: Any) -> int:
    return size_of(operation.outputs[0]) or 0


# Multiplications, from an operation and its inputs.
_PRODUCTS: dict[str, Callable] = {
    "MatMul": lambda op, x, _: _result(op) * x.shape[0 if op.get_attr("transpose_a") else 1],
    **dict.fromkeys(
        ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"),
        lambda op, x, _: _result(op) * x.shape[-2 if op.get_attr("adj_x") else -1],
    ),
    **dict.fromkeys(("Einsum", "XlaEinsum"), _contracted),
    **dict.fromkeys(("Conv2D", "Conv3D"), lambda op, _, kernel: _result(op) * math.prod(kernel.shape[:-1])),
    "DepthwiseConv2dNative": lambda op, _, kernel: _result(op) * math.prod(kernel.shape[:2]),
    # Transposed convolutions, forward.
    **dict.fromkeys(
        ("Conv2DBackpropInput", "Conv3DBackpropInputV2"),
        lambda _, __, kernel, x: (size_of(x) or 0) * math.prod(kernel.shape[:-1]),
    ),
}


def _simple(operation: Any) -> int | None:
    """Returns the operations of anything but a product; None if sizes aren't known."""
    kind = operation.type
    if kind in _HIDDEN:
        return None
    if kind in _MOVES or not any(tensor.dtype.is_floating for tensor in operation.outputs):
        return 0
    size = size_of(operation.outputs[0])
    if kind in _REDUCTIONS:
        return size_of(operation.inputs[0])
    if size is None:
        return None
    if kind in ("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D"):
        return size * math.prod(operation.get_attr("ksize"))
    return size * _NORMALIZATIONS.get(kind, 1)


# Formulas for what the graph doesn't show: loops over steps, and compiled or dilated convolutions. Each formula
# takes (layer, inputs, outputs) and counts for all examples.


def _convolved(layer: Any, _: Sequence, outputs: Sequence) -> int:
    channels = outputs[0].shape[-1 if layer.data_format == "channels_last" else 1]
    size = size_of(outputs[0]) or 0
    # The kernel is [*window, channels of a group, filters].
    return 2 * size // channels * math.prod(layer.kernel.shape) + (size if layer.use_bias else 0)


def _recurrent(gates: int) -> Callable:
    def counted(layer: Any, inputs: Sequence, _: Sequence) -> int:
        examples, steps, features = inputs[0].shape
        return 2 * examples * steps * gates * layer.units * (features + layer.units)

    return counted


_FORMULAS: dict[str, Callable] = {
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D"), _convolved),
    **{name: _recurrent(gates) for name, gates in (("SimpleRNN", 1), ("GRU", 3), ("LSTM", 4))},
}


# What a loop keeps of each step for its gradients, in elements per unit, measured (`benchmarks.predictions`).
_KEPT_OF_STEPS = {"SimpleRNN": 1, "GRU": 6, "LSTM": 7}


def _bytes_in_loops(layer: Any, call: Call) -> int:
    """Returns the bytes that a recurrent layer's loop over steps keeps from the forward to the backward pass."""
    return sum(
        _KEPT_OF_STEPS[each.__class__.__name__] * math.prod(call.inputs[0].shape[:2]) * each.units * 4
        for each in _ways(layer)
        if each.__class__.__name__ in _KEPT_OF_STEPS
    )


def _ways(layer: Any) -> list:
    """Returns a Keras layer, or the two of a bidirectional one; None for a user's class."""
    kind = type(layer)
    if not kind.__module__.startswith("keras."):  # A user's class of that name may compute anything.
        return []
    return [layer.forward_layer, layer.backward_layer] if kind.__name__ == "Bidirectional" else [layer]


def _formula(layer: Any) -> Callable | None:
    ways = [(each, _FORMULAS.get(type(each).__name__)) for each in _ways(layer)]
    if not ways or any(formula is None for _, formula in ways):
        return None
    return lambda _, inputs, outputs: sum(formula(each, inputs, outputs) for each, formula in ways if formula)


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


def _footprints(seen: Trace) -> dict[int, Footprint]:
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
            size = _bytes_of(tensor, seen.examples)
            beside += size
            if reads[id(tensor)] and memory.get(id(tensor)) is tensor:
                alive[id(tensor)] = size, place
                held += size
        if operation.type == "MaxPoolGrad":
            beside = max(beside, _ARGUMENTS_OF_POOL * _bytes_of(operation.inputs[1], seen.examples))
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


def _bytes_of(tensor: Any, examples: int) -> float:
    size = size_of(tensor)
    if not size or size % examples or tensor.dtype.name in ("resource", "variant", "string"):
        return 0.0
    return size * tensor.dtype.size / examples


_SIDE = 256  # The size of a test weight: some optimizers keep rows and columns only for large weights.


def slots_of(compiled: Any) -> int:
    """Returns how many elements an optimizer keeps for each element of a weight: momentum 1, Adam 2.

    Args:
        compiled: A compiled Keras model, or an optimizer; of a model that isn't compiled, 1.
    """
    import keras
    import numpy as np

    optimizer = compiled if isinstance(compiled, keras.optimizers.Optimizer) else getattr(compiled, "optimizer", None)
    if optimizer is None:
        return 1
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # The optimizer inside one that scales losses.
    tried = type(optimizer).from_config(optimizer.get_config())
    tried.build([keras.Variable(np.zeros((_SIDE, _SIDE), "float32"))])
    return round(sum(np.prod(variable.shape) for variable in tried.variables) / _SIDE**2)
