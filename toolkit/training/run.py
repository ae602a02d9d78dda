"""A run, from its directory to its summary, around a call of `fit`."""

import contextlib
import logging
import math
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from toolkit import cluster, devices, strategies
from toolkit.errors import Diverged, RequestError, StoppedBySignal
from toolkit.strategies.check import watching
from toolkit.support import files, status
from toolkit.support.goodput import Account
from toolkit.support.signals import StopSignals
from toolkit.training.checkpoints import Checkpoint, CheckpointStore, NullCheckpointStore, check_keep
from toolkit.training.compiled import Compiled
from toolkit.training.copying import Copy, NullCopy
from toolkit.training.directory import NullRunDirectory, RunDirectory, choose
from toolkit.training.restore import RunProcesses, complete_history, ended_for_good, in_words, restore
from toolkit.training.summary import Summary

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from toolkit.cluster import Membership
    from toolkit.training.data_position import DataPosition
    from toolkit.training.progress import EpochLog, Progress

_LOG = logging.getLogger(__name__)


class Run:
    """Trains in a run directory. A run that is stopped at any point resumes to the weights of an uninterrupted run.

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
        keep: How many checkpoints to keep, the newest ones; at least 1.
        best: A metric, such as "val_loss": the model of the epoch with its best value is kept as best.keras, as by
            `keras.callbacks.ModelCheckpoint`, which knows which metrics are to grow. None for no such model.
        copy_to: A URL such as "s3://bucket/mine" (gs://, az://, file:// and what else fsspec knows), to which the
            directory is copied while training goes on. On resume the newest checkpoint counts, of the directory or of
            the copy, so that another machine goes on where this one vanishes. None for no copy.
        profile: Keep a profile of so many steps for TensorBoard; True for a few, of which only the breakdown of their
            time is kept; False or 0 for none. Your own TensorBoard callback that profiles goes before.
        membership: Who takes part, and who this process is; None for what the environment says.
        chief: Whether this process, and no other, uses the run directory; None for what the membership says.

    Attributes:
        membership: As given, or found in the environment.

    Raises:
        RunDirectoryError: The directory or the copy can't be used for this run, or no checkpoint is to be kept.
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
        keep: int = 3,
        best: str | None = None,
        copy_to: str | os.PathLike | None = None,
        profile: int | bool = True,
        membership: "Membership | None" = None,
        chief: bool | None = None,
    ) -> None:
        if (elsewhere := watching.run_directory()) is not None:  # The script's own runs stay as they are.
            directory, resume = elsewhere, False
        recipe = recipe or {"default_worker": "ray"}.get(name := pathlib.Path(sys.argv[0]).stem, name) or "run"
        check_keep(keep)  # In every task, also those that keep none.
        if chief is None:
            membership = membership or cluster.discover(os.environ)
            chief = membership is None or membership.task == membership.cluster.chief
        self.membership, self._chief = membership, chief
        self._asked, self._resume, self._parts = directory, resume is True, 0
        self._checkpoint_steps, self._keep, self._best, self._profile = checkpoint_steps, keep, best, profile
        self._config: dict[str, Any] = {"recipe": recipe}
        self._signals, self._entered = StopSignals(), contextlib.ExitStack()
        self._account = Account()
        self._model: Any = None
        self._progress: Progress | None = None
        self._ended = False
        self._at_once = False  # A second signal has ended the run.
        self._opened: list[Any] = []  # The callbacks that an exception may have left open.
        self._rows: list[dict[str, Any]] = []  # The summaries of completed calls.
        self._directory: RunDirectory | NullRunDirectory = NullRunDirectory()
        self._store: CheckpointStore | NullCheckpointStore = NullCheckpointStore()
        self._copy: Copy | NullCopy = NullCopy()
        if chief:
            status.report(resumes=resume == "auto")
            if copy_to is not None:
                self._copy = Copy(copy_to, keep=keep)
            path, self._resume = choose(directory, recipe=recipe, resume=resume, copy=self._copy)
            self._directory = RunDirectory(path, recipe=recipe, resume=self._resume, copy=self._copy)
            self._store = CheckpointStore(self._directory.checkpoints, keep=keep, saved=self._copy.wake)
            self._copy.start()
            if directory is None and self._resume:
                _LOG.info("Resuming the run in %s", path)
        self._summary = Summary(self._directory, self._config, described=self.described)

    def __enter__(self) -> "Run":
        self._entered.enter_context(files.guarded())  # TensorBoard, Keras and TensorFlow also create files here.
        self._entered.callback(self._directory.close)
        self._entered.enter_context(self._signals)
        self._entered.callback(self._finish_copy)  # Called first: the directory is locked, and a signal ends it.
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        self._close_callbacks()
        self._at_once = isinstance(error, StoppedBySignal) and error.step is None
        if isinstance(error, (StoppedBySignal, Diverged)) and self._progress is not None:
            outcome = "diverged" if isinstance(error, Diverged) else "interrupted"
            try:
                self._summary.write(outcome, self._model, self._progress, steps=getattr(error, "step", None))
            except OSError as full:  # The program ends on this error, and the directory must be unlocked.
                _LOG.error("summary.json can't be written (%s)", full.strerror or full)
        self._entered.close()

    def update_copy(self) -> None:
        """Copies what was written into the run directory after the run, such as a report.

        It waits for that as long as tasks get to end (`toolkit launch --grace`); before the run ends, not at all.
        """
        if self._ended:
            self._finish_copy()
        else:
            self._copy.wake()

    def _finish_copy(self) -> None:
        self._ended = True
        self._copy.finish(0.0 if self._at_once else self._signals.left(status.grace()))

    @property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json, once `fit` has returned."""
        return self._summary.summary

    @property
    def path(self) -> pathlib.Path | None:
        """The run directory; None in a process that isn't the chief."""
        return self._directory.path if isinstance(self._directory, RunDirectory) else None

    def record_config(self, **config: Any) -> None:
        """Records configuration that must not change on resume; it goes into run.json and summary.json.

        Args:
            config: Values that JSON can hold.

        Raises:
            CheckpointError: The run was started with other values.
            RunDirectoryError: They can't be written.
        """
        self._directory.record_config(config)
        self._config.update(config)
        self._summary.facts.update(config)

    def add_facts(self, **facts: Any) -> None:
        """Adds facts that may change on resume to summary.json."""
        self._summary.add(facts)

    def described(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Returns the content of summary.json. Override it to add to it."""
        return summary

    def check_same(self, strategy: "tf.distribute.Strategy", **facts: Any) -> None:
        """Checks that all processes have recorded the same configuration and agree on more. All processes must call it.

        `fit` does so too; called before the model is built, it says what couldn't even be built together.

        Args:
            strategy: Whose processes train together.
            facts: What else must be the same; values that JSON can hold.

        Raises:
            StrategyError: On every process, where any two differ.
        """
        RunProcesses(strategy).check_same({**self._config, **facts})

    def fit(
        self,
        model: "keras.Model",
        x: Any = None,
        y: Any = None,
        *,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        validation_data: Any = None,
        callbacks: "Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None" = None,
        verbose: Any = 0,
        **options: Any,
    ) -> "keras.callbacks.History | None":
        """Calls `model.fit` and writes checkpoints, history, TensorBoard's files, model.keras and a summary.

        A resumed run is brought to where it was stopped: model, optimizer, metrics, random states, the counters of
        callbacks, and the place in the data. An evaluator, beside a cluster that trains, evaluates each checkpoint
        instead. Called again, as to fine-tune, it is the run's next part: a resumed script passes over complete ones.

        Args:
            model: Compiled.
            x: What `model.fit` takes, or a `toolkit.data.Batches`.
            y: As for `model.fit`.
            epochs: The epochs of the whole training, those of earlier processes included.
            steps_per_epoch: As for `model.fit`.
            validation_data: As for `model.fit`.
            callbacks: The user's own, one or several. What they counted is restored on resume, not their arguments.
            verbose: Keras's own progress bar; unless it is asked for, a display that suits a log file as well.
            options: Whatever else `model.fit` takes, but for `initial_epoch`.

        Returns:
            What `model.fit` returns, in a resumed run with the epochs of earlier processes; None in an evaluator.

        Raises:
            RequestError: The arguments make no training.
            RunDirectoryError: The disk is too full.
            CheckpointError: No checkpoint can be used, it is another model's, or processes restored differently.
            StrategyError: The processes are about to train differently.
            StoppedBySignal: A signal has come, and a checkpoint is written.
            Diverged: A weight is NaN or infinite.
            ToolkitError: Checkpoints or results can't be written.
        """
        if epochs < 1 or "initial_epoch" in options:
            raise RequestError(
                asked=f"epochs={epochs} and initial_epoch={options.get('initial_epoch', 'none')} say how long to train",
                found="a run has at least one epoch and continues at its checkpoint",
                remedy="Give epochs=1 or more, and leave initial_epoch out",
            )
        if self.membership is not None and self.membership.task.job == "evaluator":
            from toolkit.training.evaluator import follow

            follow(self._asked, model, validation_data, recipe=self._config["recipe"])
            return None
        from toolkit.data import Batches
        from toolkit.training.data_position import DataPosition, batch_size_of, shuffled_by_keras
        from toolkit.training.progress import EpochLog, Progress

        self._begin_part()
        parameters = sum(math.prod(variable.shape) for variable in model.variables)  # Without those of layers unbuilt.
        batch_size = batch_size_of(x, options.get("batch_size"))
        if not shuffled_by_keras(x):
            options.setdefault("shuffle", False)  # Keras warns if it can't do that itself.
        of_steps = isinstance(x, Batches)
        if of_steps:  # A function of the step.
            steps_per_epoch = steps_per_epoch or x.steps_per_epoch
            if self._parts == 1:
                self.record_config(**x.config(), steps_per_epoch=steps_per_epoch)
        strategy = model.distribute_strategy
        processes, described = RunProcesses(strategy), strategies.describe(strategy)
        self._summary.add({**described, "emulated": devices.emulated(), "global_batch_size": batch_size})
        processes.check_same(
            {**self._config, "epochs": epochs, "steps_per_epoch": steps_per_epoch, "parameters": parameters}
        )
        self._directory.record_config({})  # A run's name at least is recorded; otherwise it couldn't be resumed.
        compiled = Compiled(model)
        checkpoint, resumed = restore(
            model,
            x if y is None else (x, y),
            processes=processes,
            directory=self._directory,
            store=self._store,
            wanted=self._resume,
            epochs=epochs,
            compiled=compiled,
        )
        every_steps = processes.chiefs(self._checkpoint_steps)
        ended = ended_for_good(checkpoint, callbacks)
        self._account.resume({} if checkpoint is None else checkpoint.metadata.get("spent", {}))
        complete = self._summary.complete = checkpoint is not None and (ended or resumed.epoch >= epochs)
        self._summary.resumed_step = None if checkpoint is None else checkpoint.step
        data = None
        if of_steps:
            x = x.train(start_step=resumed.step)
        else:
            # Keras makes whole calls of `steps_per_execution` steps, as long as there is data.
            at_once = model.steps_per_execution
            data = DataPosition(
                x,
                strategy=None if described["strategy"] == "one_device" else strategy,
                steps_per_epoch=steps_per_epoch and -(-steps_per_epoch // at_once) * at_once,
                as_it_is=options.get("class_weight") is None,
            )
            if checkpoint is not None and not complete:
                data.prepare(resumed, checkpoint.metadata.get("data", {}), checkpoint.arrays)
        self._model = model
        self._progress = progress = Progress(
            epochs=epochs,
            resumed=resumed,
            rows=self._rows if checkpoint is None else checkpoint.metadata["history"],
            global_batch_size=batch_size,
            account=self._account,
            breakdown=None if checkpoint is None else checkpoint.metadata.get("breakdown"),
        )
        log = EpochLog(self._directory.history, progress, earlier=self._rows, shows=not verbose, bar=self._chief)
        ordered = self._callbacks(
            model,
            processes,
            progress,
            log,
            callbacks,
            data,
            checkpoint,
            compiled,
            profiles=bool(self._chief and self._profile) and described["strategy"] != "parameter_server",
            every_steps=every_steps,
        )
        options.update(epochs=epochs, steps_per_epoch=steps_per_epoch, validation_data=validation_data, verbose=verbose)
        if checkpoint is not None:
            log.say(in_words(resumed, epochs=epochs, ended=ended, directory=self.path))
        history = model.fit(x, y, initial_epoch=epochs if ended else resumed.epoch, callbacks=ordered, **options)
        self._opened = []  # They have closed themselves as training ended.
        complete_history(history, progress.rows[len(self._rows) :])
        self._summary.finish(model, progress)
        return history

    def _callbacks(
        self,
        model: "keras.Model",
        processes: RunProcesses,
        progress: "Progress",
        log: "EpochLog",
        callbacks: Any,
        data: "DataPosition | None",
        checkpoint: Checkpoint | None,
        compiled: Compiled,
        *,
        profiles: bool,
        every_steps: int,
    ) -> "list[keras.callbacks.Callback]":
        """Returns the callbacks of one `fit`, in their order.

        Args:
            model: Compiled.
            processes: Those that train together.
            progress: The first of them.
            log: The last but one.
            callbacks: The user's own: one, several, or None.
            data: The user's data; None where it begins at the right step by itself.
            checkpoint: What this process goes on from; None for a new run.
            compiled: How the model is compiled.
            profiles: Whether steps of this process may be profiled.
            every_steps: The steps between two checkpoints, on all processes.
        """
        import keras

        from toolkit.training.checkpointer import Best, Checkpointer
        from toolkit.training.progress import RunTensorBoard
        from toolkit.training.step_time import Profiler

        own = keras.tree.flatten(callbacks or [])
        if isinstance(self._best, str):  # Later parts of the run go on with this one: it knows the best value so far.
            self._best = Best(self._directory.best, self._best)
        if self._best is not None:
            own.append(self._best)
        # Only one callback at a time can profile.
        profiles = profiles and not any(
            isinstance(each, keras.callbacks.TensorBoard) and getattr(each, "_should_trace", True) for each in own
        )
        steps = 0 if self._profile is True else self._profile
        profiler = Profiler(steps=steps, keep=self._directory.tensorboard, progress=progress)
        checkpointer = Checkpointer(
            model,
            store=self._store,
            signals=self._signals,
            processes=processes,
            progress=progress,
            callbacks=own,
            data=data,
            every_steps=every_steps,
            resumed=checkpoint,
            compiled=compiled,
        )
        self._opened = [log, profiler, checkpointer]
        board = [RunTensorBoard(str(self._directory.tensorboard), write_graph=False)] if self._chief else []
        # The profile must end before speed is measured; the epoch's row must exist when its checkpoint is written;
        # the user's callbacks must have counted before they are saved.
        return [progress, *([profiler] if profiles else []), *own, *board, log, checkpointer]

    def loop(self, step: "Callable[[Any], Any]", data: Any, *, state: "Mapping[str, Any]", **options: Any) -> Any:
        """Calls your own step for each batch: a custom training loop with everything that `fit` does around it.

            run.loop(train_step, dataset, state={"model": model, "optimizer": optimizer}, epochs=5)

        Args:
            step: Is given each batch as `fit` reads it: under a strategy of several replicas it is distributed, for
                `strategy.run`. Returns the step's logs by name, a loss, or None; the last step's are the epoch's.
            state: What a checkpoint holds, by name: built models, optimizers, tf.Variables, metrics (reset each epoch).
            data: As `x` of `fit`.
            **options: As for `fit`.

        Raises:
            RequestError: The state can't be saved, or parameter servers would have to do the steps.
        """
        from toolkit.training.loop import loop_of

        return self.fit(loop_of(step, state, best=self._best, options=options), data, **options)

    def _begin_part(self) -> None:
        """Gives each call of `fit` its own checkpoints; an earlier call is complete by now."""
        self._close_callbacks()
        if self._progress is not None:
            self._rows = self._progress.rows
        self._parts += 1
        if self._parts > 1 and isinstance(self._directory, RunDirectory):
            again = self._directory.checkpoints.with_name(f"checkpoints-{self._parts}")
            self._store = CheckpointStore(again, keep=self._keep, saved=self._copy.wake)
            self._resume = self._resume and bool(self._store.names())

    def _close_callbacks(self) -> None:
        """Ends what an exception may have left open: the progress bar, a profile, the model's step."""
        for each in self._opened:
            each.close()
