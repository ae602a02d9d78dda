"""How a model is compiled, where a callback compiles it again while it trains.

A resumed script compiles its model as it did at the beginning. What a callback had made of that, such as another
optimizer for the last epochs, is in no variable: a checkpoint holds it as Keras's own files do, by configuration.
"""

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.strategies.upstream.attributes import compiled_as, layers_within

if TYPE_CHECKING:
    import keras

_LOG = logging.getLogger(__name__)
# Of an optimizer: its rate is a variable, which callbacks set, and its name counts those that the process has made.
_OF_OPTIMIZER = ("learning_rate", "name")


class Compiled:
    """How a model is compiled, beside how the script has done it.

    Args:
        model: As the script has compiled it.
    """

    def __init__(self, model: "keras.Model") -> None:
        self._model = model
        self._by_script = self._seen = compiled_as(model)

    def capture(self) -> dict[str, Any] | None:
        """Returns JSON values for a checkpoint; None for a model that nothing but the script has compiled."""
        return None if compiled_as(self._model) is self._by_script else _described(self._model)

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Compiles the model as at a checkpoint, if a callback had compiled it and the script doesn't do so itself.

        Args:
            saved: What `capture` returned.
        """
        if saved is not None and _kept(_described(self._model)) != _kept(saved):
            try:
                self._compile(saved)
            except Exception as error:  # Configurations hold the user's own classes and functions.
                reason = str(error).partition("\n")[0][:200]
                _LOG.warning(
                    "A callback had compiled the model before this checkpoint, and Keras can't do so again (%s). The "
                    "run goes on as the script compiles it: before run.fit, set what is trainable and call compile as "
                    "that callback does",
                    reason,
                )
        self._seen = compiled_as(self._model)

    def _compile(self, saved: Mapping[str, Any]) -> None:
        import keras

        model, kind = self._model, type(self._model)
        if kind.compile is not keras.Model.compile and kind.compile_from_config is keras.Model.compile_from_config:
            raise TypeError(f"{kind.__name__} has its own compile, and no compile_from_config")
        with model.distribute_strategy.scope():
            # The outer ones first: a layer hands it on to those within.
            for layer, trainable in zip(layers_within(model), saved["trainable"], strict=True):
                layer.trainable = trainable
            model.compile_from_config(saved["config"])

    def seen(self) -> bool:
        """Returns whether the model was compiled since this was last called, or since the checkpoint was restored."""
        before, self._seen = self._seen, compiled_as(self._model)
        return self._seen is not before


def _described(model: "keras.Model") -> dict[str, Any]:
    try:
        config = json.loads(json.dumps(model.get_compile_config()))
    except Exception:  # The same.
        _LOG.debug("How %s is compiled can't be written down", model.name, exc_info=True)
        config = None
    return {"config": config, "trainable": [bool(layer.trainable) for layer in layers_within(model)]}


def _kept(value: Any) -> Any:
    """Returns what stays while a model trains that is compiled once."""
    if isinstance(value, Mapping):
        return {name: _kept(each) for name, each in value.items() if name not in _OF_OPTIMIZER}
    return [_kept(each) for each in value] if isinstance(value, list) else value
