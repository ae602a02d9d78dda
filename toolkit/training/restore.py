"""Brings a model to the position at which its run was stopped."""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.errors import RequestError
from toolkit.support.words import counted
from toolkit.training.checkpoints import state
from toolkit.training.checkpoints.broadcast import broadcast_checkpoint, broadcast_number, check_restored, run_together
from toolkit.training.checkpoints.position import Position
from toolkit.training.checkpoints.store import Checkpoint, CheckpointStore, NullCheckpointStore
from toolkit.training.directory import NullRunDirectory, RunDirectory

if TYPE_CHECKING:
    import keras

__all__ = ["check_length", "complete_history", "ended_for_good", "in_words", "parameters", "restore"]

_LOG = logging.getLogger(__name__)
_NO_LOGS = ("epoch", "step", "learning_rate", "examples_per_second", "seconds")  # Columns that Keras doesn't log.


def parameters(model: "keras.Model") -> int:
    """Returns the number of elements of the model's variables, without those that aren't built yet."""
    return sum(math.prod(variable.shape) for variable in model.variables)


def restore(
    model: "keras.Model",
    data: Any,
    *,
    directory: RunDirectory | NullRunDirectory,
    store: CheckpointStore | NullCheckpointStore,
    wanted: bool,
    epochs: int,
) -> tuple[Checkpoint | None, Position]:
    """Checks that the disk has room for checkpoints, and on resume sets all variables. All processes must call it.

    Args:
        model: Compiled.
        data: What is given to `fit` as `x`, by whose shapes the model is built where it isn't yet.
        directory: The run directory, on whose disk there must be room.
        store: Where the chief reads the checkpoint, which it broadcasts to the others.
        wanted: Whether to resume. What the chief says counts: it alone sees what is on its disk.
        epochs: The epochs of the whole training, as they are asked for now.

    Returns:
        The checkpoint, and where training goes on; None and the beginning for a new run.

    Raises:
        RunDirectoryError: The disk is too full.
        CheckpointError: No checkpoint can be used, it is another model's, or processes restored differently.
        ModelError: The model isn't built, and the data doesn't say its shapes.
    """
    from toolkit.strategies.variables import is_built

    strategy = model.distribute_strategy
    resumes = bool(broadcast_number(strategy, wanted))
    if resumes and not is_built(model):
        from toolkit.training.checkpoints.data_position import build

        build(model, data)

    def prepare() -> Checkpoint | None:
        directory.check_space(state.size_in_bytes(model))
        if not resumes or not isinstance(store, CheckpointStore):
            return None
        return store.load()

    found = run_together(strategy, prepare)
    if not resumes:
        return None, Position()
    checkpoint = broadcast_checkpoint(strategy, found)
    # Each process finds by itself whether it fits, but building variables needs all processes.
    state.restore(model, checkpoint.arrays)
    check_restored(model, step=checkpoint.step)
    # The rest is kept during the first epoch; the variables' arrays are as large as the model and its optimizers.
    checkpoint = dataclasses.replace(checkpoint, arrays=state.without_variables(checkpoint.arrays))
    before = checkpoint.metadata["epochs"]
    if epochs != before:
        _LOG.warning(
            "The run began with epochs=%d and resumes with epochs=%d: a learning rate schedule follows the new length",
            before,
            epochs,
        )
    position = Position(**{**checkpoint.metadata["position"], "step": checkpoint.step})
    return checkpoint, position


def ended_for_good(checkpoint: Checkpoint | None, callbacks: Any) -> bool:
    """Returns whether an EarlyStopping had ended the training and the callbacks still include one.

    Args:
        checkpoint: What the run goes on from; None for a new run.
        callbacks: The user's: one, several, or None.
    """
    import keras

    if checkpoint is None or not checkpoint.metadata.get("stop_training", False):
        return False
    return any(isinstance(each, keras.callbacks.EarlyStopping) for each in keras.tree.flatten(callbacks or []))


def in_words(
    checkpoint: Checkpoint | None, resumed: Position, *, epochs: int, ended: bool, directory: object = None
) -> str:
    """Returns the message about a resumed run; "" for a new run.

    Args:
        checkpoint: What it goes on from.
        resumed: Where it goes on.
        epochs: The epochs of the whole training.
        ended: Whether a callback has ended the training for good.
        directory: Where the run is, as far as this process knows.
    """
    if checkpoint is None:
        return ""
    how = f" To train again, remove {directory} or name another directory." if directory else ""
    every = counted(epochs, "epoch")
    if ended:
        return f"Already complete: EarlyStopping ended the training after {resumed.epoch} of {every}.{how}"
    if resumed.epoch >= epochs:
        return f"Already complete: {min(resumed.epoch, epochs)} of {every}.{how}"
    epoch = f"epoch {resumed.epoch + 1} of {epochs}"
    steps = f"{resumed.batch:,} step{'s' if resumed.batch > 1 else ''}"
    where = f"{steps} into {epoch}" if resumed.batch else f"{epoch} begins"
    return f"Resumed after step {resumed.step:,}: {where}."


def complete_history(history: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Gives what `fit` returns the epochs that earlier processes of a resumed run have trained.

    Args:
        history: A `keras.callbacks.History`.
        rows: One for each epoch of this training, earlier ones first, as history.csv has them.
    """
    earlier = rows[: len(rows) - len(history.epoch)]
    names = list(history.history) or [name for name in (earlier[0] if earlier else ()) if name not in _NO_LOGS]
    history.epoch[:0] = range(len(earlier))
    for name in names:
        values = [row.get(name, [v for key, v in row.items() if key.startswith(f"{name}_")]) for row in earlier]
        history.history[name] = [*values, *history.history.get(name, ())]


def check_length(epochs: int, options: Mapping[str, Any]) -> None:
    """Checks that a run is given something to train.

    Raises:
        RequestError: It has no epoch, or says where to begin.
    """
    if epochs < 1 or "initial_epoch" in options:
        raise RequestError(
            asked=f"epochs={epochs} and initial_epoch={options.get('initial_epoch', 'none')} say how long to train",
            found="a run has at least one epoch and continues at its checkpoint",
            remedy="Give epochs=1 or more, and leave initial_epoch out",
        )
