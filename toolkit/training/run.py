"""A run, from its directory to its summary."""

import functools
import logging
import math
import os
import pathlib
import time
from typing import TYPE_CHECKING, Any

from toolkit import strategies
from toolkit.errors import Diverged, StoppedBySignal, ToolkitError
from toolkit.support import files, redaction, status, umask
from toolkit.training import state
from toolkit.training.checkpoints import Checkpoint, CheckpointStore
from toolkit.training.comparing import compare, compare_restored
from toolkit.training.directory import RunDirectory, choose, expanded
from toolkit.training.elsewhere import DirectoryElsewhere, NoCheckpoints
from toolkit.training.handing import chiefs_choice, chiefs_number, hand_over, together
from toolkit.training.length import Length
from toolkit.training.position import Position
from toolkit.training.signals import StopSignals
from toolkit.training.stopping import Stopping
from toolkit.training.summary import closing, command, versions

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

__all__ = ["Run"]

_LOG = logging.getLogger(__name__)


class Run:
    """Holds a run directory, resumes from it, and gives `fit` its callbacks.

        with Run(directory, recipe="mine", resume=resume, chief=chief) as run:
            run.settle(model="small_cnn", seed=1)
            ...  # build and compile `model` under the strategy's scope
            run.restore(model, length)
            model.fit(batches.train(run.step), initial_epoch=run.epoch, epochs=length.epochs,
                      steps_per_epoch=length.steps_per_epoch, callbacks=run.callbacks(...), verbose=0)
            run.finish(model)

    Args:
        directory: The run directory; None for a new one, or on resume the newest, under ./runs.
        recipe: Name of the program.
        resume: Go on with the run that is there. A job that its launcher has started again does so too.
        chief: False on a worker that isn't chief: the directory is then the chief's, and is neither
            read nor written here.

    Attributes:
        step: Training steps done by earlier processes of this run.
        epoch: Whole epochs done by them.

    Raises:
        RunDirectoryError: The directory can't be used for this run.
        CheckpointError: There is nothing to resume.
    """

    def __init__(
        self, directory: str | os.PathLike | None, *, recipe: str, resume: bool = False, chief: bool = True
    ) -> None:
        self.directory: RunDirectory | DirectoryElsewhere = DirectoryElsewhere()
        self.store: CheckpointStore | NoCheckpoints = NoCheckpoints()
        if chief:
            path = choose(recipe, resume=resume) if directory is None else directory
            if status.restarted() and not resume:  # The job failed, and whoever started it has done so again.
                resume = bool(CheckpointStore(expanded(path) / "checkpoints").names())
            self.directory = RunDirectory(path, recipe=recipe, resume=resume)
            self.store = CheckpointStore(self.directory.checkpoints)
        self.step = 0
        self.epoch = 0
        self._resume = resume
        self._summary: dict[str, Any] = {"recipe": recipe}
        self._settled: dict[str, Any] = {"recipe": recipe}
        self._signals = StopSignals()
        self._guard = umask.guarded()  # TensorBoard, Keras and TensorFlow make files here too.
        self._began = time.monotonic()
        self._length = Length(epochs=1, steps_per_epoch=1)
        self._resumed = Position()
        self._metrics: dict = {}
        self._rows: list[dict] = []
        self._throughput: Any = None
        self._history: Any = None
        self._strategy: Any = None
        self._model: Any = None
        self._progress: Any = None
        self._profiling: Any = None

    def __enter__(self) -> "Run":
        self._guard.__enter__()
        self._signals.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if self._progress is not None:
            self._progress.close()
            self._profiling.close()
        if isinstance(error, (StoppedBySignal, Diverged)) and self._history is not None:
            try:
                self._write_summary(
                    "diverged" if isinstance(error, Diverged) else "interrupted", steps=getattr(error, "step", None)
                )
            except OSError as full:  # The error is what the program ends on, and the directory is to be let go.
                _LOG.error("summary.json can't be written (%s)", full.strerror or full)
        self._signals.__exit__()
        self.directory.close()
        self._guard.__exit__(None, None, None)

    def settle(self, **config: Any) -> None:
        """States what must not change between start and resume; it goes into run.json and summary.json.

        Args:
            config: Values that JSON can hold.

        Raises:
            CheckpointError: The run was started with other values.
            RunDirectoryError: They can't be written.
        """
        self.directory.settle(config)
        self._settled.update(config)
        self._summary.update(config)

    def describe(self, **facts: Any) -> None:
        """Adds facts, which may change on resume, to summary.json."""
        self._summary.update(facts)

    def compare(self, strategy: "tf.distribute.Strategy", **facts: Any) -> None:
        """Makes sure that all processes have settled the same, and agree on more. It is a collective.

        Call it before the model is built, which different ones can't do together; `restore` compares again.

        Args:
            strategy: Whose processes train together.
            facts: What else must be the same; values that JSON can hold.

        Raises:
            StrategyError: On every process, where any two differ.
        """
        compare(strategy, {**self._settled, **facts})

    def restore(self, model: "keras.Model", length: Length) -> None:
        """Checks that the disk has room for checkpoints, and on resume sets everything that was saved.

        Call it after `compile`, before `fit`. Where several processes train together, the chief
        reads the checkpoint and hands it to the others.

        Raises:
            RunDirectoryError: The disk is too full.
            CheckpointError: No checkpoint can be used, it is another model's, or processes restored differently.
            StrategyError: The processes are about to train differently.
        """
        lengths = {"epochs": length.epochs, "steps_per_epoch": length.steps_per_epoch}
        self.compare(model.distribute_strategy, **lengths, parameters=sum(math.prod(v.shape) for v in model.variables))
        self.settle()  # A run that settles nothing has its name recorded, or it couldn't be resumed.
        self._length = length
        self._strategy = model.distribute_strategy
        self._model = model
        checkpoint = together(self._strategy, functools.partial(self._prepare, model))
        # A job that is started again resumes where the chief has a checkpoint; others can't know.
        self._resume = chiefs_choice(model.distribute_strategy, self._resume)
        if not self._resume:
            return
        checkpoint = hand_over(model.distribute_strategy, checkpoint)
        state.restore(model, checkpoint.arrays)
        compare_restored(model, step=checkpoint.step)
        if length.epochs != checkpoint.metadata["epochs"]:
            _LOG.warning(
                "The run was started for %d epochs and goes on for %d: the learning rate follows the new length",
                checkpoint.metadata["epochs"],
                length.epochs,
            )
        self._resumed = Position(**checkpoint.metadata["position"])
        self._metrics = state.metrics_in(checkpoint.arrays)
        self._rows = list(checkpoint.metadata["history"])
        self.step, self.epoch = checkpoint.step, self._resumed.epoch
        _LOG.info("Resumed after step %d (epoch %d, step %d in it)", self.step, self.epoch + 1, self._resumed.batch)

    def _prepare(self, model: "keras.Model") -> Checkpoint | None:
        self.directory.check_space(state.size_in_bytes(model))
        if not self._resume or not isinstance(self.store, CheckpointStore):
            return None
        checkpoint = self.store.load()
        state.check(model, checkpoint.arrays)
        return checkpoint

    def callbacks(
        self, *, global_batch_size: int, checkpoint_steps: int = 0, profile: int = 0
    ) -> "list[keras.callbacks.Callback]":
        """Returns the callbacks of this run: profile, throughput, TensorBoard, progress, history, checkpoints.

        Args:
            global_batch_size: Examples per step, over all replicas.
            checkpoint_steps: Write a checkpoint every so many steps too; 0 for after epochs only. The chief's counts.
            profile: Keep a profile of so many steps for TensorBoard; 0 for none.
        """
        from toolkit.training.board import Board
        from toolkit.training.history import History
        from toolkit.training.profiling import Profiling
        from toolkit.training.progress import ProgressDisplay
        from toolkit.training.reporting import Reporting
        from toolkit.training.saving import Saving
        from toolkit.training.throughput import Throughput

        self._throughput = Throughput(global_batch_size, resumed=self._resumed)
        self._history = History(
            self.directory.history if isinstance(self.directory, RunDirectory) else None,
            self._rows,
            steps_per_epoch=self._length.steps_per_epoch,
            throughput=self._throughput,
        )
        self._progress = ProgressDisplay(
            length=self._length, throughput=self._throughput, bar=isinstance(self.directory, RunDirectory)
        )
        saving = Saving(
            store=self.store,
            stopping=Stopping(self._signals, self._strategy),
            history=self._history,
            length=self._length,
            every_steps=chiefs_number(self._strategy, checkpoint_steps),
            resumed=self._resumed,
            metrics=self._metrics,
        )
        self._profiling = Profiling(
            steps=profile,
            keep=self.directory.tensorboard if isinstance(self.directory, RunDirectory) else None,
            resumed=self._resumed,
            steps_per_epoch=self._length.steps_per_epoch,
        )
        # The profile must be over when throughput begins to count; the history's row must be there when the epoch's
        # checkpoint is written.
        profiled = isinstance(self.directory, RunDirectory) and strategies.computes_here(self._strategy)
        watching = [self._profiling] if profiled else []
        watching += [self._throughput, Reporting(length=self._length, throughput=self._throughput), self._progress]
        if isinstance(self.directory, RunDirectory):
            watching.append(Board(str(self.directory.tensorboard), write_graph=False))
        return [*watching, self._history, saving]

    def finish(self, model: "keras.Model") -> dict[str, Any]:
        """Writes model.keras and summary.json; returns the summary.

        Raises:
            ToolkitError: They can't be written. The checkpoints are there all the same.
        """
        self._summary["weights_sha256"] = state.digest(model)
        try:
            if isinstance(self.directory, RunDirectory):
                self._write_model(model, self.directory.model)
            summary = self._write_summary("completed")
        except OSError as error:
            raise ToolkitError(
                f"Training is done, but its results can't be written to {self.directory.path} "
                f"({error.strerror or error}). "
                "The last checkpoint is kept: free some space or mend the disk, then resume."
            ) from error
        _LOG.info("%s", closing(summary, self.directory.path))
        return summary

    def _write_model(self, model: "keras.Model", path: pathlib.Path) -> None:
        with files.replacing(path, name=".writing.keras") as aside:  # Keras tells the format by the end of the name.
            model.save(aside)
            files.sync(aside)
        files.sync(path.parent)

    def _write_summary(self, outcome: str, *, steps: int | None = None) -> dict[str, Any]:
        rows = self._history.rows
        last = rows[-1] if rows else {}
        rate = self._throughput.images_per_second
        summary = {
            **self._summary,
            "status": outcome,
            "epochs": len(rows),
            "steps": max(last.get("step", 0), steps or 0),
            "train_loss": last.get("loss"),
            "train_accuracy": last.get("accuracy"),
            "test_loss": last.get("val_loss"),
            "test_accuracy": last.get("val_accuracy"),
            "images_per_second": round(rate, 1) if rate else None,
            "wall_seconds": round(time.monotonic() - self._began, 3),
            "resumed_from_step": self.step if self._resume else None,
            "versions": versions(),
            "command": redaction.masked_command(command(), os.environ),
            "launch_logs": status.logs(),
        }
        step = self._profiling.breakdown
        summary["step"] = step and step.as_dict()
        said = strategies.report(self._model) if self._model is not None else {}
        if said:
            summary["parameter_servers"] = said
        if isinstance(self.directory, RunDirectory):
            files.write_json(self.directory.summary, redaction.masked_all(summary, os.environ))
        return summary
