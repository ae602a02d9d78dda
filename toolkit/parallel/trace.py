"""What the layers of a model do, seen in one call of it: of any Keras model, however its layers are joined.

The model is called once on symbolic tensors. TensorFlow's graph of that call has every operation with the shapes of its
tensors, in the order in which they were made; each operation belongs to the layer that was being called.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.errors import ModelError
from toolkit.parallel.graph import is_graph, is_whole
from toolkit.support.scopes import outside

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

__all__ = ["Call", "Trace", "size_of", "trace"]

_EXAMPLES = 2  # Of the call: what depends on no example is counted once for each two.


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
        """The tensors that it was given, each once."""
        return list({id(tensor): tensor for tensor in _tensors(self.given)}.values())


class Trace:
    """The layers of a model in the order of their first calls, and what each did.

    Layers of Keras's own are taken whole, with what is in them; models and layers of one's own are taken apart.

    Attributes:
        layers: (name, layer) of each; "head/fc1" is within "head". The model itself has its own name, and is there as
            far as it computes something by itself.
        examples: How many the call had.
        trained: Tensors that something trained was before, whose gradients are computed.
    """

    def __init__(self, model: "keras.Model", graph: "tf.Graph", root: "_Level", *, examples: int) -> None:
        self.examples = examples
        self.layers = tuple(_named(model, root))
        self._calls = {id(level.layer): level.calls for level in root.all()}
        self._within = {id(level.layer): list(level.inner.values()) for level in root.all()}
        self.trained = _trained(model, graph)
        self._readers: dict[int, list] = {}
        for operation in graph.get_operations():
            for tensor in operation.inputs:
                self._readers.setdefault(id(tensor), []).append(operation)
        self._returned = {id(tensor) for tensor in root.calls[0].outputs}

    def calls(self, layer: Any) -> list[Call]:
        """Returns the calls of a layer."""
        return self._calls[id(layer)]

    def weights(self, layer: Any) -> tuple[list, list]:
        """Returns a layer's trained weights and its others, without those of layers that are named for themselves."""
        theirs = {id(weight) for level in self._within[id(layer)] for weight in level.layer.variables}
        return tuple(  # type: ignore[return-value]
            [weight for weight in weights if id(weight) not in theirs]
            for weights in (layer.trainable_variables, layer.non_trainable_variables)
        )

    def is_divided(self, layer: Any) -> bool:
        """Says whether layers within a layer are there for themselves."""
        return bool(self._within[id(layer)])

    def only_reader(self, tensor: "tf.Tensor") -> "tf.Operation | None":
        """Returns the operation that reads a tensor; None if several do, or the model returns it."""
        readers = self._readers.get(id(tensor), [])
        return readers[0] if len(readers) == 1 and id(tensor) not in self._returned else None


