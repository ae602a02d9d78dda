"""A model's variables as arrays, and back: weights, optimizer, random seeds, running metrics."""

import hashlib
import math
from typing import TYPE_CHECKING

from toolkit.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import keras
    import numpy as np

__all__ = [
    "capture",
    "capture_metrics",
    "check",
    "digest",
    "metrics_in",
    "restore",
    "restore_metrics",
    "size_in_bytes",
    "without_variables",
]

_MODEL, _OPTIMIZER, _METRICS = "model/", "optimizer/", "metrics/"


def capture(model: "keras.Model") -> "dict[str, np.ndarray]":
    """Returns every variable of model and optimizer by a name that says whose it is and where.

    A variable that is mirrored on several devices is read once.
    """
    _settle(model)
    return _values(_variables(model))


def restore(model: "keras.Model", arrays: "Mapping[str, np.ndarray]") -> None:
    """Sets every variable of model and optimizer, on all replicas.

    Raises:
        CheckpointError: The names or shapes are not those of this model and optimizer; nothing was set.
    """
    check(model, arrays)
    _assign(model, _variables(model), _saved_variables(arrays))


def check(model: "keras.Model", arrays: "Mapping[str, np.ndarray]") -> None:
    """Makes sure that `restore` can set these.

    Raises:
        CheckpointError: The names or shapes are not those of this model and optimizer.
    """
    variables = _variables(model)
    saved = _saved_variables(arrays)
    for name in (*variables, *saved):
        mine = tuple(variables[name].shape) if name in variables else None
        theirs = saved[name].shape if name in saved else None
        if mine != theirs:
            raise CheckpointError(
                asked=f"the checkpoint is to be restored into model {model.name!r}",
                found=f"variable {name} has {_shape(theirs)} in the checkpoint and {_shape(mine)} in the model",
                remedy="Resume with the model and optimizer that the run was started with",
            )


def without_variables(arrays: "Mapping[str, np.ndarray]") -> "dict[str, np.ndarray]":
    """Returns those of a checkpoint's arrays that `restore` doesn't set."""
    return {name: array for name, array in arrays.items() if not name.startswith((_MODEL, _OPTIMIZER))}


def digest(model: "keras.Model") -> str:
    """Returns the SHA-256 of the model's variables, in hexadecimal: equal for bit for bit equal ones."""
    total = hashlib.sha256()
    for array in _values({str(number): variable for number, variable in enumerate(model.variables)}).values():
        total.update(array.tobytes())
    return total.hexdigest()


def capture_metrics(model: "keras.Model") -> "dict[str, np.ndarray]":
    """Returns the running sums of the metrics, over all replicas."""
    _settle(model)
    return _values(_metrics(model))


def metrics_in(arrays: "Mapping[str, np.ndarray]") -> "dict[str, np.ndarray]":
    """Returns those of a checkpoint's arrays that `capture_metrics` had returned."""
    return {name: array for name, array in arrays.items() if name.startswith(_METRICS)}


def restore_metrics(model: "keras.Model", arrays: "Mapping[str, np.ndarray]") -> None:
    """Sets the running sums of those metrics that the model still has."""
    variables = _metrics(model)
    _assign(model, variables, {name: array for name, array in arrays.items() if name in variables})


def size_in_bytes(model: "keras.Model") -> int:
    """Returns the size of what `capture` returns."""
    import tensorflow as tf

    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in _variables(model).values())


def _settle(model: "keras.Model") -> None:
    from toolkit import strategies

    strategies.wait_for_steps(model)


def _saved_variables(arrays: "Mapping[str, np.ndarray]") -> "dict[str, np.ndarray]":
    return {name: array for name, array in arrays.items() if name.startswith((_MODEL, _OPTIMIZER))}


def _variables(model: "keras.Model") -> dict:
    # By number, which is the order of construction: paths hold counters such as the 3 of "conv2d_3" or "sgd_3",
    # which depend on what else the process has built.
    if model.built and not model.optimizer.built:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
    return {
        **{f"{_MODEL}{number:04d}/{variable.name}": variable for number, variable in enumerate(model.variables)},
        **{f"{_OPTIMIZER}{number:04d}": variable for number, variable in enumerate(model.optimizer.variables)},
    }


def _metrics(model: "keras.Model") -> dict:
    return {
        f"{_METRICS}{number:04d}/{variable.name}": variable for number, variable in enumerate(model.metrics_variables)
    }


def _values(variables: dict) -> "dict[str, np.ndarray]":
    import keras

    return {
        name: keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(variable)) for name, variable in variables.items()
    }


def _assign(model: "keras.Model", variables: dict, arrays: "Mapping[str, np.ndarray]") -> None:
    with model.distribute_strategy.scope():
        for name, array in arrays.items():
            variables[name].assign(array)


def _shape(shape: tuple | None) -> str:
    return "no counterpart" if shape is None else f"shape {shape}"
