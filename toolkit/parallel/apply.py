"""A plan put on a model, and the whole weights as a plain Keras model again."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from toolkit.errors import ModelError
from toolkit.parallel.cost import costs, leaves
from toolkit.parallel.plan import Plan

if TYPE_CHECKING:
    import keras

__all__ = ["alike", "copied", "parallelize", "plain"]

_OURS = ("split", "keep_split", "exchange_dtype")


def parallelize(model: "keras.Model", plan: Plan, *, exchange_dtype: str | None = None) -> "keras.Model":
    """Returns a model with sharded layers where the plan says so, and the same weights.

    Call it under the strategy's scope, then compile what it returns: losses, optimizer and metrics are not taken
    over. Layers that the plan replicates are made anew too, from their configuration.

    Args:
        model: A functional or Sequential model, built under any strategy or none. It stays as it is.
        plan: Made of this model, or of one with the same layers.
        exchange_dtype: "float16" or "bfloat16" for activations to travel so; None for as they are.

    Raises:
        ModelError: The plan is another model's, or the model can't be copied.
    """
    costs(model)  # Refuses what can't be taken apart.
    names = {name for name, _ in leaves(model)}
    if strange := [name for name in plan.choices if name not in names]:
        raise ModelError(
            asked=f"a plan is to be put on model {model.name!r}",
            found=f"the plan has a layer {strange[0]!r} and the model hasn't",
            remedy="Make the plan of this model",
        )
    sharded = {
        id(layer): plan.choices[name]
        for name, layer in leaves(model)
        if name in plan.choices and plan.choices[name].split is not None
    }

    def replaced(layer: Any) -> Any:
        from toolkit.parallel.layers import ShardedConv2D, ShardedDense

        choice = sharded.get(id(layer))
        if choice is None:
            return alike(layer)
        config = {**_config(layer), "exchange_dtype": exchange_dtype}
        if "filters" in config:
            return ShardedConv2D.from_config(config)
        return ShardedDense.from_config({**config, "split": choice.split, "keep_split": choice.keep_split})

    return copied(model, replaced)


def plain(model: "keras.Model") -> "keras.Model":
    """Returns a model of Keras's own layers with the whole weights, to be saved or used without this toolkit.

    Call it outside of the strategy's scope; under several processes in all of them, because weights are gathered.
    It is not compiled.

    Args:
        model: A functional or Sequential model, such as `parallelize` returned.

    Raises:
        ModelError: The model can't be copied.
    """
    costs(model)  # Refuses what can't be taken apart.
    return copied(model, alike)


def alike(layer: Any) -> Any:
    """Returns a layer like this one, Keras's own where it is a sharded one, without its weights."""
    import keras

    from toolkit.parallel.layers import ShardedConv2D, ShardedDense

    if isinstance(layer, (ShardedConv2D, ShardedDense)):
        kind = keras.layers.Dense if isinstance(layer, ShardedDense) else keras.layers.Conv2D
        return kind.from_config(_config(layer))
    if type(layer) is keras.layers.Lambda:  # Keras takes its function from no configuration: it might be a stranger's.
        return keras.layers.Lambda(
            layer.function,
            mask=layer.mask,
            arguments=layer.arguments,
            **{name: value for name, value in layer.get_config().items() if name in ("name", "trainable", "dtype")},
        )
    return layer.__class__.from_config(layer.get_config())


def _config(layer: Any) -> dict:
    return {name: value for name, value in layer.get_config().items() if name not in _OURS}


def copied(model: "keras.Model", function: Callable[[Any], Any]) -> "keras.Model":
    """Returns a copy of a model with the layers that a function makes of its own, and the same weights.

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
    for _, layer in leaves(copy):
        if isinstance(layer, keras.layers.Normalization) and layer.input_mean is None:
            layer.finalize_state()  # It computes with what it makes of its weights here.
    return copy
