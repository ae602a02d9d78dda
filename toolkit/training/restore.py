"""Brings a model to the position at which its run was stopped, in all processes of the run.

Their hosts need not see one another's disks: only what the chief has on its disk counts.
"""

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from toolkit.errors import CheckpointError, StrategyError, ToolkitError
from toolkit.support.history import is_own
from toolkit.support.words import counted
from toolkit.training import state
from toolkit.training.arrays import Arrays, Later, dtype_named
from toolkit.training.checkpoints import Checkpoint, CheckpointStore, NullCheckpointStore, Position
from toolkit.training.compiled import Compiled
from toolkit.training.directory import NullRunDirectory, RunDirectory

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_NAMED = 3  # The most differences that a message names.
_STEP = "the step"


class RunProcesses:
    """The processes that train a run together, and what they tell one another beside training.

    Every method is a collective, which all processes have to call in the same order.

    Args:
        strategy: Whose processes they are.

    Attributes:
        alone: Whether this process is the only one; then nothing is sent.
    """

    def __init__(self, strategy: "tf.distribute.Strategy") -> None:
        from toolkit.strategies.processes import agreement

        self._strategy, self._agreement = strategy, agreement
        self.alone = agreement.processes(strategy) == 1

    def chiefs(self, value: int) -> int:
        """Returns the chief's number on every process. Only the chief knows what is on its disk."""
        return value if self.alone else int(self._broadcast(np.array([value], np.int64))[0])

    def largest(self, *values: int) -> list[int]:
        """Returns the largest of all processes' values, for each of some."""
        if self.alone:
            return list(values)
        return [int(each) for each in self._agreement.extremes(self._strategy, np.array(values, np.int64))[1]]

    def all_do(self, action: Callable[[], _Result]) -> _Result:
        """Calls a function that may fail on one process, such as reading the chief's disk; then all processes fail.

        Args:
            action: What each of them does; it may do nothing on some.

        Raises:
            ToolkitError: The action raised it in this process.
            CheckpointError: The action failed on another process, which this one would wait for.
        """
        if self.alone:
            return action()
        try:
            result, error = action(), None
        except ToolkitError as own:
            error = own
        failures = self._agreement.gather(self._strategy, str(error or "").encode()[:4000])
        for name, text in zip(self._agreement.process_names(self._strategy), failures, strict=True):
            if text and error is None:
                raise CheckpointError(
                    asked="all tasks train together",
                    found=f"{name} can't begin: {text.decode(errors='replace').rstrip('.')}",
                    remedy="Correct that, and start all tasks again",
                )
        if error is not None:
            raise error
        return result

    def chiefs_checkpoint(self, checkpoint: Checkpoint | None) -> Checkpoint:
        """Returns the chief's checkpoint on every process. Reading one of its arrays is a collective, too.

        Args:
            checkpoint: The chief's own; None in the other processes.
        """
        if checkpoint is not None and self.alone:
            return checkpoint
        own = {} if checkpoint is None else Arrays.joined(checkpoint.arrays).later
        content = b""
        if checkpoint is not None:
            kinds = [[name, each.shape, each.dtype.name] for name, each in own.items()]
            facts = {"step": checkpoint.step, "metadata": checkpoint.metadata, "arrays": kinds}
            content = json.dumps(facts).encode()
        sent = np.empty(self.chiefs(len(content)), np.uint8)
        if content:
            sent[:] = np.frombuffer(content, np.uint8)
        self._agreement.set_to_chiefs(self._strategy, sent)
        facts = json.loads(sent.tobytes())

        def later(name: str, shape: Sequence[int], dtype: str) -> Later:
            def read() -> np.ndarray:
                array = own[name].read() if name in own else np.empty(shape, dtype_named(dtype))
                self._agreement.set_to_chiefs(self._strategy, array)
                return array

            return Later(shape=tuple(shape), dtype=dtype_named(dtype), read=read, together=True)

        arrays = Arrays({name: later(name, shape, dtype) for name, shape, dtype in facts["arrays"]})
        return Checkpoint(step=facts["step"], metadata=facts["metadata"], arrays=arrays)

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Checks that all processes are about to train the same: one with another seed would go unnoticed.

        Args:
            facts: Values that JSON can hold.

        Raises:
            StrategyError: On every process, where any two differ.
        """
        found = None if self.alone else self._agreement.difference(self._strategy, facts)
        if found is not None:
            theirs, chiefs = (_words(each, found.keys) for each in (found.theirs, found.chiefs))
            raise StrategyError(
                asked="all tasks must train with the same settings",
                found=f"{found.process} has {theirs}, and {found.chief} has {chiefs}",
                remedy="Start every task with the same flags and data",
            )

    def check_restored(self, model: "keras.Model", *, step: int) -> None:
        """Checks that all processes continue with the same weights and optimizers, bit for bit.

        Args:
            model: The model as it has been restored.
            step: The step of the checkpoint.

        Raises:
            CheckpointError: On every process, where any two differ.
        """
        if self.alone:
            return
        from toolkit.strategies.fit.equality import checksum

        sums = {name: checksum(array) for name, array in state.common(model).items()}
        found = self._agreement.difference(self._strategy, {**sums, _STEP: step})
        if found is not None:
            differ = [key for key in found.keys if key != _STEP]
            more = f" and {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
            raise CheckpointError(
                asked=f"all tasks continue after step {found.chiefs[_STEP]} with what {found.chief} has restored",
                found=f"{found.process} holds another {', '.join(differ[:_NAMED]) or 'step'}{more}",
                remedy="Resume once more; if that ends the same, look at that host's memory, drivers and versions",
            )

    def _broadcast(self, value: np.ndarray) -> np.ndarray:
        return self._agreement.broadcast(self._strategy, value)


def _words(facts: Mapping[str, Any], keys: list[str]) -> str:
    named = ", ".join(f"{key}={facts.get(key, 'none')}" for key in keys[:_NAMED])
    return named if len(keys) <= _NAMED else f"{named} and {len(keys) - _NAMED} more"


def restore(
    model: "keras.Model",
    data: Any,
    *,
    processes: RunProcesses,
    directory: RunDirectory | NullRunDirectory,
    store: CheckpointStore | NullCheckpointStore,
    wanted: bool,
    epochs: int,
    compiled: Compiled,
) -> tuple[Checkpoint | None, Position]:
    """Checks that the disk has room for checkpoints, and on resume sets all variables. All processes must call it.

    Args:
        model: Compiled.
        data: What is given to `fit` as `x`, by whose shapes the model is built where it isn't yet.
        processes: Those that train together.
        directory: The run directory, on whose disk there must be room.
        store: Where the chief reads the checkpoint, which it broadcasts to the others.
        wanted: Whether to resume. What the chief says counts: it alone sees what is on its disk.
        epochs: The epochs of the whole training, as they are asked for now.
        compiled: How the model is compiled; it is compiled again where a callback of the run had done so.

    Returns:
        The checkpoint, and where training goes on; None and the beginning for a new run.

    Raises:
        RunDirectoryError: The disk is too full.
        CheckpointError: No checkpoint can be used, it is another model's, or processes restored differently.
        ModelError: The model isn't built, and the data doesn't say its shapes.
    """
    from toolkit.strategies.variables import is_built

    resumes = bool(processes.chiefs(wanted))
    if resumes and not is_built(model):
        from toolkit.training.data_position import build

        build(model, data)

    def prepare() -> Checkpoint | None:
        directory.check_space(state.size_in_bytes(model))
        return store.load() if resumes else None

    found = processes.all_do(prepare)
    if not resumes:
        return None, Position()
    checkpoint = processes.chiefs_checkpoint(found)
    compiled.restore(checkpoint.metadata.get("compiled"))
    # Each process finds by itself whether it fits, but building variables needs all processes.
    state.restore(model, checkpoint.arrays)
    # The rest is kept during the first epoch; the variables' arrays are as large as the model and its optimizers. They
    # are kept, too, where a callback had compiled the model: it may do so again, which drops the variables.
    recompiled = checkpoint.metadata.get("compiled") is not None
    kept = checkpoint.arrays if recompiled else state.without_variables(checkpoint.arrays)
    checkpoint = dataclasses.replace(checkpoint, arrays=dict(kept))
    processes.check_restored(model, step=checkpoint.step)
    before = checkpoint.metadata["epochs"]
    if epochs != before:
        _LOG.warning(
            "The run began with epochs=%d and resumes with epochs=%d: a learning rate schedule follows the new length",
            before,
            epochs,
        )
    return checkpoint, Position(**{**checkpoint.metadata["position"], "step": checkpoint.step})


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


def in_words(resumed: Position, *, epochs: int, ended: bool, directory: object = None) -> str:
    """Returns the message about a resumed run.

    Args:
        resumed: Where it goes on.
        epochs: The epochs of the whole training.
        ended: Whether a callback has ended the training for good.
        directory: Where the run is, as far as this process knows.
    """
    if ended or resumed.epoch >= epochs:
        by = "EarlyStopping ended the training after " if ended else ""
        how = f" To train again, remove {directory} or name another directory." if directory else ""
        done = resumed.epoch if ended else epochs
        return f"Already complete: {by}{done} of {counted(epochs, 'epoch')}.{how}"
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
    names = list(history.history)
    # An epoch may have logged more than the last one: validation_freq is 2, say.
    logged = dict.fromkeys(column for row in earlier for column in row if not is_own(column))
    vectors = tuple(f"{name}_" for name in names if name not in logged)  # A row has each of their numbers by itself.
    names += [column for column in logged if column not in names and not column.startswith(vectors)]
    history.epoch[:0] = range(len(earlier))
    for name in names:
        found = [row.get(name, [v for key, v in row.items() if key.startswith(f"{name}_")]) for row in earlier]
        history.history[name] = [*(each for each in found if each != []), *history.history.get(name, ())]
