"""Finds the layers within a Keras model, and copies a model with some layers replaced."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from toolkit.errors import ModelError
from toolkit.strategies.upstream import private
from toolkit.strategies.upstream.attributes import layers_just_below

if TYPE_CHECKING:
    import keras


def is_graph(model: Any) -> bool:
    """Returns whether a model's graph of layers can be read: functional and Sequential models have one."""
    import keras

    return isinstance(model, (keras.Sequential, private.functional.Functional))


def layers_of(model: "keras.Model", prefix: str = "") -> "Iterator[tuple[str, keras.layers.Layer]]":
    """Yields (name, layer) of a functional or Sequential model, in order; "head/fc1" is in a model within."""
    import keras

    for layer in model.layers:
        if is_graph(layer):
            yield from layers_of(layer, f"{prefix}{layer.name}/")
        elif not isinstance(layer, keras.layers.InputLayer):
            yield prefix + layer.name, layer


def copy_model(model: "keras.Model", function: Callable[[Any], Any]) -> "keras.Model":
    """Returns a copy of a model with layers that a function makes from its own, and with the same weights.

    Args:
        model: A built model. Where its layers are joined by its own code, the function is given the model itself.
        function: Returns a layer with the same weights' shapes for each layer.

    Raises:
        ModelError: A layer can't be made.
    """
    import keras

    # A user's class may inherit from functional models and still be built from its own configuration.
    ways = (keras.Sequential, private.functional.Functional)
    cloned = is_graph(model) and any(type(model).get_config is way.get_config for way in ways)
    try:
        copy = keras.models.clone_model(model, clone_function=function, recursive=True) if cloned else function(model)
        if not cloned and not copy.built:
            copy.build_from_config(model.get_build_config())
        copy.set_weights([keras.ops.convert_to_numpy(weight) for weight in model.weights])
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ModelError(
            asked=f"model {model.name!r} is to be copied with other layers",
            found=f"Keras can't make a layer from its configuration: {str(error).splitlines()[0]}",
            remedy="Make the layer's get_config() return what its constructor takes",
        ) from error
    for layer in sublayers(copy):
        if isinstance(layer, keras.layers.Normalization) and layer.input_mean is None:
            # A Normalization layer computes with values derived from its weights, which neither clone_model nor
            # set_weights copies.
            layer.finalize_state()
    return copy


def is_whole(layer: Any) -> bool:
    """Returns whether a layer is treated as a whole: Keras's own layers are, and this toolkit's."""
    import keras

    return not isinstance(layer, keras.Model) and type(layer).__module__.startswith(("keras.", "toolkit.parallel."))


def sublayers(layer: Any) -> list:
    """Returns a layer and the layers within it, each once, in an order that depends only on their construction.

    Those within layers that are taken whole aren't there.
    """
    import keras

    found: dict[int, Any] = {}

    def add(each: Any) -> None:
        if id(each) in found or isinstance(each, keras.layers.InputLayer):
            return
        found[id(each)] = each
        if is_whole(each):
            return
        # Keras has no public list of the layers in a layer that isn't a model.
        inner = each.layers if isinstance(each, keras.Model) else layers_just_below(each)
        for below in inner:
            add(below)

    add(layer)
    return list(found.values())
