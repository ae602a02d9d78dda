"""What the processes of a run do together before training: compare themselves, and load the chief's checkpoint.

Their hosts need not see one another's disks: only what the chief has on its disk counts. Every function here is a
collective, which all processes have to call in the same order.
"""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from toolkit.errors import CheckpointError, StrategyError, ToolkitError
from toolkit.training.checkpoints import state
from toolkit.training.checkpoints.store import Checkpoint

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

__all__ = ["broadcast_checkpoint", "broadcast_number", "check_restored", "check_same", "run_together"]

_Result = TypeVar("_Result")
_CHUNK = 64 << 20  # Bytes sent at once.
_NAMED = 3  # The most differences that a message names.
_STEP = "the step"


def broadcast_number(strategy: "tf.distribute.Strategy", value: int) -> int:
    """Returns the chief's number on every process. Only the chief knows what is on its disk."""
    from toolkit.strategies.processes import agreement

    return int(agreement.broadcast(strategy, np.array([value], np.int64))[0])


def run_together(strategy: "tf.distribute.Strategy", action: Callable[[], _Result]) -> _Result:
    """Calls a function that may fail on one process, such as reading the chief's disk; then all processes fail.

    Args:
        strategy: Whose processes take part.
        action: What each of them does; it may do nothing on some.

    Raises:
        ToolkitError: The action raised it in this process.
        CheckpointError: The action failed on another process, which this one would wait for.
    """
    from toolkit.strategies.processes import agreement

    try:
        result, error = action(), None
    except ToolkitError as own:
        error = own
    if agreement.processes(strategy) > 1:
        failures = agreement.gather(strategy, str(error or "").encode()[:4000])
        for name, text in zip(agreement.process_names(strategy), failures, strict=True):
            if text and error is None:
                raise CheckpointError(
                    asked="all tasks train together",
                    found=f"{name} can't begin: {text.decode(errors='replace').rstrip('.')}",
                    remedy="Correct that, and start all tasks again",
                )
    if error is not None:
        raise error
    return result


def broadcast_checkpoint(strategy: "tf.distribute.Strategy", checkpoint: Checkpoint | None) -> Checkpoint:
    """Returns the chief's checkpoint on every process.

    Args:
        strategy: Whose processes take part.
        checkpoint: The chief's own; None in the other processes.
    """
    from safetensors import numpy as safetensors

    from toolkit.strategies.processes import agreement

    if checkpoint is not None and agreement.processes(strategy) == 1:
        return checkpoint
    contents = [b"", b""]
    if checkpoint is not None:
        facts = {"step": checkpoint.step, "metadata": checkpoint.metadata}
        contents = [json.dumps(facts).encode(), safetensors.save({k: v.copy() for k, v in checkpoint.arrays.items()})]
    sizes = agreement.broadcast(strategy, np.array([len(content) for content in contents], np.int64))
    facts_sent, arrays_sent = (
        _broadcast_bytes(strategy, content, int(size)) for content, size in zip(contents, sizes, strict=True)
    )
    return checkpoint or Checkpoint(**json.loads(facts_sent), arrays=safetensors.load(arrays_sent))


def _broadcast_bytes(strategy: "tf.distribute.Strategy", content: bytes, size: int) -> bytes:
    from toolkit.strategies.processes import agreement

    received = []
    for start in range(0, size, _CHUNK):
        chunk = np.zeros(min(_CHUNK, size - start), np.uint8)
        if content:
            chunk[:] = np.frombuffer(content, np.uint8, count=len(chunk), offset=start)
        received.append(agreement.broadcast(strategy, chunk).tobytes())
    return b"".join(received)


def check_same(strategy: "tf.distribute.Strategy", facts: Mapping[str, Any]) -> None:
    """Checks that all processes are about to train the same: one with another seed would go unnoticed.

    Args:
        strategy: Whose processes take part.
        facts: Values that JSON can hold.

    Raises:
        StrategyError: On every process, where any two differ.
    """
    from toolkit.strategies.fit.equality import difference

    found = difference(strategy, facts)
    if found is not None:
        theirs, chiefs = (_words(each, found.keys) for each in (found.theirs, found.chiefs))
        raise StrategyError(
            asked="all tasks must train with the same settings",
            found=f"{found.process} has {theirs}, and {found.chief} has {chiefs}",
            remedy="Start every task with the same flags and data",
        )


def check_restored(model: "keras.Model", *, step: int) -> None:
    """Checks that all processes continue with the same weights and optimizers, bit for bit.

    Args:
        model: The model as it has been restored.
        step: The step of the checkpoint.

    Raises:
        CheckpointError: On every process, where any two differ.
    """
    from toolkit.strategies.fit.equality import checksum, difference
    from toolkit.strategies.processes.agreement import processes

    if processes(model.distribute_strategy) == 1:
        return
    sums = {name: checksum(array) for name, array in state.common(model).items()}
    found = difference(model.distribute_strategy, {**sums, _STEP: step})
    if found is not None:
        differ = [key for key in found.keys if key != _STEP]
        more = f" and {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
        raise CheckpointError(
            asked=f"all tasks continue after step {found.chiefs[_STEP]} with what {found.chief} has restored",
            found=f"{found.process} holds another {', '.join(differ[:_NAMED]) or 'step'}{more}",
            remedy="Resume once more; if that ends the same, look at that host's memory, drivers and versions",
        )


def _words(facts: Mapping[str, Any], keys: list[str]) -> str:
    named = ", ".join(f"{key}={facts.get(key, 'none')}" for key in keys[:_NAMED])
    return named if len(keys) <= _NAMED else f"{named} and {len(keys) - _NAMED} more"
