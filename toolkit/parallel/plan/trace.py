"""Observes the layers of any Keras model in one call of it, however they are connected.

The model is called once on symbolic tensors, of the shapes and dtypes that it takes. TensorFlow's graph of that call
has every operation with the shapes of its tensors, in the order in which they were made; each operation belongs to the
layer that was being called.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.errors import ModelError
from toolkit.parallel.graph import is_graph, is_whole
from toolkit.strategies.context import this_step
from toolkit.strategies.upstream import replaced
from toolkit.support.graphs import computed_from, outside

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


_BACKWARD = "backward"  # The name scope of gradients.
_EXAMPLES = 251  # The number of examples of the call: a prime, which shows whether a tensor's size depends on it.


@dataclasses.dataclass
class Call:
    """A call of a layer.

    Attributes:
        given: The arguments and the keyword arguments that it was called with.
        outputs: The tensors that it returned.
        operations: Those that it made itself, not by layers within.
    """

    given: tuple[Sequence, Mapping]
    outputs: "list[tf.Tensor]" = dataclasses.field(default_factory=list)
    operations: "list[tf.Operation]" = dataclasses.field(default_factory=list)

    @property
    def inputs(self) -> "list[tf.Tensor]":
        """Its input tensors, each once."""
        return list({id(tensor): tensor for tensor in _tensors(self.given)}.values())


class Trace:
    """A model's layers in the order of their first calls, and what each did.

    Layers of Keras's own are taken whole, with what is in them; models and one's own layers are taken apart.

    Attributes:
        layers: (name, layer) of each; "head/fc1" is within "head". The model itself has its own name, and is there as
            far as it computes something by itself.
        examples: How many the call had.
        blocks: For each, by its id, the name of the outermost layer that it is in, models aside, or its own.
        returned: The ids of the tensors that the model returns.
        trained: Tensors that something trained was before, whose gradients are computed.
        operations: What the results are computed by, and gradients if these were asked for.
        forward: How many of them are of the call.
    """

    def __init__(self, model: "keras.Model", graph: "tf.Graph", root: "_Level", *, examples: int, forward: int) -> None:
        self.examples = examples
        needed = {id(each) for each in computed_from([tensor.op for tensor in graph.outputs])}
        self.operations = [each for each in graph.get_operations() if id(each) in needed]
        self.forward = sum(id(each) in needed for each in graph.get_operations()[:forward])
        self._root = root
        self.layers = tuple(_named(model, root))
        self.blocks = _blocks(self.layers)
        self._calls = {id(level.layer): level.calls for level in root.all()}
        self._within = {id(level.layer): list(level.inner.values()) for level in root.all()}
        self.trained = _trained(model, graph)
        self._readers: dict[int, list] = {}
        for operation in graph.get_operations()[:forward]:
            for tensor in operation.inputs:
                self._readers.setdefault(id(tensor), []).append(operation)
        self.returned = {id(tensor) for tensor in root.calls[0].outputs}

    def calls(self, layer: Any) -> list[Call]:
        """Returns the calls of a layer."""
        return self._calls[id(layer)]

    def weights(self, layer: Any) -> tuple[list, list]:
        """Returns a layer's trainable weights and its others, without those of layers that are listed themselves."""
        theirs = {id(weight) for level in self._within[id(layer)] for weight in level.layer.variables}
        return tuple(  # type: ignore[return-value]
            [weight for weight in weights if id(weight) not in theirs]
            for weights in (layer.trainable_variables, layer.non_trainable_variables)
        )

    def is_divided(self, layer: Any) -> bool:
        """Returns whether layers within a layer are listed themselves."""
        return bool(self._within[id(layer)])

    def owners(self) -> dict[str, int]:
        """Returns each operation's layer, by the operation's name; gradients belong to the layer of their operation."""
        found = {
            operation.name: id(level.layer)
            for level in self._root.all()
            for call in level.calls
            for operation in call.operations
        }
        for operation in self.operations[self.forward :]:
            of = operation.name.removeprefix(f"{_BACKWARD}/").rpartition("_grad/")[0]
            if of in found:
                found[operation.name] = found[of]
        return found

    def only_reader(self, tensor: "tf.Tensor") -> "tf.Operation | None":
        """Returns the operation that reads a tensor; None if several do, or the model returns it."""
        readers = self._readers.get(id(tensor), [])
        return readers[0] if len(readers) == 1 and id(tensor) not in self.returned else None


