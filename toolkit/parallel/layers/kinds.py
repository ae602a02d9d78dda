"""The sharded kinds of Keras's layers, and how a layer is recreated as another kind.

One's own layer makes the layers within it in its own code. While such a layer is made again, what it makes of
Keras's classes is counted; those that are to be sharded come as the sharded class in the second of two rounds.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from toolkit.errors import ModelError
from toolkit.parallel.graph import sublayers
from toolkit.parallel.layers.attention import ShardedGroupedQueryAttention, ShardedMultiHeadAttention
from toolkit.parallel.layers.dense import ShardedConv2D, ShardedDense, ShardedEinsumDense
from toolkit.parallel.layers.embedding import ShardedEmbedding
from toolkit.strategies.upstream.wrapping import instead

_NAMED = {"name", "trainable", "dtype"}  # Settings of every layer.
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

_SHARDED: dict[Any, Any] = {
    keras.layers.Conv2D: ShardedConv2D,
    keras.layers.Dense: ShardedDense,
    keras.layers.EinsumDense: ShardedEinsumDense,
    keras.layers.Embedding: ShardedEmbedding,
    keras.layers.GroupQueryAttention: ShardedGroupedQueryAttention,
    keras.layers.MultiHeadAttention: ShardedMultiHeadAttention,
}
_OWN = {"split", "keep_split", "exchange_dtype"}  # Additional settings of sharded layers.


def plain_class(layer: Any) -> type | None:
    """Returns the Keras class of a layer or of its sharded kind; None for any other class."""
    return next((plain for plain, sharded in _SHARDED.items() if type(layer) in (plain, sharded)), None)


def settings_of(layer: Any, **settings: Any) -> dict[str, Any]:
    """Returns those of some settings that a layer's sharded kind accepts."""
    accepted = _SHARDED[plain_class(layer)].settings
    return {name: value for name, value in settings.items() if name in accepted}


def plain_layer(layer: Any) -> Any:
    """Returns a layer like this one without its weights: the Keras layer for a sharded one."""
    # Keras doesn't deserialize a function from a configuration, because it might be malicious.
    if type(layer) is keras.layers.Lambda:
        return keras.layers.Lambda(
            layer.function,
            mask=layer.mask,
            arguments=layer.arguments,
            **{name: value for name, value in layer.get_config().items() if name in _NAMED},
        )
    kind: Any = plain_class(layer)
    if kind is None:
        return _from_its_configuration(layer)
    config = layer.get_config()
    return kind.from_config({name: value for name, value in config.items() if name not in _OWN})


def _from_its_configuration(layer: Any) -> Any:
    """Recreates a user's layer as Keras does when it loads a model.

    Raises:
        ModelError: Its configuration doesn't say all that its constructor takes.
    """
    try:
        return layer.__class__.from_config(layer.get_config())
    except (NotImplementedError, TypeError) as error:
        kind = type(layer)
        known = _NAMED if isinstance(error, NotImplementedError) else {*_NAMED, *layer.get_config()}
        taken = list(inspect.signature(kind.__init__).parameters.values())[1:]
        missing = [each.name for each in taken if each.kind not in _ANY and each.name not in known]
        if not missing:
            raise
        pairs = ", ".join(f'"{name}": self.{name}' for name in missing)
        raise ModelError(
            asked=f"layer {layer.name!r} is recreated from its configuration, with sharded layers inside",
            found=f"{kind.__name__}.get_config() lacks {', '.join(missing)}, which the constructor needs",
            remedy=f"Keep them as attributes and add to the class: def get_config(self): "
            f"return {{**super().get_config(), {pairs}}}",
        ) from error


def rebuilt(layer: Any, settings: Mapping[int, Mapping[str, Any]]) -> Any:
    """Returns a layer like this one without its weights, some of which will be sharded.

    Args:
        layer: A layer, or a model whose layers are joined by its own code.
        settings: The settings of each layer that is to be sharded, by its id: this one, or one within it. Others come
            as Keras's own.

    Raises:
        ModelError: A layer within isn't made together with this one.
    """
    within = sublayers(layer)
    if not any(id(each) in settings for each in within):
        return plain_layer(layer)
    with _making({}) as made:
        likewise = sublayers(_remake(layer))
    numbers: dict[Any, Mapping[str, Any]] = {}
    for mine, theirs in zip(within, likewise, strict=False):
        if id(mine) in settings:
            numbers[made.get(id(theirs))] = settings[id(mine)]
    if len(within) != len(likewise) or None in numbers:
        raise ModelError(
            asked=f"layers within {layer.name!r} are to be sharded",
            found="recreating it from its get_config() doesn't give the same inner layers",
            remedy="Create its layers in its constructor or in build(), only from classes of keras.layers",
        )
    with _making(numbers):
        return _remake(layer)


def _remake(layer: Any) -> Any:
    """Returns a layer like this one, with all layers that its constructor creates."""
    made = plain_layer(layer)
    if isinstance(layer, keras.Model) or type(layer).build is not keras.layers.Layer.build:
        made.build_from_config(layer.get_build_config())
    return made


@contextlib.contextmanager
def _making(sharded: Mapping[int, Mapping[str, Any]]) -> Iterator[dict[int, int]]:
    """A context in which new layers of Keras classes that can be sharded are numbered; yields the numbers by their ids.

    Args:
        sharded: The settings of those that come as sharded ones, by number.
    """
    made: list = []  # Kept, because ids are reused after objects are deleted.
    numbers: dict[int, int] = {}

    def new(original: Callable, kind: type, *args: Any, **kwargs: Any) -> Any:
        if kind not in _SHARDED:
            return original(kind, *args, **kwargs)
        settings = sharded.get(len(made))
        layer = original(kind if settings is None else _SHARDED[kind], *args, **kwargs)
        if settings is not None:
            vars(layer)["planned"] = settings
        numbers[id(layer)] = len(made)
        made.append(layer)
        return layer

    with instead(keras.layers.Layer, "__new__", lambda original: functools.partial(new, original)):
        yield numbers
