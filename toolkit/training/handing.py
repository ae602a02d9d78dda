"""The chief's checkpoint, on every process: the others' hosts need not see its disk."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from toolkit.errors import CheckpointError, ToolkitError
from toolkit.training.checkpoints import Checkpoint

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["chiefs_choice", "chiefs_number", "hand_over", "together"]

_Result = TypeVar("_Result")
_CHUNK = 64 << 20  # Bytes sent at once.


def chiefs_choice(strategy: "tf.distribute.Strategy", choice: bool) -> bool:
    """Returns what the chief has chosen, on every process: it alone sees what is on its disk. It is a collective."""
    return bool(chiefs_number(strategy, choice))


def chiefs_number(strategy: "tf.distribute.Strategy", value: int) -> int:
    """Returns the chief's number on every process. It is a collective."""
    from toolkit.strategies import agreement

    return int(agreement.broadcast(strategy, np.array([value], np.int64))[0])


def together(strategy: "tf.distribute.Strategy", action: Callable[[], _Result]) -> _Result:
    """Does something that can fail on one process, such as the chief's reading of its disk. It is a collective.

    Raises:
        ToolkitError: What the action raised.
        CheckpointError: It did so on another process: they would wait for it.
    """
    from toolkit.strategies import agreement

    try:
        result, error = action(), None
    except ToolkitError as own:
        error = own
    if agreement.processes(strategy) > 1:
        told = agreement.gather(strategy, str(error or "").encode()[:4000])
        for name, text in zip(agreement.process_names(strategy), told, strict=True):
            if text and error is None:
                raise CheckpointError(
                    asked="all tasks train together",
                    found=f"{name} can't begin: {text.decode(errors='replace').rstrip('.')}",
                    remedy="Mend that, and start all again",
                )
    if error is not None:
        raise error
    return result


def hand_over(strategy: "tf.distribute.Strategy", checkpoint: Checkpoint | None) -> Checkpoint:
    """Returns the chief's checkpoint on every process. It is a collective.

    Args:
        strategy: Whose processes take part.
        checkpoint: On the chief; None elsewhere.
    """
    from safetensors import numpy as safetensors

    from toolkit.strategies import agreement

    if checkpoint is not None and agreement.processes(strategy) == 1:
        return checkpoint
    parts = [b"", b""]
    if checkpoint is not None:
        facts = {"step": checkpoint.step, "metadata": checkpoint.metadata}
        parts = [json.dumps(facts).encode(), safetensors.save({k: v.copy() for k, v in checkpoint.arrays.items()})]
    sizes = agreement.broadcast(strategy, np.array([len(part) for part in parts], np.int64))
    described, arrays = (_send(strategy, part, int(size)) for part, size in zip(parts, sizes, strict=True))
    return checkpoint or Checkpoint(**json.loads(described), arrays=safetensors.load(arrays))


def _send(strategy: "tf.distribute.Strategy", part: bytes, size: int) -> bytes:
    from toolkit.strategies import agreement

    sent = []
    for start in range(0, size, _CHUNK):
        chunk = np.zeros(min(_CHUNK, size - start), np.uint8)
        if part:
            chunk[:] = np.frombuffer(part, np.uint8, count=len(chunk), offset=start)
        sent.append(agreement.broadcast(strategy, chunk).tobytes())
    return b"".join(sent)
