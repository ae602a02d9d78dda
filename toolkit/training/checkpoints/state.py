"""Converts a model's variables to arrays and back: weights, optimizers, random seeds, running metrics."""

import hashlib
import logging
import math
import re
from typing import TYPE_CHECKING

from toolkit.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import keras
    import numpy as np

__all__ = [
    "capture",
    "capture_metrics",
    "common",
    "digest",
    "metrics_in",
    "restore",
    "restore_metrics",
    "size_in_bytes",
    "without_variables",
]

_LOG = logging.getLogger(__name__)
_MODEL, _OPTIMIZER, _METRICS = "model/", "optimizer/", "metrics/"
_OTHERS = "others/"  # TensorFlow variables among a model's attributes.
_EXCHANGE = "exchange/"  # Variables that differ by replica: for compression, gradient accumulation and local steps.
_TRAINS = "trains/"  # By an optimizer's number, the numbers of the model's variables for which it was built.


def capture(model: "keras.Model") -> "dict[str, np.ndarray]":
    """Returns every variable of the model and its optimizers, by a name that gives owner and place.

    A variable that is mirrored on several devices is read once.
    """
    _settle(model)
    return {**_values(_variables(model)), **_trained(model)}


def common(model: "keras.Model") -> "dict[str, np.ndarray]":
    """Returns what `capture` returns, without variables that differ by replica in local training.

    That is in there a second time, of all replicas, among what they keep for it.
    """
    from toolkit.strategies.step import exchanges

    own = _OPTIMIZER if exchanges.slots_differ(model) else None
    return {name: array for name, array in capture(model).items() if own is None or not name.startswith(own)}


def restore(model: "keras.Model", arrays: "Mapping[str, np.ndarray]") -> None:
    """Sets every variable of model and optimizer, on all replicas.

    Raises:
        CheckpointError: The names or shapes are not those of this model and optimizer; nothing was set.
    """
    from toolkit.strategies.step import exchanges

    _assign(model, *_checked(model, arrays))
    exchanges.resume(model)


def _checked(model: "keras.Model", arrays: "Mapping[str, np.ndarray]") -> "tuple[dict, dict[str, np.ndarray]]":
    """Returns the result of `_matching` after checking that `restore` can set it.

    Raises:
        CheckpointError: The names or shapes are not those of this model and optimizer.
    """
    _build_optimizers(model, arrays)
    variables, saved = _matching(model, arrays)
    for name in (*variables, *saved):
        mine = tuple(variables[name].shape) if name in variables else None
        theirs = saved[name].shape if name in saved else None
        if mine != theirs:
            raise CheckpointError(
                asked=f"the checkpoint is to be restored into model {model.name!r}",
                found=f"variable {name} has {_shape(theirs)} in the checkpoint and {_shape(mine)} in the model",
                remedy="Resume with the model and optimizer that the run was started with, or train again: remove the "
                "run's directory or name another",
            )
    return variables, saved


def without_variables(arrays: "Mapping[str, np.ndarray]") -> "dict[str, np.ndarray]":
    """Returns the arrays of a checkpoint that `restore` doesn't set."""
    return {
        name: array
        for name, array in arrays.items()
        if not name.startswith((_MODEL, _OPTIMIZER, _OTHERS, _EXCHANGE, _TRAINS))
    }


def digest(model: "keras.Model") -> str:
    """Returns the SHA-256 of the model's variables in hexadecimal; it is equal if they are equal bit for bit."""
    total = hashlib.sha256()
    for array in _values({str(number): variable for number, variable in enumerate(model.variables)}).values():
        total.update(array.tobytes())
    return total.hexdigest()


def capture_metrics(model: "keras.Model") -> "dict[str, np.ndarray]":
    """Returns the running sums of the metrics, over all replicas."""
    _settle(model)
    return _values(_metrics(model))


def metrics_in(arrays: "Mapping[str, np.ndarray]") -> "dict[str, np.ndarray]":
    """Returns the arrays of a checkpoint that `capture_metrics` had returned."""
    return {name: array for name, array in arrays.items() if name.startswith(_METRICS)}


def restore_metrics(model: "keras.Model", arrays: "Mapping[str, np.ndarray]") -> None:
    """Sets the running sums of the metrics that the model still has."""
    variables = _metrics(model)
    _assign(model, variables, {name: array for name, array in arrays.items() if name in variables})


def size_in_bytes(model: "keras.Model") -> int:
    """Returns the size of `capture`'s result."""
    import tensorflow as tf

    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in _variables(model).values())


def _settle(model: "keras.Model") -> None:
    from toolkit import strategies

    strategies.wait_for_steps(model)


def _matching(model: "keras.Model", arrays: "Mapping[str, np.ndarray]") -> "tuple[dict, dict[str, np.ndarray]]":
    """Returns the model's variables and the saved arrays, without those of optimizers that had taken no step."""
    variables = _variables(model)
    kept = (_MODEL, _OPTIMIZER, _OTHERS, _EXCHANGE)
    saved = {_uncounted(name): array for name, array in arrays.items() if name.startswith(kept)}
    optimizers = _optimizers(model)
    for which in range(len(optimizers)) if len(optimizers) > 1 else ():
        if f"{_TRAINS}{which}" not in arrays:
            # Keras builds the optimizer given to `compile`, used or not, if it builds the model itself.
            for names in (variables, saved):
                for name in [name for name in names if name.startswith(_OPTIMIZER) and _owner(name) == which]:
                    del names[name]
    _match_exchange(variables, saved)
    return variables, saved


