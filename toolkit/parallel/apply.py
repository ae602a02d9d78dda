"""Applies a plan to a model, and turns the result back into a plain Keras model."""

import logging
from typing import TYPE_CHECKING

from toolkit.errors import ModelError
from toolkit.parallel.graph import copy_model, sublayers
from toolkit.parallel.plan.choose import Plan
from toolkit.parallel.plan.trace import trace

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger(__name__)


def parallelize(model: "keras.Model", plan: Plan, *, exchange_dtype: str | None = None) -> "keras.Model":
    """Returns a model with the plan's sharded layers and recomputation, and with the same weights.

    Call it under the strategy's scope, then compile what it returns: losses, optimizer and metrics are not taken
    over. Layers that the plan replicates are made again too, from their configuration.

    Args:
        model: A built model of any kind, under any strategy or none: functional, Sequential, or one's own class,
            with layers within layers. It stays as it is. One's own classes must be made by `from_config` from what
            their `get_config` returns, as for `keras.models.clone_model`.
        plan: Made of this model, or of one with the same layers.
        exchange_dtype: "float16" or "bfloat16", in which activations of sharded layers are exchanged; None for the
            dtype that they have.

    Raises:
        ModelError: The plan is another model's, or the model can't be copied.
    """
    from toolkit.parallel.layers.kinds import rebuilt, settings_of
    from toolkit.strategies.fit.recompute import recomputed

    layers = dict(trace(model).layers)
    if strange := [name for name in plan.choices if name not in layers]:
        raise ModelError(
            asked=f"a plan is to be applied to model {model.name!r}",
            found=f"the plan has a layer {strange[0]!r} and the model hasn't",
            remedy="Make the plan of this model",
        )
    settings = {
        id(layers[name]): settings_of(
            layers[name], split=choice.split, keep_split=choice.keep_split, exchange_dtype=exchange_dtype
        )
        for name, choice in plan.choices.items()
        if choice.split is not None
    }
    if not settings and not plan.setting.recompute:
        _LOG.warning(
            "The plan shards no layer of model %r: every replica holds all layers, as without a plan", model.name
        )
    copy = copy_model(model, lambda layer: rebuilt(layer, settings))
    if plan.setting.recompute:
        again = {id(layers[name]) for name in plan.recomputed}
        for layer, mine in zip(sublayers(model), sublayers(copy), strict=True):
            if id(layer) in again:
                mine.call = recomputed(mine.call)
    return copy


def plain(model: "keras.Model") -> "keras.Model":
    """Returns a model of Keras's own layers with the whole weights, to be saved or used without this toolkit.

    Call it outside of the strategy's scope; under several processes in all of them, because weights are gathered.
    It is not compiled.

    Args:
        model: A built model, such as `parallelize` returned.

    Raises:
        ModelError: The model can't be copied.
    """
    from toolkit.parallel.layers.kinds import plain_layer

    return copy_model(model, plain_layer)
