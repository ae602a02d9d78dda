"""The optimizers of a model: Keras's own, and those that a model with its own `train_step` keeps, such as a GAN."""

from typing import Any

import keras

__all__ = ["is_built", "optimizers_of", "trained_by", "variables_of"]


def optimizers_of(model: keras.Model) -> list[Any]:
    """Returns the optimizers among a model's attributes; the compiled one is the first.

    Those in lists, dicts and the user's own objects, such as a trainer, are among them.
    """
    kept: list[Any] = []
    for value in (getattr(model, "optimizer", None), *vars(model).values()):
        if isinstance(value, (dict, list, tuple)):
            kept += value.values() if isinstance(value, dict) else value
        else:
            kept += [value, *(vars(value).values() if _is_helper(value) else ())]
    return list({id(each): each for each in kept if isinstance(each, keras.optimizers.Optimizer)}.values())


def _is_helper(value: Any) -> bool:
    """Whether the class of an object is neither Keras's nor TensorFlow's."""
    ours = ("builtins", "keras", "tensorflow", "numpy", "toolkit", "types")
    known = any(kind.__module__.partition(".")[0] in ours for kind in type(value).__mro__[:-1])
    return hasattr(value, "__dict__") and not known


def is_built(model: keras.Model) -> bool:
    """Whether a model has all its variables: after `build`, a model says that it is built but may have none yet."""
    return model.built and all(getattr(layer, "built", True) for layer in model._flatten_layers())


def trained_by(optimizer: Any) -> list[Any]:
    """Returns the variables for which an optimizer was built; Keras has no public name for them."""
    return list(optimizer._trainable_variables) if optimizer.built else []


def variables_of(model: keras.Model) -> list[Any]:
    """Returns the variables of a model and of its optimizers."""
    return [*model.weights, *(v for optimizer in optimizers_of(model) for v in optimizer.variables)]