def _match_exchange(variables: dict, saved: dict) -> None:
    """Leaves out variables that differ by replica if the run continues with other replicas or another exchange."""
    names = {name for name in (*variables, *saved) if name.startswith(_EXCHANGE)}
    if any(name not in saved or name not in variables or saved[name].shape != variables[name].shape for name in names):
        _LOG.warning(
            "The run goes on with another number of replicas, or another way to send less: what each replica kept for "
            "itself, such as what hasn't been sent of earlier gradients, is dropped"
        )
        for name in names:
            variables.pop(name, None)
            saved.pop(name, None)


def _variables(model: "keras.Model") -> dict:
    import tensorflow as tf

    from toolkit.strategies.step.exchanges import per_replica_state
    from toolkit.strategies.variables import is_built

    # By number, in the order of construction. Paths contain counters such as the 3 of "conv2d_3" or "sgd_3", which
    # depend on what else the process has built; so does "variable_3", the name of a weight without a given name.
    optimizers = _optimizers(model)  # None in a loop of the user that updates weights itself.
    if is_built(model) and len(optimizers) == 1 and not optimizers[0].built:
        with model.distribute_strategy.scope():
            optimizers[0].build(model.trainable_variables)
    found = {_uncounted(f"{_MODEL}{number:04d}/{v.name}"): v for number, v in enumerate(model.variables)}
    for which, optimizer in enumerate(optimizers):
        own = f"{which}/" if which else ""
        found.update({f"{_OPTIMIZER}{own}{number:04d}": v for number, v in enumerate(optimizer.variables)})
    found.update({f"{_EXCHANGE}{name}": variable for name, variable in per_replica_state(model).items()})
    tracked = (each for each in tf.train.TrackableView(model).descendants() if isinstance(each, tf.Variable))
    found.update({f"{_OTHERS}{number:04d}": variable for number, variable in enumerate(tracked)})
    return found


def _uncounted(name: str) -> str:
    return re.sub(r"/variable_\d+$", "/variable", name)


def _owner(name: str) -> int:
    """Returns the optimizer's number in a variable's name: "optimizer/0003", "optimizer/1/0003"."""
    _, *which, _ = name.split("/")
    return int(which[0]) if which else 0


def _optimizers(model: "keras.Model") -> list:
    from toolkit.strategies.variables import optimizers_of

    return optimizers_of(model)


def _trained(model: "keras.Model") -> "dict[str, np.ndarray]":
    """Returns for each of several optimizers which variables it trains; only its first step shows that."""
    import numpy as np

    from toolkit.strategies.variables import trained_by

    optimizers = _optimizers(model)
    if len(optimizers) < 2:
        return {}
    numbers = {id(variable): number for number, variable in enumerate(model.variables)}
    return {
        f"{_TRAINS}{which}": np.array([numbers[id(v)] for v in trained_by(optimizer)], np.int64)
        for which, optimizer in enumerate(optimizers)
        if optimizer.built and all(id(v) in numbers for v in trained_by(optimizer))
    }


def _build_optimizers(model: "keras.Model", arrays: "Mapping[str, np.ndarray]") -> None:
    """Builds those of several optimizers that have taken no step here, for the variables that they had."""
    for which, optimizer in enumerate(_optimizers(model)):
        numbers = arrays.get(f"{_TRAINS}{which}")
        if numbers is not None and not optimizer.built and max(numbers, default=0) < len(model.variables):
            with model.distribute_strategy.scope():
                optimizer.build([model.variables[number] for number in numbers])


def _metrics(model: "keras.Model") -> dict:
    return {
        f"{_METRICS}{number:04d}/{variable.name}": variable for number, variable in enumerate(model.metrics_variables)
    }


def _values(variables: dict) -> "dict[str, np.ndarray]":
    """Returns values that stay as they are while training goes on."""
    import keras
    import numpy as np
    import tensorflow as tf

    from toolkit.strategies.step.sharded_variable import ReadTogether

    found = {}
    for name, variable in variables.items():
        value = keras.ops.convert_to_tensor(variable)
        if isinstance(value, keras.Variable) and not isinstance(value, ReadTogether):
            value = value.value
        if isinstance(value, tf.Variable):
            value = tf.convert_to_tensor(value)
        # On the host NumPy sees a tensor's own memory, and no update changes that: TensorFlow writes into a variable's
        # memory only where nobody else holds it, and otherwise elsewhere. So the copy is made by the next step's
        # updates, on all cores, if at all. What a GPU holds is copied here.
        found[name] = np.asarray(value)
    return found


def _assign(model: "keras.Model", variables: dict, arrays: "Mapping[str, np.ndarray]") -> None:
    with model.distribute_strategy.scope():
        # In the same order on all processes: after setting a variable, TensorFlow reads it on each replica.
        # Variables that differ by replica come after the equal ones.
        for name in sorted(arrays, key=lambda name: (name.startswith(_EXCHANGE), name)):
            variables[name].assign(arrays[name])


def _shape(shape: tuple | None) -> str:
    return "no counterpart" if shape is None else f"shape {shape}"
