"""A Keras model as a graph of layers: taken apart, also the models within it, and copied with other layers.

Only functional and Sequential models can be read so: in others, how layers are joined stands in Python.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from toolkit.errors import ModelError

if TYPE_CHECKING:
    import keras

__all__ = ["Graph", "copy_model", "is_graph", "layers_of"]


def is_graph(model: Any) -> bool:
    """Says whether a model's layers are joined where that can be read: functional and Sequential ones."""
    import keras
    from keras.src.models import Functional  # Public as what keras.Model(inputs, outputs) returns only.

    return isinstance(model, (keras.Sequential, Functional))


def layers_of(model: "keras.Model", prefix: str = "") -> "Iterator[tuple[str, keras.layers.Layer]]":
    """Yields (name, layer) of a functional or Sequential model, in order; "head/fc1" is one of a model within."""
    import keras

    for layer in model.layers:
        if is_graph(layer):
            yield from layers_of(layer, f"{prefix}{layer.name}/")
        elif not isinstance(layer, keras.layers.InputLayer):
            yield prefix + layer.name, layer


class Graph:
    """The symbolic tensors that go into each layer of a model and come out of it.

    A tensor at the edge of a model within is the same as the one outside: one object stands for both.

    Args:
        model: A built functional or Sequential model.

    Attributes:
        layers: (name, layer) as `layers_of` yields them.

    Raises:
        ModelError: The model isn't built, or its layers aren't joined in a way that can be read.
    """

    def __init__(self, model: Any) -> None:
        _check(model)
        self.layers = tuple(layers_of(model))
        self._model = model
        self._same = dict(_edges(model))
        self._called_again = _called_again(model)

    def inputs(self, layer: Any) -> list:
        """Returns the tensors that go into a layer; none where the model calls it several times."""
        return [] if id(layer) in self._called_again else self._tensors(_read(layer, "input"))

    def outputs(self, layer: Any) -> list:
        """Returns the tensors that come out of a layer; none where Keras doesn't know which, after several calls."""
        return self._tensors(_read(layer, "output"))

    def single_readers(self) -> dict[str, str]:
        """Returns, by a layer's name, the layer whose output is its only input, and which nothing else reads."""
        makers = {id(tensor): name for name, layer in self.layers for tensor in self.outputs(layer)}
        inputs = {name: self._tensors(_read(layer, "input")) for name, layer in self.layers}
        read = [*inputs.values(), self._tensors(self._model.outputs)]
        readers = Counter(id(tensor) for tensors in read for tensor in tensors)
        return {
            name: makers[id(tensors[0])]
            for name, tensors in inputs.items()
            if len(tensors) == 1 and id(tensors[0]) in makers and readers[id(tensors[0])] == 1
        }

    def _tensors(self, value: Any) -> list:
        return [self._outermost(tensor) for tensor in _flat(value)]

    def _outermost(self, tensor: Any) -> Any:
        while id(tensor) in self._same and self._same[id(tensor)] is not tensor:
            tensor = self._same[id(tensor)]
        return tensor


def _check(model: Any) -> None:
    import keras

    if not isinstance(model, keras.Model):
        raise ModelError(
            asked="a plan is made for a Keras model",
            found=f"this is a {type(model).__name__}",
            remedy="Give a keras.Model, functional or Sequential",
        )
    if not model.built:
        raise ModelError(
            asked=f"model {model.name!r} is to be planned",
            found="it isn't built, so its layers have no shapes yet",
            remedy="Begin it with keras.Input(shape), or call model.build(shape)",
        )
    if not is_graph(model):
        raise ModelError(
            asked=f"model {model.name!r} is to be planned",
            found=f"it is of class {type(model).__name__}, and how its layers are joined stands in its code only",
            remedy="Make it a functional or Sequential model, or use ShardedDense in it by hand",
        )


def _edges(model: Any) -> Iterator[tuple[int, Any]]:
    """Yields the id of a tensor at the edge of a model within, and the one outside that it is."""
    for layer in model.layers:
        if is_graph(layer):
            for inner, outer in zip(layer.inputs, _flat(_read(layer, "input")), strict=False):
                yield id(inner), outer
            for inner, outer in zip(layer.outputs, _flat(_read(layer, "output")), strict=False):
                yield id(outer), inner
            yield from _edges(layer)


def _read(layer: Any, what: str) -> Any:
    try:
        return getattr(layer, what)
    except (AttributeError, ValueError):  # It was called several times, or never.
        return ()


def _flat(value: Any) -> list:
    import keras

    return [tensor for tensor in keras.tree.flatten(value) if hasattr(tensor, "shape")]


def _called_again(model: Any) -> set[int]:
    """Returns the ids of layers that the model calls several times, also in models within it."""
    # Keras's nodes are not public. tests/parallel/test_cost.py fails when they change.
    calls = Counter(id(node.operation) for nodes in getattr(model, "_nodes_by_depth", {}).values() for node in nodes)
    found = {layer for layer, count in calls.items() if count > 1}
    for layer in model.layers:
        if is_graph(layer):
            found |= _called_again(layer) if id(layer) not in found else {id(inner) for _, inner in layers_of(layer)}
    return found


def copy_model(model: "keras.Model", function: Callable[[Any], Any]) -> "keras.Model":
    """Returns a copy of a model with the layers that a function makes from its own, and the same weights.

    Args:
        model: A functional or Sequential model.
        function: Returns a layer with the same weights' shapes for each layer.

    Raises:
        ModelError: A layer can't be made.
    """
    import keras

    try:
        copy = keras.models.clone_model(model, clone_function=function, recursive=True)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ModelError(
            asked=f"model {model.name!r} is to be copied with other layers",
            found=f"a layer can't be made from its configuration: {str(error).splitlines()[0]}",
            remedy="Give the layer a get_config() that its constructor takes",
        ) from error
    copy.set_weights([keras.ops.convert_to_numpy(weight) for weight in model.weights])
    for _, layer in layers_of(copy):
        if isinstance(layer, keras.layers.Normalization) and layer.input_mean is None:
            # A Normalization layer computes with what it has made of its weights, which neither clone_model nor
            # set_weights takes over.
            layer.finalize_state()
    return copy
