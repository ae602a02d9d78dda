"""The state that an optimizer keeps for each weight."""

from typing import Any

import keras
import numpy as np

__all__ = ["slots_of"]

_SIDE = 256  # The size of a test weight: some optimizers keep rows and columns only for large weights.


def slots_of(compiled: Any) -> int:
    """Returns how many elements an optimizer keeps for each element of a weight: momentum 1, Adam 2.

    Args:
        compiled: A compiled Keras model, or an optimizer; of a model that isn't compiled, 1.
    """
    optimizer = compiled if isinstance(compiled, keras.optimizers.Optimizer) else getattr(compiled, "optimizer", None)
    if optimizer is None:
        return 1
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # The optimizer inside one that scales losses.
    tried = type(optimizer).from_config(optimizer.get_config())
    tried.build([keras.Variable(np.zeros((_SIDE, _SIDE), "float32"))])
    return round(sum(np.prod(variable.shape) for variable in tried.variables) / _SIDE**2)
