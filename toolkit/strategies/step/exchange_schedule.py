"""What changes in a model's steps from some step on: compressed gradients, or no exchange at all.

Which it is is decided when a step is traced: all replicas change at the same one.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras

from toolkit.errors import StrategyError
from toolkit.strategies.mesh import layout_of
from toolkit.strategies.options import options_of
from toolkit.strategies.step import local_steps
from toolkit.strategies.step.compressed import check_smaller, send_all
from toolkit.strategies.step.local_steps import Averaging, velocities_of
from toolkit.strategies.step.moments import normalisations
from toolkit.strategies.upstream.train_function import Around, StepFunction
from toolkit.strategies.variables import optimizers_of

_LOG = logging.getLogger(__name__)
_ATTRIBUTE = "_toolkit_by_itself"


def _averaging(model: keras.Model) -> Averaging:
    """Returns what averages the weights of a model whose replicas train locally."""
    local, optimizers = options_of(model.distribute_strategy).local, optimizers_of(model)
    assert local is not None
    sharded = [variable.path for variable in model.variables if layout_of(variable).in_shards]
    if sharded:
        raise StrategyError(
            asked=f"local steps ({local.every} between averages) of a model with sharded layers, such as {sharded[0]}",
            found="a sharded layer exchanges activations in each step, and replicas that train by themselves nothing",
            remedy="Leave one of the two out",
        )
    if any(each.trainable for each in normalisations(model)):
        _LOG.warning(
            "In local steps each replica normalises its own share of a batch, also where BatchNormalization is "
            "synchronized"
        )
    return Averaging(
        model,
        local,
        velocities_of(model),
        slots=lambda: [variable for optimizer in optimizers for variable in optimizer.variables],
        rate=lambda: float(keras.ops.convert_to_numpy(_busiest(optimizers).learning_rate)),
    )


def is_local_step(model: keras.Model) -> bool:
    """Returns whether the step being traced is a local one."""
    return bool(model.__dict__.get(_ATTRIBUTE))


def schedule(model: keras.Model, function: StepFunction) -> None:
    """Puts around a step function what it needs at this step, and what changes it at a later one.

    Args:
        model: Built and compiled.
        function: Its `train_function`, just made: nothing of it is traced yet.
    """
    strategy, optimizers = model.distribute_strategy, optimizers_of(model)
    local, exchange = options_of(strategy).local, options_of(strategy).gradients
    if not optimizers or (local is None and exchange.compression == "none"):
        return
    if local is None:
        check_smaller(model)
    start = exchange.start_step if local is None else local.start_step
    begins = _made(model) >= start
    function.put(Around.SWITCHING, None if begins else _FromStep(model, function, start))
    if local is None:
        send_all(model, not begins)
    else:
        model.__dict__[_ATTRIBUTE] = begins
        local_steps.begin(model)
        function.put(Around.AVERAGING, _averaging(model) if begins else None)


def _made(model: keras.Model) -> int:
    """Returns how many steps a model has made; waits for steps under way."""
    return int(_busiest(optimizers_of(model)).iterations)


def _busiest(optimizers: Sequence[Any]) -> Any:
    """Returns the optimizer with most steps: a train_step may not use the one of `compile`."""
    return max(optimizers, key=lambda optimizer: int(optimizer.iterations))


class _FromStep:
    """Stands around a step function until a model has made this many steps, and has it made again then."""

    def __init__(self, model: keras.Model, function: StepFunction, start: int) -> None:
        self._model, self._function, self._start = model, function, start
        self._left = start - _made(model)

    def __call__(self, within: Callable, batches: Any) -> Any:
        if self._left <= 0:  # Or later, if calls made fewer steps than allowed.
            self._left = self._start - _made(self._model)
        if self._left <= 0:
            self._function.make_again()
        self._left -= self._model.steps_per_execution
        return within(batches)
