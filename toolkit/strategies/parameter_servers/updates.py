"""Updates of variables that are sharded over several ps: in our steps, and in the user's own loop."""

from collections.abc import Callable
from typing import Any

from toolkit.strategies.parameter_servers import internals
from toolkit.strategies.parameter_servers.ps_sharded_variable import ServerShardedVariable, shards_of
from toolkit.strategies.parameter_servers.variables import LocalScope
from toolkit.strategies.parameter_servers.worker_step import current

__all__ = ["adapt_updates"]


class _ShardScope(LocalScope):
    """What an optimizer updates in place of a variable: one of its shards, outside of our steps."""

    def __init__(self, variable: ServerShardedVariable, index: int) -> None:
        super().__init__([], [])
        self._variable = variable
        self._index = index

    def get_current_value(self, variable: Any) -> Any:
        value = internals.held(variable)
        mine = isinstance(value, ServerShardedVariable) and value.like is self._variable
        return value.shards[self._index] if mine else None


def adapt_updates(strategy: Any) -> None:
    """Makes `strategy.extended.update` accept sharded variables, and ask the step in which it is used."""
    original = strategy.extended.update

    def update(var: Any, fn: Callable, args: tuple = (), kwargs: Any = None, group: bool = True) -> Any:
        step = current()
        result = None
        for index, shard in enumerate(shards_of(var)):
            given = tuple(_rows(var, value, index) for value in args)
            if step is None and isinstance(var, ServerShardedVariable):  # In the user's own loop.
                with _ShardScope(var, index):
                    result = original(shard, fn, given, kwargs, group)
            elif step is None:
                result = original(shard, fn, given, kwargs, group)
            else:
                result = step.update(original, shard, fn, given, kwargs, group)
        return result

    strategy.extended.update = update


def _rows(var: Any, value: Any, index: int) -> Any:
    """Returns an argument of an update for one shard of a variable."""
    if not isinstance(var, ServerShardedVariable):
        return value
    value = getattr(value, "value", value)  # A keras.Variable.
    if isinstance(value, ServerShardedVariable):
        return value.shards[index]
    shape = getattr(value, "shape", None)
    return var.rows(value, index) if shape is not None and tuple(shape) == tuple(var.shape) else value
