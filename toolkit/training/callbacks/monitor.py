"""Creates the callbacks of a run and puts them in order."""

from collections.abc import Sequence
from typing import Any

import keras

from toolkit import strategies
from toolkit.support.goodput import Account
from toolkit.training.callbacks.checkpointer import Best, Checkpointer
from toolkit.training.callbacks.profiler import Profiler
from toolkit.training.callbacks.recorder import Board, Recorder
from toolkit.training.callbacks.stop_signals import StopAgreement, StopSignals
from toolkit.training.callbacks.tracker import Tracker
from toolkit.training.checkpoints.data_position import DataPosition
from toolkit.training.checkpoints.host_state import CallbackState
from toolkit.training.checkpoints.position import Position
from toolkit.training.checkpoints.store import Checkpoint, CheckpointStore, NullCheckpointStore
from toolkit.training.directory import NullRunDirectory, RunDirectory

__all__ = ["Monitor"]


class Monitor:
    """Creates the callbacks of one `fit`, and afterwards returns what they measured.

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
        best: The metric by which the best model is kept, or the callback that an earlier `fit` has kept it by; None
            for no such model.
        checkpoint: What this process goes on from; None for a new run.
        resumed: Where this process goes on.
        profile: Keep a profile of so many steps for TensorBoard; True for a few, of which only the breakdown is kept;
            False for none.
        rows: Those of history.csv of earlier calls of `fit`.
        progress: Whether to show the run's own progress.
        account: Is told what time is spent on.

    Attributes:
        callbacks: For `fit`, in their order.
        best: The callback that keeps the best model; None for no such model.
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
        best: Best | str | None,
        checkpoint: Checkpoint | None,
        resumed: Position,
        profile: int | bool,
        rows: Sequence[dict],
        progress: bool,
        account: Account,
    ) -> None:
        callbacks = keras.tree.flatten(callbacks or [])
        self.best = Best(directory.best, best) if isinstance(best, str) else best
        if self.best is not None:
            callbacks.append(self.best)
        self.model = model
        strategy = model.distribute_strategy
        writes = isinstance(directory, RunDirectory)
        self._tracker = tracker = Tracker(
            epochs=epochs, resumed=resumed, global_batch_size=global_batch_size, account=account
        )
        steps = 0 if profile is True else profile
        self._profiler = Profiler(steps=steps, keep=directory.tensorboard, tracker=tracker)
        known = list(rows) if checkpoint is None else checkpoint.metadata["history"]
        self._recorder = Recorder(directory.history, known, earlier=rows, tracker=tracker, shows=progress, bar=writes)
        self._checkpointer = Checkpointer(
            store=store,
            stopping=StopAgreement(signals, strategy),
            recorder=self._recorder,
            tracker=tracker,
            callbacks=CallbackState(callbacks),
            data=data,
            every_steps=checkpoint_steps,
            resumed=checkpoint,
        )
        # The profile must end before speed is measured; the epoch's row must exist when its checkpoint is written;
        # the user's callbacks must have counted before they are saved.
        self.callbacks: list[keras.callbacks.Callback] = [tracker]
        others = any(
            isinstance(each, keras.callbacks.TensorBoard) and getattr(each, "_should_trace", True) for each in callbacks
        )
        # Only one callback at a time can profile.
        if writes and profile and not others and strategies.computes_here(strategy):
            self.callbacks.append(self._profiler)
        self.callbacks += callbacks
        if directory.tensorboard is not None:
            self.callbacks.append(Board(str(directory.tensorboard), write_graph=False))
        self.callbacks += [self._recorder, self._checkpointer]

    def say(self, line: str) -> None:
        """Shows a line in the way in which progress is shown; nothing for ""."""
        if line:
            self._recorder.say(line)

    @property
    def rows(self) -> list[dict]:
        """One row per epoch, including those of earlier processes."""
        return self._recorder.rows

    @property
    def examples_per_second(self) -> float | None:
        """Over all replicas, after the warm-up; None for too short a training."""
        return self._tracker.examples_per_second

    @property
    def global_batch_size(self) -> int | None:
        """Examples per step, over all replicas; None if too few steps were counted."""
        return self._tracker.global_batch_size

    @property
    def breakdown(self) -> dict[str, Any] | None:
        """Where a step's time goes; None if no profile could be taken."""
        found = self._profiler.breakdown
        return None if found is None else found.as_dict()

    @property
    def account(self) -> Account:
        """What time was spent on."""
        return self._tracker.account

    def close(self) -> None:
        """Ends what an exception may have left open: the progress bar, a profile, the model's step."""
        self._recorder.close()
        self._profiler.close()
        self._checkpointer.close()
