"""A run, from its directory to its summary: one call around `fit`."""

import contextlib
import logging
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from toolkit import cluster, devices, strategies
from toolkit.errors import Diverged, RequestError, StoppedBySignal, ToolkitError
from toolkit.support import umask
from toolkit.training import restoring, state
from toolkit.training.checkpoints import CheckpointStore, NullCheckpointStore
from toolkit.training.directory import NullRunDirectory, RunDirectory, choose
from toolkit.training.signals import StopSignals
from toolkit.training.summary import figures, last_line, provenance
from toolkit.training.together import broadcast_number, check_same

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from toolkit.cluster import Membership
    from toolkit.training.watching import Watching

__all__ = ["Run"]

_LOG = logging.getLogger(__name__)


class Run:
    """Holds a run directory, and trains in it: stopped anywhere, it goes on to the weights of an undisturbed run.

        with toolkit.training.Run("runs/mine", resume="auto") as run:
            strategy = toolkit.strategies.create("auto")
            with strategy.scope():
                model = build_model()
                model.compile(...)
            run.fit(model, dataset, epochs=5, validation_data=test)

    Args:
        directory: The run directory; None for a new one, or on resume the newest, under ./runs.
        recipe: Name of the program; the script's own unless given.
        resume: True to go on with the run that is there, "auto" to do so if there is one. A job that its launcher has
            started again does so too.
        checkpoint_steps: Write a checkpoint every so many steps too; 0 for after epochs only. The chief's counts.
        profile: Keep a profile of so many steps for TensorBoard; 0 for none.
        membership: Who takes part, and who this process is; None for what the environment says.
        chief: Whether this process writes the run directory; None for what the membership says. Any other process
            neither reads nor writes it.

    Attributes:
        membership: As given, or found in the environment.
        summary: What summary.json holds, once `fit` has returned.

    Raises:
        RunDirectoryError: The directory can't be used for this run.
        CheckpointError: There is nothing to resume.
        ClusterError: The environment describes no usable cluster.
    """

    def __init__(
        self,
        directory: str | os.PathLike | None = None,
        *,
        recipe: str | None = None,
        resume: bool | Literal["auto"] = False,
        checkpoint_steps: int = 0,
        profile: int = 0,
        membership: "Membership | None" = None,
        chief: bool | None = None,
    ) -> None:
        recipe = recipe or pathlib.Path(sys.argv[0]).stem or "run"
        if chief is None:
            membership = membership or cluster.discover(os.environ)
            chief = membership is None or membership.task == membership.cluster.chief
        self.membership = membership
        self.summary: dict[str, Any] = {}
        self._asked = directory
        self._resume = resume is True
        self._checkpoint_steps = checkpoint_steps
        self._profile = profile
        self._facts: dict[str, Any] = {"recipe": recipe}
        self._config: dict[str, Any] = {"recipe": recipe}
        self._signals = StopSignals()
        self._entered = contextlib.ExitStack()
        self._start = time.monotonic()
        self._resumed_step: int | None = None
        self._watching: Watching | None = None
        self._directory: RunDirectory | NullRunDirectory = NullRunDirectory()
        self._store: CheckpointStore | NullCheckpointStore = NullCheckpointStore()
        if chief:
            path, self._resume = choose(directory, recipe=recipe, resume=resume)
            self._directory = RunDirectory(path, recipe=recipe, resume=self._resume)
            self._store = CheckpointStore(self._directory.checkpoints)

    def __enter__(self) -> "Run":
        self._entered.enter_context(umask.guarded())  # TensorBoard, Keras and TensorFlow make files here too.
        self._entered.callback(self._directory.close)
        self._entered.enter_context(self._signals)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if self._watching is not None:
            self._watching.close()
        if self._watching is not None and isinstance(error, (StoppedBySignal, Diverged)):
            outcome = "diverged" if isinstance(error, Diverged) else "interrupted"
            try:
                self._write_summary(outcome, steps=getattr(error, "step", None))
            except OSError as full:  # The error is what the program ends on, and the directory is to be let go.
                _LOG.error("summary.json can't be written (%s)", full.strerror or full)
        self._entered.close()

    @property
    def path(self) -> pathlib.Path | None:
        """The run directory; None in a process that isn't chief."""
        return self._directory.path if isinstance(self._directory, RunDirectory) else None

    def record_config(self, **config: Any) -> None:
        """States what must not change between start and resume; it goes into run.json and summary.json.

        Args:
            config: Values that JSON can hold.

        Raises:
            CheckpointError: The run was started with other values.
            RunDirectoryError: They can't be written.
        """
        self._directory.record_config(config)
        self._config.update(config)
        self._facts.update(config)

    def add_facts(self, **facts: Any) -> None:
        """Adds facts, which may change on resume, to summary.json; after `fit` it is written anew."""
        self._facts.update(facts)
        if self.summary:
            self._write({**self.summary, **facts})

    def check_same(self, strategy: "tf.distribute.Strategy", **facts: Any) -> None:
        """Makes sure that all processes have recorded the same configuration, and agree on more. It is a collective.

        `fit` does so too; called before the model is built, it says what couldn't even be built together.

        Args:
            strategy: Whose processes train together.
            facts: What else must be the same; values that JSON can hold.

        Raises:
            StrategyError: On every process, where any two differ.
        """
        check_same(strategy, {**self._config, **facts})

    def fit(
        self,
        model: "keras.Model",
        x: Any = None,
        y: Any = None,
        *,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        validation_data: Any = None,
        callbacks: "Sequence[keras.callbacks.Callback]" = (),
        verbose: Any = 0,
        **options: Any,
    ) -> "keras.callbacks.History | None":
        """Calls `model.fit`, and around it writes checkpoints, history, TensorBoard's files, model.keras and a summary.

        A resumed run is brought to where it was stopped: model, optimizer, metrics, random states, the counters of
        callbacks, and the place in the data. An evaluator, beside a cluster that trains, evaluates each checkpoint
        instead.

        Args:
            model: Compiled.
            x: What `model.fit` takes, or a `toolkit.data.Batches`.
            y: As for `model.fit`.
            epochs: The epochs of the whole training, those of earlier processes included.
            steps_per_epoch: As for `model.fit`.
            validation_data: As for `model.fit`.
            callbacks: The user's own, in the same order whenever the run is resumed.
            verbose: Keras's own progress bar; unless it is asked for, a display that suits a log file as well.
            options: Whatever else `model.fit` takes, but for `initial_epoch`.

        Returns:
            What `model.fit` returns; None in an evaluator.

        Raises:
            RequestError: `fit` was called before in this run, or the arguments make no training.
            RunDirectoryError: The disk is too full.
            CheckpointError: No checkpoint can be used, it is another model's, or processes restored differently.
            StrategyError: The processes are about to train differently.
            StoppedBySignal: A signal has come, and a checkpoint is written.
            Diverged: A weight is NaN or infinite.
            ToolkitError: Checkpoints or results can't be written.
        """
        self._check_fit(epochs, options)
        if self.membership is not None and self.membership.task.job == "evaluator":
            from toolkit.training.following import follow

            follow(self._asked, model, validation_data, recipe=self._facts["recipe"])
            return None
        from toolkit.strategies.mesh import made_here
        from toolkit.training.data_position import DataPosition, batch_size_of, shuffled_by_keras
        from toolkit.training.watching import Watching

        batch_size = batch_size_of(x, options.get("batch_size"))
        if hasattr(x, "config"):  # A function of the step, such as `toolkit.data.Batches`.
            steps_per_epoch = steps_per_epoch or x.steps_per_epoch
            self.record_config(**x.config(), steps_per_epoch=steps_per_epoch)
        strategy = model.distribute_strategy
        described = strategies.describe(strategy)
        self.add_facts(**described, emulated=devices.emulated(), global_batch_size=batch_size)
        parameters = restoring.parameters(model)
        self.check_same(strategy, epochs=epochs, steps_per_epoch=steps_per_epoch, parameters=parameters)
        self.record_config()  # A run that records nothing has its name recorded, or it couldn't be resumed.
        checkpoint, resumed = restoring.restore(
            model, x, directory=self._directory, store=self._store, wanted=self._resume, epochs=epochs
        )
        self._resumed_step = None if checkpoint is None else checkpoint.step
        data = None
        if hasattr(x, "config"):
            x = x.train(start_step=resumed.step)
        else:
            one, same = described["strategy"] == "one_device", options.get("class_weight") is None
            looked_at = not one and not made_here(strategy)
            data = DataPosition(x, steps_per_epoch=steps_per_epoch, one_device=one, looked_at=looked_at, as_it_is=same)
            if checkpoint is not None:
                data.prepare(resumed, checkpoint.metadata.get("data", {}), checkpoint.arrays)
        self._watching = Watching(
            directory=self._directory,
            store=self._store,
            signals=self._signals,
            model=model,
            epochs=epochs,
            global_batch_size=batch_size,
            data=data,
            callbacks=callbacks,
            checkpoint_steps=broadcast_number(strategy, self._checkpoint_steps),
            checkpoint=checkpoint,
            resumed=resumed,
            profile=self._profile,
            progress=not verbose,
        )
        if not shuffled_by_keras(x):
            options.setdefault("shuffle", False)  # Keras warns where it can't do that itself.
        ended = checkpoint is not None and checkpoint.metadata.get("stop_training", False)
        options.update(epochs=epochs, steps_per_epoch=steps_per_epoch, validation_data=validation_data, verbose=verbose)
        first = epochs if ended else resumed.epoch
        history = model.fit(x, y, initial_epoch=first, callbacks=self._watching.callbacks, **options)
        self._finish(model)
        return history

    def _check_fit(self, epochs: int, options: dict) -> None:
        if self._watching is not None:
            remedy = "Open a Run in another directory for each call of fit"
            raise RequestError(asked="run.fit, again", found="a run directory holds one training", remedy=remedy)
        if epochs < 1 or "initial_epoch" in options:
            raise RequestError(
                asked=f"epochs={epochs} and initial_epoch={options.get('initial_epoch', 'none')} say how long to train",
                found="a run has an epoch or more, and goes on where its checkpoint stands",
                remedy="Give epochs=1 or more, and leave initial_epoch out",
            )

    def _finish(self, model: "keras.Model") -> None:
        """Writes model.keras and summary.json."""
        self._facts["weights_sha256"] = state.digest(model)
        try:
            self._directory.write_model(model)
            self._write_summary("completed")
        except OSError as error:
            raise ToolkitError(
                f"Training is done, but its results can't be written to {self.path} ({error.strerror or error}). "
                "The last checkpoint is kept: free some space or mend the disk, then resume."
            ) from error
        _LOG.info("%s", last_line(self.summary, self._directory.path))

    def _write_summary(self, outcome: str, *, steps: int | None = None) -> None:
        assert self._watching is not None
        summary = {
            **self._facts,
            "status": outcome,
            **figures(self._watching.rows, self._watching.examples_per_second, steps=steps),
            "wall_seconds": round(time.monotonic() - self._start, 3),
            "resumed_from_step": self._resumed_step,
            **provenance(),
            "step": self._watching.breakdown,
        }
        if report := strategies.report(self._watching.model):
            summary["parameter_servers"] = report
        self._write(summary)

    def _write(self, summary: dict[str, Any]) -> None:
        self.summary = summary
        self._directory.write_summary(summary)
