"""The callbacks of a run, made and put in order in one place."""

from collections.abc import Sequence
from typing import Any

import keras

from toolkit import strategies
from toolkit.training.board import Board
from toolkit.training.callback_state import CallbackState
from toolkit.training.checkpoints import Checkpoint, CheckpointStore, NullCheckpointStore
from toolkit.training.data_position import DataPosition
from toolkit.training.directory import NullRunDirectory, RunDirectory
from toolkit.training.history import History
from toolkit.training.position import Position
from toolkit.training.profiling import Profiling
from toolkit.training.progress import ProgressDisplay
from toolkit.training.reporting import Reporting
from toolkit.training.saving import Saving
from toolkit.training.signals import StopSignals
from toolkit.training.stopping import Stopping
from toolkit.training.throughput import Throughput
from toolkit.training.tracker import Tracker

__all__ = ["Watching"]


class Watching:
    """Makes the callbacks of one `fit`, and says afterwards what they have seen.

    Args:
        directory: Where history and TensorBoard's files go.
        store: Where checkpoints go.
        signals: What this process has received.
        model: The compiled model.
        epochs: The epochs of the whole training.
        global_batch_size: Examples per step, over all replicas; None where it isn't known beforehand.
        data: The user's data; None where it begins at the right step by itself.
        callbacks: The user's own: one, several, or None.
        checkpoint_steps: Write a checkpoint every so many steps too; 0 for after epochs only.
        checkpoint: What this process goes on from; None for a new run.
        resumed: Where this process goes on.
        profile: Keep a profile of so many steps for TensorBoard; True for a few, of which only the breakdown is kept;
            False for none.
        rows: Those of history.csv of earlier calls of `fit`.
        progress: Whether to show the run's own progress.

    Attributes:
        callbacks: For `fit`, in their order.
    """

    def __init__(
        self,
        *,
        directory: RunDirectory | NullRunDirectory,
        store: CheckpointStore | NullCheckpointStore,
        signals: StopSignals,
        model: keras.Model,
        epochs: int,
        global_batch_size: int | None,
        data: DataPosition | None,
        callbacks: Any,
        checkpoint_steps: int,
        checkpoint: Checkpoint | None,
        resumed: Position,
        profile: int | bool,
        rows: Sequence[dict],
        progress: bool,
    ) -> None:
        callbacks = keras.tree.flatten(callbacks or [])
        self.model = model
        strategy = model.distribute_strategy
        writes = isinstance(directory, RunDirectory)
        tracker = Tracker(epochs=epochs, resumed=resumed)
        self._throughput = Throughput(global_batch_size, tracker=tracker)
        self._profiling = Profiling(
            steps=0 if profile is True else profile, keep=directory.tensorboard, tracker=tracker
        )
        self._progress = ProgressDisplay(tracker=tracker, throughput=self._throughput, bar=writes)
        known = list(rows) if checkpoint is None else checkpoint.metadata["history"]
        self._history = History(directory.history, known, earlier=rows, tracker=tracker, throughput=self._throughput)
        # The profile must be over when throughput begins to count; the history's row must be there when the epoch's
        # checkpoint is written; the user's callbacks have counted before they are saved.
        self.callbacks: list[keras.callbacks.Callback] = [tracker]
        others = any(
            isinstance(each, keras.callbacks.TensorBoard) and getattr(each, "_should_trace", True) for each in callbacks
        )
        if writes and profile and not others and strategies.computes_here(strategy):  # One at a time can profile.
            self.callbacks.append(self._profiling)
        self.callbacks += [*callbacks, self._throughput, Reporting(tracker=tracker, throughput=self._throughput)]
        if progress:
            self.callbacks.append(self._progress)
        if directory.tensorboard is not None:
            self.callbacks.append(Board(str(directory.tensorboard), write_graph=False))
        self._saving = Saving(
            store=store,
            stopping=Stopping(signals, strategy),
            history=self._history,
            tracker=tracker,
            callbacks=CallbackState(callbacks),
            data=data,
            every_steps=checkpoint_steps,
            resumed=checkpoint,
        )
        self.callbacks += [self._history, self._saving]

    def say(self, line: str) -> None:
        """Shows a line, as the progress of training is shown; "" for none."""
        if line:
            self._progress.say(line)

    @property
    def rows(self) -> list[dict]:
        """One row per epoch, those of earlier processes included."""
        return self._history.rows

    @property
    def examples_per_second(self) -> float | None:
        """Over all replicas, after warm-up; None for a training that was too short."""
        return self._throughput.examples_per_second

    @property
    def breakdown(self) -> dict[str, Any] | None:
        """Where a step's time goes; None where no profile could be taken."""
        found = self._profiling.breakdown
        return None if found is None else found.as_dict()

    def close(self) -> None:
        """Ends what training may have been stopped in the midst of: the progress bar, a profile, the model's step."""
        self._progress.close()
        self._profiling.close()
        self._saving.close()
