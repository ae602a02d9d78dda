"""A plan put on a model, and the whole weights as a plain Keras model again."""

from typing import TYPE_CHECKING, Any

from toolkit.errors import ModelError
from toolkit.parallel.graph import Graph, copy_model
from toolkit.parallel.plan import Plan

if TYPE_CHECKING:
    import keras

__all__ = ["parallelize", "plain", "plain_layer"]


def parallelize(model: "keras.Model", plan: Plan, *, exchange_dtype: str | None = None) -> "keras.Model":
    """Returns a model with sharded layers where the plan says so, and the same weights.

    Call it under the strategy's scope, then compile what it returns: losses, optimizer and metrics are not taken
    over. Layers that the plan replicates are made anew too, from their configuration.

    Args:
        model: A functional or Sequential model, built under any strategy or none. It stays as it is.
        plan: Made of this model, or of one with the same layers.
        exchange_dtype: "float16" or "bfloat16", in which activations of sharded layers are exchanged; None for the
            dtype that they have.

    Raises:
        ModelError: The plan is another model's, or the model can't be copied.
    """
    from toolkit.parallel.layers import ShardedConv2D, ShardedDense

    layers = dict(Graph(model).layers)
    if strange := [name for name in plan.choices if name not in layers]:
        raise ModelError(
            asked=f"a plan is to be put on model {model.name!r}",
            found=f"the plan has a layer {strange[0]!r} and the model hasn't",
            remedy="Make the plan of this model",
        )
    sharded = {id(layers[name]): choice for name, choice in plan.choices.items() if choice.split is not None}

    def planned(layer: Any) -> Any:
        choice = sharded.get(id(layer))
        if choice is None:
            return plain_layer(layer)
        config = {**_plain_config(layer), "exchange_dtype": exchange_dtype}
        if "filters" in config:
            return ShardedConv2D.from_config(config)
        return ShardedDense.from_config({**config, "split": choice.split, "keep_split": choice.keep_split})

    return copy_model(model, planned)


def plain(model: "keras.Model") -> "keras.Model":
    """Returns a model of Keras's own layers with the whole weights, to be saved or used without this toolkit.

    Call it outside of the strategy's scope; under several processes in all of them, because weights are gathered.
    It is not compiled.

    Args:
        model: A functional or Sequential model, such as `parallelize` returned.

    Raises:
        ModelError: The model isn't built, or can't be copied.
    """
    Graph(model)  # Refuses a model whose layers can't be read.
    return copy_model(model, plain_layer)


def plain_layer(layer: Any) -> Any:
    """Returns a layer like this one without its weights: Keras's own in the place of a sharded one."""
    import keras

    from toolkit.parallel.layers import ShardedConv2D, ShardedDense

    if isinstance(layer, (ShardedConv2D, ShardedDense)):
        kind = keras.layers.Dense if isinstance(layer, ShardedDense) else keras.layers.Conv2D
        return kind.from_config(_plain_config(layer))
    if type(layer) is keras.layers.Lambda:  # Keras takes its function from no configuration: it might be a stranger's.
        return keras.layers.Lambda(
            layer.function,
            mask=layer.mask,
            arguments=layer.arguments,
            **{name: value for name, value in layer.get_config().items() if name in ("name", "trainable", "dtype")},
        )
    return layer.__class__.from_config(layer.get_config())


def _plain_config(layer: Any) -> dict:
    """Returns the configuration that Keras's own layer takes."""
    own = ("split", "keep_split", "exchange_dtype")
    return {name: value for name, value in layer.get_config().items() if name not in own}
