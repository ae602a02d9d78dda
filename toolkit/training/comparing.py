"""Whether all processes are about to train the same: one with another seed would train along unnoticed."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.errors import CheckpointError, StrategyError
from toolkit.training import state

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

__all__ = ["compare", "compare_restored"]

_NAMED = 3  # So many differences are named.
_STEP = "the step"


def compare(strategy: "tf.distribute.Strategy", facts: Mapping[str, Any]) -> None:
    """Holds this process's facts against the chief's, and every other's. It is a collective.

    Args:
        strategy: Whose processes take part.
        facts: Values that JSON can hold.

    Raises:
        StrategyError: On every process, where any two differ.
    """
    from toolkit.strategies.consistency import difference

    found = difference(strategy, facts)
    if found is not None:
        theirs, chiefs = (_words(each, found.keys) for each in (found.theirs, found.chiefs))
        raise StrategyError(
            asked="all tasks are to train the same",
            found=f"{found.process} has {theirs}, and {found.chief} {chiefs}",
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
    from toolkit.strategies.agreement import processes
    from toolkit.strategies.consistency import checksum, difference

    if processes(model.distribute_strategy) == 1:
        return
    sums = {name: checksum(array) for name, array in state.capture(model).items()}
    found = difference(model.distribute_strategy, {**sums, _STEP: step})
    if found is not None:
        differ = [key for key in found.keys if key != _STEP]
        more = f" and {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
        raise CheckpointError(
            asked=f"all tasks are to go on after step {found.chiefs[_STEP]} with what {found.chief} has restored",
            found=f"{found.process} holds another {', '.join(differ[:_NAMED]) or 'step'}{more}",
            remedy="Resume once more; if that ends the same, look at that host's memory, drivers and versions",
        )


def _words(facts: Mapping[str, Any], keys: list[str]) -> str:
    told = ", ".join(f"{key}={facts.get(key, 'none')}" for key in keys[:_NAMED])
    return told if len(keys) <= _NAMED else f"{told} and {len(keys) - _NAMED} more"
