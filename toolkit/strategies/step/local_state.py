"""What replicas that train by themselves keep for it, beside their weights; see `exchange/local_steps.py`."""

import functools
from typing import Any

import keras

from toolkit.strategies.exchange.mesh import replicas
from toolkit.strategies.options import local_of
from toolkit.strategies.variables.model_optimizers import trained_by
from toolkit.strategies.variables.read_together import ReplicaCopies
from toolkit.strategies.variables.zero1 import make_in_scope

__all__ = ["kept_by", "velocities_of"]

_VELOCITIES = "_toolkit_velocities"


def kept_by(optimizer: Any) -> list[Any]:
    """Returns what a checkpoint must have of all replicas: what each has of the optimizer's variables, and velocities.

    Nothing where they don't train by themselves, and of an optimizer that isn't built.
    """
    strategy = getattr(optimizer, "inner_optimizer", optimizer)._distribution_strategy  # Of a LossScaleOptimizer.
    if strategy is None or local_of(strategy) is None or replicas(strategy) == 1:
        return []
    return [*velocities_of(optimizer), *(ReplicaCopies(variable, strategy) for variable in optimizer.variables)]


def velocities_of(optimizer: Any) -> list[Any]:
    """Returns what the outer step keeps, for each variable that an optimizer trains; [] without momentum."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    local = local_of(optimizer._distribution_strategy)
    if local is None or not local.outer_momentum:
        return []
    if _VELOCITIES not in optimizer.__dict__:
        made = [make_in_scope(optimizer, functools.partial(_make, variable)) for variable in trained_by(optimizer)]
        object.__setattr__(optimizer, _VELOCITIES, made)  # Keras would take them for variables of the optimizer's.
    return optimizer.__dict__[_VELOCITIES]


def _make(variable: Any) -> keras.Variable:
    name = f"{variable.path}_velocity".replace("/", "_")
    return keras.Variable("zeros", shape=variable.shape, dtype=variable.dtype, trainable=False, name=name)
