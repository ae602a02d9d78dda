"""The cost of each layer of a model: operations, weights, activations. Nothing is computed for it.

A multiplication and an addition are two operations. They are counted in TensorFlow's graph of one call of the model, so
that one's own layers count as Keras's do; what can't be seen there is said. Backward, a product is computed again
for each of its factors that needs a gradient, and what is elementwise once. `tests/parallel/test_count.py` holds the
counts against TensorFlow's profiler.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.parallel.plan.footprint import footprints
from toolkit.parallel.plan.operations import bytes_in_loops, count
from toolkit.parallel.plan.trace import Trace, size_of, trace
from toolkit.support.graphs import is_elementwise

if TYPE_CHECKING:
    import keras

__all__ = ["LayerCost", "costs", "costs_seen"]


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
        statistics: Elements that it sums over replicas, forward and again backward.
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
    taken = footprints(seen)
    for name, layer in seen.layers:
        kept, inside, passed, working = taken[id(layer)]
        loops = sum(bytes_in_loops(layer, call) for call in seen.calls(layer)) / seen.examples
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
    counted = count(layer, calls, seen.trained)
    if counted is None:
        return dataclasses.replace(cost, note=f"what {kind} computes isn't known")
    forward, backward, multiplied = counted
    from toolkit.parallel.layers.activations import acts_elementwise

    division = _division(layer, inputs) if len(calls) == 1 else {"note": "it is called several times"}
    return dataclasses.replace(
        cost,
        forward=forward // seen.examples,
        backward=backward // seen.examples,
        multiply_adds=multiplied // seen.examples,
        elementwise="inputs" in division.get("splits", ()) and acts_elementwise(layer.activation),
        statistics=_statistics(layer),
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
    if type(layer).__name__ == "BatchNormalization" and getattr(layer, "synchronized", False):
        return 2 * math.prod(layer.moving_mean.shape) + 1  # Sums, sums of squares, and their counts.
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
