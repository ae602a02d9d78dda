"""Whether all processes are about to train the same: one with another seed would train along unnoticed."""

import json
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.errors import CheckpointError, StrategyError
from toolkit.training import state

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

__all__ = ["compare", "compare_restored"]

_NAMED = 3  # So many differences are told.


def compare(strategy: "tf.distribute.Strategy", facts: Mapping[str, Any]) -> None:
    """Holds this process's facts against the chief's, and every other's. It is a collective.

    Args:
        strategy: Whose processes take part.
        facts: Values that JSON can hold.

    Raises:
        StrategyError: On every process, where any two differ.
    """
    from toolkit.strategies import agreement

    if agreement.processes(strategy) == 1:
        return
    told = agreement.gather(strategy, json.dumps(dict(facts), default=str).encode())
    chiefs, *others = (json.loads(text) for text in told)
    names = agreement.names(strategy)
    for name, theirs in zip(names[1:], others, strict=True):
        differ = [key for key in {**chiefs, **theirs} if chiefs.get(key) != theirs.get(key)]
        if differ:
            raise StrategyError(
                asked="all tasks are to train the same",
                found=f"{name} has {_words(theirs, differ)}, and {names[0]} {_words(chiefs, differ)}",
                remedy="Start every task with the same flags and data",
            )


def compare_restored(model: "keras.Model", *, step: int) -> None:
    """Makes sure that all processes go on with the same weights and optimizer, bit for bit. It is a collective.

    Args:
        model: As it has been restored.
        step: Of the checkpoint.

    Raises:
        CheckpointError: On every process, where any two differ.
    """
    from toolkit.strategies import agreement

    strategy = model.distribute_strategy
    if agreement.processes(strategy) == 1:
        return
    sums = {name: zlib.crc32(array.tobytes()) for name, array in state.capture(model).items()}
    chiefs, *others = (json.loads(text) for text in agreement.gather(strategy, json.dumps([step, sums]).encode()))
    names = agreement.names(strategy)
    for name, theirs in zip(names[1:], others, strict=True):
        if theirs != chiefs:
            differ = [key for key in chiefs[1] if theirs[1].get(key) != chiefs[1][key]]
            more = f" and {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
            raise CheckpointError(
                asked=f"all tasks are to go on after step {chiefs[0]} with what {names[0]} has restored",
                found=f"{name} holds another {', '.join(differ[:_NAMED]) or 'step'}{more}",
                remedy="Resume once more; if that ends the same, look at that host's memory, drivers and versions",
            )


def _words(facts: Mapping[str, Any], keys: list[str]) -> str:
    told = ", ".join(f"{key}={facts.get(key, 'none')}" for key in keys[:_NAMED])
    return told if len(keys) <= _NAMED else f"{told} and {len(keys) - _NAMED} more"
