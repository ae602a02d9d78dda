"""Sends what a step assigns to variables of the ps: moving averages, and weights that it clips or copies."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from toolkit.strategies.parameter_servers.ps_sharded_variable import ServerShardedVariable, shards_of
from toolkit.strategies.parameter_servers.variables import LocalScope, Variables, packed, unpacked

__all__ = ["adds", "by_device", "changes", "push"]


def changes(
    variables: Variables, scope: LocalScope, only: frozenset | None = None, *, among: Sequence | None = None
) -> dict[str, list]:
    """Returns, by device, (what a step added to a served variable that it assigned, how to add it).

    Args:
        variables: The model's.
        scope: The step's own copy of them, which takes them for sent.
        only: Devices of the ps whose variables are to be changed; None for all.
        among: Variables to look at; None for all.
    """
    found: dict[str, list[tuple]] = {}
    for v in variables.served if among is None else among:
        if id(v) not in scope.unsent:
            continue
        scope.unsent.remove(id(v))
        local = scope.values[id(v)]
        change = local.change if adds(variables, v) else local.current()
        for device, pairs in by_device(variables, v, change, only).items():
            found.setdefault(device, []).extend(pairs)
    return found


def adds(variables: Variables, variable: Any) -> bool:
    """Returns whether a step's change of a variable is sent as a difference, to keep other workers' changes."""
    dtype = tf.as_dtype(variable.dtype)
    return not variables.in_turn and (dtype.is_floating or dtype.is_integer)


def by_device(variables: Variables, variable: Any, value: tf.Tensor, only: frozenset | None) -> dict[str, list]:
    """Returns a value for a served variable, or the difference to it, as `changes` does."""
    held = variables.values[id(variable)]
    found: dict[str, list[tuple]] = {}
    for index, shard in enumerate(shards_of(held)):
        if only is None or shard.device in only:
            mine = held.rows(value, index) if isinstance(held, ServerShardedVariable) else value
            assign = shard.assign_add if adds(variables, variable) else shard.assign
            found.setdefault(shard.device, []).append((mine, assign))
    return found


def push(changed: dict[str, list]) -> None:
    """Sends the result of `changes` to the ps, the small changes of each ps as one tensor."""
    for device, pairs in changed.items():
        sent = packed([change for change, _ in pairs])
        with tf.device(device):
            arrived = unpacked(sent, [change for change, _ in pairs])
            for (_, assign), change in zip(pairs, arrived, strict=True):
                assign(change)
