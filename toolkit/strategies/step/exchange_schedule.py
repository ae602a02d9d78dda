"""What changes in a model's steps from some step on: compressed gradients, or no exchange at all.

Which it is is decided when a step is traced: all replicas change at the same one.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras

from toolkit.errors import StrategyError
from toolkit.strategies.options import options_of
from toolkit.strategies.step import local_steps
from toolkit.strategies.step.local_steps import LocalFunction, velocities_of
from toolkit.strategies.step.powersgd import check_smaller, send_all
from toolkit.strategies.step.sharded_variable import ReplicaShardedVariable
from toolkit.strategies.upstream.attributes import layers_below
from toolkit.strategies.variables import optimizers_of

_LOG = logging.getLogger(__name__)
_ATTRIBUTE = "_toolkit_by_itself"


def local_function(model: keras.Model) -> LocalFunction:
    """Returns the replacement of a model's step function if replicas train locally."""
    local, optimizers = options_of(model.distribute_strategy).local, optimizers_of(model)
    assert local is not None
    sharded = [variable.path for variable in model.variables if isinstance(variable, ReplicaShardedVariable)]
    if sharded:
        raise StrategyError(
            asked=f"local steps ({local.every} between averages) of a model with sharded layers, such as {sharded[0]}",
            found="a sharded layer exchanges activations in each step, and replicas that train by themselves nothing",
            remedy="Leave one of the two out",
        )
    layers = layers_below(model)
    if any(isinstance(each, keras.layers.BatchNormalization) and each.synchronized for each in layers):
        _LOG.warning("In local steps each replica normalises by itself, as if BatchNormalization weren't synchronized")
    return LocalFunction(
        model,
        local,
        velocities_of(model),
        slots=lambda: [variable for optimizer in optimizers for variable in optimizer.variables],
        rate=lambda: float(keras.ops.convert_to_numpy(_busiest(optimizers).learning_rate)),
    )


def is_local_step(model: keras.Model) -> bool:
    """Returns whether the step being traced is a local one."""
    return bool(model.__dict__.get(_ATTRIBUTE))


def put_before(model: keras.Model, make: Callable[[], Any]) -> Any:
    """Creates a model's step function, or first the one that is used before the step at which it changes.

    Args:
        model: Built and compiled.
        make: Makes its `train_function`.
    """
    strategy, optimizers = model.distribute_strategy, optimizers_of(model)
    local, exchange = options_of(strategy).local, options_of(strategy).gradients
    if not optimizers or (local is None and exchange.compression == "none"):
        return make()
    if local is None:
        check_smaller(model)
    start = exchange.start_step if local is None else local.start_step
    left = start - _made(model)
    _begin(model, left <= 0)
    result = make()
    if left > 0:
        model.train_function = _FromStep(model, make, start)
    return result


def _begin(model: keras.Model, begins: bool) -> None:
    """Makes what is traced from now on belong to the time after that step, or before it."""
    if options_of(model.distribute_strategy).local is not None:
        model.__dict__[_ATTRIBUTE] = begins
        local_steps.begin(model)
    else:
        send_all(model, not begins)


def _made(model: keras.Model) -> int:
    """Returns how many steps a model has made; waits for steps under way."""
    return int(_busiest(optimizers_of(model)).iterations)


def _busiest(optimizers: Sequence[Any]) -> Any:
    """Returns the optimizer with most steps: a train_step may not use the one of `compile`."""
    return max(optimizers, key=lambda optimizer: int(optimizer.iterations))


class _FromStep:
    """Replaces a `Model.train_function`, and has it created again after this many steps."""

    def __init__(self, model: keras.Model, make: Callable[[], Any], start: int) -> None:
        self._model, self._start, self._function = model, start, model.train_function
        self._left = start - _made(model)
        self._make: Callable[[], Any] | None = make

    def __call__(self, iterator: Any) -> Any:
        if self._left <= 0 and self._make is not None:  # Or later, if calls made fewer steps than allowed.
            self._left = self._start - _made(self._model)
        if self._left <= 0 and self._make is not None:
            _begin(self._model, True)
            mine, self._model.train_function = self._model.train_function, None
            self._make()
            self._function, self._model.train_function, self._make = self._model.train_function, mine, None
        self._left -= self._model.steps_per_execution
        return self._function(iterator)
