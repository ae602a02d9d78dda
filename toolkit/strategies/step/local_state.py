"""State that replicas with local steps keep beside their weights; see `exchange/local_steps.py`."""

from typing import Any

import keras

from toolkit.strategies.exchange.mesh import replica_count
from toolkit.strategies.options import options_of
from toolkit.strategies.variables.model_optimizers import optimizers_of
from toolkit.strategies.variables.sharded_variable import ReplicaCopies

__all__ = ["per_replica_state", "velocities_of"]

_VELOCITIES = "_toolkit_velocities"


def per_replica_state(model: keras.Model) -> list[Any]:
    """Returns the variables of which a checkpoint needs all replicas' values: optimizers' variables, and velocities.

    Nothing where they don't train by themselves.
    """
    strategy = model.distribute_strategy
    if options_of(strategy).local is None or replica_count(strategy) == 1 or not model.built:
        return []
    slots = [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]
    return [*velocities_of(model), *(ReplicaCopies(variable, strategy) for variable in slots)]


def velocities_of(model: keras.Model) -> list[Any]:
    """Returns the outer step's momentum for each trainable variable of a model; [] without momentum."""
    strategy = model.distribute_strategy
    local = options_of(strategy).local
    if local is None or not local.outer_momentum:
        return []
    # By variable, because trainable variables may change. Keras would take an attribute for the model's own variables.
    kept = model.__dict__.setdefault(_VELOCITIES, {})
    with strategy.scope():
        for variable in model.trainable_variables:
            if id(variable) not in kept:
                kept[id(variable)] = _make(variable)
    return [kept[id(variable)] for variable in model.trainable_variables]


def _make(variable: Any) -> keras.Variable:
    name = f"{variable.path}_velocity".replace("/", "_")
    return keras.Variable("zeros", shape=variable.shape, dtype=variable.dtype, trainable=False, name=name)