class _Level:
    """A layer that is being called, and the layers that it calls."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.calls: list[Call] = []
        self.inner: dict[int, _Level] = {}

    def all(self) -> "Iterator[_Level]":
        yield self
        for level in self.inner.values():
            yield from level.all()


def trace(model: "keras.Model", *, length: int | None = None, backward: bool = False) -> Trace:
    """Calls a model on symbolic tensors.

    Args:
        model: A built model of any kind.
        length: What dimensions count that the model leaves open, beside that of examples, such as a sequence's steps.
        backward: Whether the gradients of its weights are made too.

    Raises:
        ModelError: It isn't a Keras model, isn't built, or can't be called.
    """
    import keras
    import tensorflow as tf

    _check(model)
    replaced.LAYER.answer(plan=_recorded)
    recorder = _Recorder(model)
    counted: list[int] = []

    def traced() -> Any:
        specs, arguments = _specs_of(model, length, examples=_EXAMPLES)

        @tf.function(autograph=False)
        def called(*tensors: Any) -> Any:
            args, kwargs = arguments(list(tensors))
            result = model(*args, **kwargs, training=True)
            counted.append(len(tf.compat.v1.get_default_graph().get_operations()))
            return result, _gradients(model, _tensors(result)) if backward else []

        # The model must not change: neither its variables nor the losses that layers record.
        unchanged = keras.StatelessScope(collect_losses=True, initialize_variables=False)
        with this_step.having(planned=recorder), unchanged:
            return called.get_concrete_function(*specs).graph, specs[0].shape[0]

    try:
        graph, examples = outside(traced)
    except Exception as error:  # A user's model may raise anything.
        raise ModelError(
            asked=f"a plan calls model {model.name!r} on symbolic tensors",
            found=f"the call fails: {_first_line(error)}",
            remedy="Make the model accept tensors of the shapes that it was built with",
        ) from error
    return Trace(model, graph, recorder.root, examples=examples, forward=counted[-1])


def _gradients(model: Any, results: list) -> list:
    """Returns the gradients of a model for a loss like a cross entropy of all outputs."""
    import tensorflow as tf

    trained = {id(handle) for weight in model.trainable_variables for handle in _handles(weight.value)}
    weights = [inner for outer, inner in tf.compat.v1.get_default_graph().captures if id(outer) in trained]
    losses = [tf.nn.log_softmax(tf.cast(each, tf.float32)) for each in results if each.dtype.is_floating]
    return [each for each in tf.gradients(losses, weights, name=_BACKWARD) if each is not None]


def _recorded(original: Callable, layer: Any, *args: Any, **kwargs: Any) -> Any:
    return this_step.planned.call(original, layer, args, kwargs)


class _Recorder:
    """Records how layers are called while a model is traced."""

    def __init__(self, model: Any) -> None:
        self.root = _Level(model)
        self._levels = {id(model): self.root}
        self._open: list[_Level] = []
        self._made: dict[int, int] = {}  # For each graph, how many operations have been assigned to layers.

    def call(self, original: Callable, layer: Any, args: Sequence, kwargs: Mapping) -> Any:
        import keras
        import tensorflow as tf

        whole = self._open and is_whole(self._open[-1].layer)
        if whole or tf.executing_eagerly() or isinstance(layer, keras.layers.InputLayer):
            return original(layer, *args, **kwargs)
        if id(layer) not in self._levels:
            self._levels[id(layer)] = self._open[-1].inner[id(layer)] = _Level(layer)
        level = self._levels[id(layer)]
        self._share_out()
        level.calls.append(Call((args, kwargs)))
        self._open.append(level)
        try:
            result = original(layer, *args, **kwargs)
            self._share_out()
        finally:
            self._open.pop()
        level.calls[-1].outputs = _tensors(result)
        return result

    def _share_out(self) -> None:
        """Assigns the operations made since the last call to the layer that is being called."""
        import tensorflow as tf

        graph = tf.compat.v1.get_default_graph()
        operations = graph.get_operations()
        if self._open:
            self._open[-1].calls[-1].operations += operations[self._made.get(id(graph), 0) :]
        self._made[id(graph)] = len(operations)


def _first_line(error: Exception) -> str:
    """Returns an error's message without the line in which Keras gives the place, and without colours."""
    lines = [re.sub(r"\x1b\[\d+m", "", line).strip() for line in str(error).splitlines()]
    reasons = [line for line in lines if line and not line.startswith("Exception encountered when calling")]
    return reasons[0].rstrip(".") if reasons else type(error).__name__


