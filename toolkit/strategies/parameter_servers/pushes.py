"""Sends what a step assigns to variables of the ps: moving averages, and weights that it clips or copies."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from toolkit.strategies.parameter_servers.ps_sharded_variable import ServerShardedVariable, shards_of
from toolkit.strategies.parameter_servers.variables import LocalScope, Variables, packed, unpacked

__all__ = ["by_device", "changes", "push", "sends_difference"]


def changes(
    variables: Variables, scope: LocalScope, only: frozenset | None = None, *, among: Sequence | None = None
) -> dict[str, list]:
    """Returns, by device, (what a step sends to a served variable that it assigned, what takes it there).

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
        add = sends_difference(variables, v) and local.moved
        change = local.change if add else local.current()
        for device, pairs in by_device(variables, v, change, only, add=add).items():
            found.setdefault(device, []).extend(pairs)
    return found


def sends_difference(variables: Variables, variable: Any) -> bool:
    """Returns whether a step that computes a variable from itself sends the difference, to keep others' changes."""
    dtype = tf.as_dtype(variable.dtype)
    return not variables.in_turn and (dtype.is_floating or dtype.is_integer)


def by_device(
    variables: Variables, variable: Any, value: tf.Tensor, only: frozenset | None, *, add: bool
) -> dict[str, list]:
    """Returns a value for a served variable, or a difference to add to it, as `changes` does."""
    held = variables.values[id(variable)]
    found: dict[str, list[tuple]] = {}
    for index, shard in enumerate(shards_of(held)):
        if only is None or shard.device in only:
            mine = held.rows(value, index) if isinstance(held, ServerShardedVariable) else value
            found.setdefault(shard.device, []).append((mine, shard.assign_add if add else shard.assign))
    return found


def push(changed: dict[str, list]) -> None:
    """Sends the result of `changes` to the ps, the small changes of each ps as one tensor."""
    for device, pairs in changed.items():
        sent = packed([change for change, _ in pairs])
        with tf.device(device):
            arrived = unpacked(sent, [change for change, _ in pairs])
            for (_, assign), change in zip(pairs, arrived, strict=True):
                assign(change)