class _Level:
    """A layer that is called, and the layers that it calls."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.calls: list[Call] = []
        self.inner: dict[int, _Level] = {}

    def all(self) -> "Iterator[_Level]":
        yield self
        for level in self.inner.values():
            yield from level.all()


def trace(model: "keras.Model", *, length: int | None = None) -> Trace:
    """Calls a model on symbolic tensors.

    Args:
        model: A built model of any kind.
        length: What dimensions count that the model leaves open, beside that of examples, such as a sequence's steps.

    Raises:
        ModelError: It isn't a Keras model, isn't built, or can't be called.
    """
    import keras
    import tensorflow as tf

    _check(model)
    recorder = _Recorder(model, keras.layers.Layer.__call__)

    def traced() -> Any:
        specs, arguments = _specs(model, length)

        @tf.function(autograph=False)
        def called(*tensors: Any) -> Any:
            args, kwargs = arguments(list(tensors))
            return model(*args, **kwargs, training=True)

        keras.layers.Layer.__call__ = lambda layer, *args, **kwargs: recorder.call(layer, args, kwargs)
        try:
            # Nothing of the model may change: neither its variables nor the losses that its layers keep of a call.
            with keras.StatelessScope(collect_losses=True, initialize_variables=False):
                return called.get_concrete_function(*specs).graph, specs[0].shape[0]
        finally:
            keras.layers.Layer.__call__ = recorder.original

    try:
        graph, examples = outside(traced)
    except Exception as error:  # Whatever a model of somebody's raises.
        raise ModelError(
            asked=f"model {model.name!r} is to be planned, for which it is called on symbolic tensors",
            found=f"that fails: {_first_line(error)}",
            remedy="Have it take tensors of the shapes that it was built with",
        ) from error
    return Trace(model, graph, recorder.root, examples=examples)


class _Recorder:
    """Takes the place of Keras's way to call a layer, while a model is traced."""

    def __init__(self, model: Any, original: Callable) -> None:
        self.original = original
        self.root = _Level(model)
        self._levels = {id(model): self.root}
        self._open: list[_Level] = []
        self._made: dict[int, int] = {}  # By graph, how many operations have been given to layers.

    def call(self, layer: Any, args: Sequence, kwargs: Mapping) -> Any:
        import keras
        import tensorflow as tf

        whole = self._open and is_whole(self._open[-1].layer)
        if whole or tf.executing_eagerly() or isinstance(layer, keras.layers.InputLayer):
            return self.original(layer, *args, **kwargs)
        if id(layer) not in self._levels:
            self._levels[id(layer)] = self._open[-1].inner[id(layer)] = _Level(layer)
        level = self._levels[id(layer)]
        self._share_out()
        level.calls.append(Call((args, kwargs)))
        self._open.append(level)
        try:
            result = self.original(layer, *args, **kwargs)
            self._share_out()
        finally:
            self._open.pop()
        level.calls[-1].outputs = _tensors(result)
        return result

    def _share_out(self) -> None:
        """Gives the layer that is being called what was made since this was asked last."""
        import tensorflow as tf

        graph = tf.compat.v1.get_default_graph()
        operations = graph.get_operations()
        if self._open:
            self._open[-1].calls[-1].operations += operations[self._made.get(id(graph), 0) :]
        self._made[id(graph)] = len(operations)


def _first_line(error: Exception) -> str:
    """Returns what an error says, without the line in which Keras says where, and without its colours."""
    lines = [re.sub(r"\x1b\[\d+m", "", line).strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith("Exception encountered when calling")]
    return said[0].rstrip(".") if said else type(error).__name__


def _check(model: Any) -> None:
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


def _specs(model: Any, length: int | None) -> tuple[list, Callable[[list], tuple]]:
    """Returns the shapes and dtypes that a model takes, flat, and what makes (args, kwargs) of tensors like them."""
    import keras
    import tensorflow as tf

    def spec(shape: Sequence, dtype: str) -> Any:
        fixed = is_graph(model) and shape[0] is not None
        sizes = [length if size is None else size for size in shape[1:]]
        return tf.TensorSpec([shape[0] if fixed else _EXAMPLES, *sizes], dtype)

    if is_graph(model):
        inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        flat = keras.tree.flatten(inputs)
        specs = [spec(each.shape, each.dtype) for each in flat]
        return specs, lambda tensors: ([keras.tree.pack_sequence_as(inputs, tensors)], {})
    config = model.get_build_config() or {}
    named = {name.removesuffix("_shape"): shape for name, shape in config.get("shapes_dict", {}).items()}
    shapes = named or config.get("input_shape")
    if shapes is None:
        raise ValueError("it doesn't say with what shapes it was built")
    # Numbers of words come as floats here, too, which Keras's layers take.
    dtype = keras.config.floatx()
    if named:
        return [spec(shape, dtype) for shape in named.values()], lambda tensors: (
            [],
            dict(zip(named, tensors, strict=True)),
        )
    if isinstance(shapes, dict):
        return [spec(shape, dtype) for shape in shapes.values()], lambda tensors: (
            [dict(zip(shapes, tensors, strict=True))],
            {},
        )
    if isinstance(shapes[0], (list, tuple)):
        return [spec(shape, dtype) for shape in shapes], lambda tensors: ([list(tensors)], {})
    return [spec(shapes, dtype)], lambda tensors: (tensors, {})


def _tensors(value: Any) -> list:
    import keras
    import tensorflow as tf

    return [each for each in keras.tree.flatten(value) if isinstance(each, tf.Tensor)]


def _named(model: Any, root: _Level) -> Iterator[tuple[str, Any]]:
    """Yields layers with the names of those that they are in before their own; two alike get numbers."""
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


def _trained(model: Any, graph: Any) -> set[int]:
    """Returns the ids of tensors that are computed from something trained, by what a gradient goes through."""
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
    """Returns how many elements a tensor has; None where that isn't known before it is computed."""
    return math.prod(tensor.shape) if tensor.shape.is_fully_defined() else None