def _tensors(value: Any) -> list:
    import keras
    import tensorflow as tf

    return [each for each in keras.tree.flatten(value) if isinstance(each, tf.Tensor)]


def _named(model: Any, root: _Level) -> Iterator[tuple[str, Any]]:
    """Yields layers with names that begin with those of the outer layers; equal names get numbers."""
    seen: set[str] = set()

    def below(level: _Level, prefix: str) -> Iterator[tuple[str, Any]]:
        for inner in level.inner.values():
            name, number = prefix + inner.layer.name, 1
            while name in seen:
                number += 1
                name = f"{prefix}{inner.layer.name}_{number}"
            seen.add(name)
            yield name, inner.layer
            yield from below(inner, f"{name}/")

    yield from below(root, "")
    yield model.name, model


def _blocks(layers: Sequence[tuple[str, Any]]) -> dict[int, str]:
    import keras

    whole = {name for name, layer in layers if not isinstance(layer, keras.Model)}
    found = {}
    for name, layer in layers:
        parts = name.split("/")
        above = ("/".join(parts[: number + 1]) for number in range(len(parts)))
        found[id(layer)] = next((each for each in above if each in whole), "")
    return found


def _trained(model: Any, graph: Any) -> set[int]:
    """Returns the ids of tensors through which gradients of trained weights flow."""
    frozen = {id(handle) for weight in model.non_trainable_variables for handle in _handles(weight.value)}
    fixed = {id(inner) for outer, inner in graph.captures if id(outer) in frozen}
    found: set[int] = set()
    for operation in graph.get_operations():
        if operation.type == "StopGradient":
            continue
        reads = operation.type == "ReadVariableOp" and id(operation.inputs[0]) not in fixed
        gathers = operation.type == "ResourceGather" and id(operation.inputs[0]) not in fixed
        if reads or gathers or any(id(tensor) in found for tensor in operation.inputs):
            found.update(id(tensor) for tensor in operation.outputs if tensor.dtype.is_floating)
    return found


def _handles(value: Any) -> list:
    return [each.handle for each in getattr(value, "values", [value]) if hasattr(each, "handle")]


def size_of(tensor: Any) -> int | None:
    """Returns the number of elements of a tensor; None if it isn't known before it is computed."""
    return math.prod(tensor.shape) if tensor.shape.is_fully_defined() else None


def _check(model: Any) -> None:
    """Raises ModelError unless this is a built Keras model."""
    import keras

    if not isinstance(model, keras.Model):
        raise ModelError(
            asked="a plan is made for a Keras model",
            found=f"this is a {type(model).__name__}",
            remedy="Give a keras.Model",
        )
    if not model.built:
        raise ModelError(
            asked=f"model {model.name!r} is to be planned",
            found="it isn't built, so its layers have no shapes yet",
            remedy="Begin it with keras.Input(shape), call model.build(shape), or call it once on a batch",
        )


def _specs_of(model: Any, length: int | None, *, examples: int) -> tuple[list, Callable[[list], tuple]]:
    """Returns a model's input shapes and dtypes as a flat list, and a function that makes (args, kwargs) of tensors."""
    import keras
    import tensorflow as tf

    def spec(shape: Sequence, dtype: str) -> Any:
        fixed = is_graph(model) and shape[0] is not None
        sizes = [length if size is None else size for size in shape[1:]]
        return tf.TensorSpec([shape[0] if fixed else examples, *sizes], dtype)

    named = {}
    if is_graph(model):
        inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        specs = keras.tree.map_structure(lambda tensor: spec(tensor.shape, tensor.dtype), inputs)
    else:
        config = model.get_build_config() or {}
        named = {name.removesuffix("_shape"): shape for name, shape in config.get("shapes_dict", {}).items()}
        shapes = named or config.get("input_shape")
        if shapes is None:
            raise ValueError("it doesn't say with what shapes it was built")
        # Indices of words may arrive as floats, which Keras's layers accept.
        dtype = keras.config.floatx()
        if isinstance(shapes, dict):
            specs = {name: spec(shape, dtype) for name, shape in shapes.items()}
        elif isinstance(shapes[0], (list, tuple)):
            specs = [spec(shape, dtype) for shape in shapes]
        else:
            specs = spec(shapes, dtype)

    def arguments(tensors: list) -> tuple:
        given = keras.tree.pack_sequence_as(specs, tensors)
        return ([], given) if named else ([given], {})

    return keras.tree.flatten(specs), arguments
