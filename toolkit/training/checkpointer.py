"""The callback that writes checkpoints, makes `fit` continue in the middle of an epoch, and stops it on a signal."""

import contextlib
import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.errors import CheckpointsFailing, Diverged, StoppedBySignal
from toolkit.strategies.step.local_steps import agrees
from toolkit.strategies.step.train_step import global_seeds, seeds_drawn
from toolkit.strategies.upstream import train_function
from toolkit.strategies.upstream.attributes import compiled_as
from toolkit.strategies.upstream.train_function import Around, StepFunction
from toolkit.strategies.variables import optimizers_of
from toolkit.support import files, status
from toolkit.support.signals import StopSignals
from toolkit.training import state
from toolkit.training.arrays import Arrays
from toolkit.training.checkpoints import Checkpoint, CheckpointStore, NullCheckpointStore, Position, Writing
from toolkit.training.compiled import Compiled
from toolkit.training.data_position import DataPosition, build
from toolkit.training.progress import Progress
from toolkit.training.restore import RunProcesses

_LOG = logging.getLogger(__name__)
_MOST_FAILURES = 3
_SECONDS = 0.5  # How often processes ask one another for signals; one exchange takes 1 to 2 ms on one machine.
_MOST_STEPS = 1000


class Checkpointer(keras.callbacks.Callback):
    """Writes a checkpoint after every epoch, every `every_steps` steps, and when a signal has arrived.

    Training waits while the state is copied, and goes on while the copy is written: one at a time, so the next waits
    for it, and so does whatever ends training. What became of it is known at a later step.

    A checkpoint holds everything that the next step depends on, so that a resumed run ends with the weights of one that
    was never stopped. In the epoch that it resumes in the middle of, the steps already done are passed over: `fit`
    counts them, callbacks see them, but nothing is computed. It comes last among the callbacks, so that it saves what
    the others have counted.

    Args:
        model: As it has been restored.
        store: Where checkpoints go.
        signals: What this process has received.
        processes: Those that stop together.
        progress: Where training stands; its rows are part of a checkpoint.
        callbacks: The user's, whose counters are part of a checkpoint.
        data: The user's data; None where it begins at the right step by itself.
        every_steps: 0 for checkpoints after epochs only. Processes ask one another at a checkpoint, so the number must
            be the same on all: it is the chief's.
        resumed: The checkpoint that this process goes on from; None for a new run.
        compiled: How the model is compiled, which callbacks may change.

    Raises:
        Diverged: At a checkpoint, where a weight is NaN or infinite: no checkpoint is written then.
        CheckpointsFailing: At the step after the third checkpoint in a row couldn't be written.
        StoppedBySignal: After the checkpoint for it.
    """

    reads_weights = False  # All processes do so together.

    def __init__(
        self,
        model: keras.Model,
        *,
        store: CheckpointStore | NullCheckpointStore,
        signals: StopSignals,
        processes: RunProcesses,
        progress: Progress,
        callbacks: Sequence[keras.callbacks.Callback],
        data: DataPosition | None = None,
        every_steps: int = 0,
        resumed: Checkpoint | None = None,
        compiled: Compiled,
    ) -> None:
        super().__init__()
        self.store = store
        self.signals = signals
        self.processes = processes
        self.progress = progress
        self.callbacks = state.CallbackState(callbacks)
        self.data = data
        self.every_steps = every_steps
        self.resumed = resumed
        self.compiled = compiled
        self.saved_step: int | None = None
        self._logs: Any = None  # Of the last step.
        self._metrics: dict = {}
        self._unbuilt_metrics: dict = {}
        self._compiled_again = False  # By a callback in this process, so that metrics aren't built.
        self._random_at_epoch: dict | None = None
        self._function: StepFunction | None = None
        self._around: Any = self  # As what the model was compiled when this was put around its step: not yet.
        self._failures = 0
        self._writing: Writing | None = None
        self._received: int | None = None  # Signals and checkpoints wait until replicas agree.
        self._due = False
        self._scalars: list[tuple[Any, np.ndarray]] = []  # The optimizers' rates and counters as they were restored.
        if progress.resumed.batch:
            scalars = (v for each in optimizers_of(model) for v in each.variables if len(v.shape) == 0)
            self._scalars = [(each, np.array(keras.ops.convert_to_numpy(each.value))) for each in scalars]  # Copies.
        self._next_question = 0  # The step after which processes ask one another again.
        self._asked: tuple[int, float] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.signals.held = True
        self.callbacks.begin()
        if self.resumed is not None and not self.progress.resumed.batch:
            self._restore_host(self.resumed)
        if self.data is not None:
            self.data.begin()
        self._restore_variables()
        self._stand_around()

    def _stand_around(self) -> None:
        """Puts this around the model's step; once more where a callback has compiled the model, which drops that."""
        before, self._around = self._around, compiled_as(self.model)
        if self._around is not before and (self.data is not None or self.progress.resumed.batch):
            # `fit` can't begin an epoch in its middle: `initial_epoch` counts whole epochs.
            self._function = train_function.put(self.model, "train", Around.SKIPPING, self._step)

    def _restore_variables(self) -> None:
        """Sets the variables again, where a callback has compiled the model as it had before the checkpoint."""
        if self.compiled.seen() and self.resumed is not None and self.resumed.metadata.get("compiled") is not None:
            state.restore(self.model, self.resumed.arrays)
            self._compiled_again = True

    def _step(self, within: Callable, iterator: Any) -> Any:
        if self._unbuilt_metrics and (isinstance(iterator, tf.data.Iterator) or self._compiled_again):
            build(self.model, iterator)  # The metrics of one device are built by the first computed step.
            state.restore_metrics(self.model, self._unbuilt_metrics)
        self._unbuilt_metrics = {}
        if self.data is not None and iterator is not self.data.iterator:
            self.data.use(iterator)
        return self._passed_over() if self.progress.passing_over else within(iterator)

    def _passed_over(self) -> dict:
        """Returns the logs of the last step before the checkpoint: an epoch may have no other, and they may be its."""
        logs = self.resumed.metadata.get("logs") if self.resumed is not None else None
        return self.model.get_metrics_result() if logs is None else {name: np.asarray(logs[name]) for name in logs}

    def _restore_scalars(self) -> None:
        """Undoes what callbacks did when they received an epoch's begin for the second time."""
        with self.model.distribute_strategy.scope():
            for variable, value in self._scalars:
                variable.assign(value)

    def _restore_host(self, resumed: Checkpoint) -> None:
        """Sets callbacks' counters, and the random state unless the data restores it."""
        self.callbacks.restore(resumed.metadata.get("callbacks", []), resumed.arrays)
        if "random" in resumed.metadata and (self.data is None or self.data.random_state == "restored"):
            state.restore_random(resumed.metadata["random"]["now"])
        if resumed.metadata.get("seeds") is not None:  # Of draws without a seed, whatever the data draws.
            global_seeds(self.model).state.assign(resumed.metadata["seeds"])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._stand_around()
        if self.resumed is not None and epoch == self.progress.resumed.epoch:
            if self.progress.resumed.batch:
                self._restore_variables()
                self._metrics = self._unbuilt_metrics = state.metrics_in(self.resumed.arrays)
                state.restore_metrics(self.model, self._metrics)
            if self.data is not None and self.data.random_state == "restored at the epoch's begin":
                state.restore_random(self.resumed.metadata["random"]["at_epoch"])
        self._random_at_epoch = state.random_state()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._writing is not None and self._writing.ended:
            self._finish()
        position, self._logs = self.progress.position, logs
        if self.progress.passing_over:
            self._stand_around()
            if batch + 1 >= self.progress.resumed.batch and self.resumed is not None:
                self._restore_host(self.resumed)  # The callbacks have now seen all skipped steps.
                self._restore_variables()
                self._restore_scalars()
            return
        # This call's steps include a multiple of every_steps (with steps_per_execution there are several).
        before = position.step - self.progress.made
        due = self._due or (bool(self.every_steps) and before // self.every_steps < position.step // self.every_steps)
        received = self._signal(position.step) or self._received
        if not (received or due):
            return
        if not agrees(self.model):  # Replicas that train locally will average in some steps.
            self._received, self._due = received, due
            return
        if received is not None:
            self._stop(received, position, state.capture_metrics(self.model))
        elif due:
            self._due = False
            self._save(position, state.capture_metrics(self.model))

    def on_test_begin(self, logs: Any = None) -> None:
        # Validation resets the metrics that it shares with training.
        self._metrics = state.capture_metrics(self.model)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        # Several processes agree at the end of the epoch.
        received = self.signals.received if self.processes.alone and self.signals.held else None
        if received is not None:
            self._stop(received, self.progress.position, self._metrics)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        position = self.progress.position
        received = self._signal(position.step, ask=True)
        if received is not None:
            self._stop(received, position, {})
        else:
            self._save(position, {})

    def on_train_end(self, logs: Any = None) -> None:
        self._finish()
        self.close()

    def close(self) -> None:
        """Gives the model its step function back; also called if `fit` ended in an exception."""
        self.signals.held = False
        if self._function is not None:
            self._function.put(Around.SKIPPING, None)
            self._function = None
        with contextlib.suppress(CheckpointsFailing):  # It is in the log, and another exception is the cause.
            self._finish()

    def _signal(self, step: int, *, ask: bool = False) -> int | None:
        """Returns the number of the signal on which all processes stop after this step; None for none.

        A process that stopped by itself would leave the others waiting in the next step's all-reduce.

        Args:
            step: Steps done in all; every process asks after the same ones.
            ask: Ask the other processes even if they were asked a moment ago.
        """
        if self.processes.alone:
            return self.signals.received
        if not ask and step < self._next_question:
            return None
        interval = 1
        now = time.monotonic()
        if self._asked is not None and step > self._asked[0]:
            seconds = (now - self._asked[1]) / (step - self._asked[0])
            interval = max(1, min(_MOST_STEPS, int(_SECONDS / seconds)))
        # The smallest interval that any process proposes, computed as a maximum of negative numbers.
        received, negative = self.processes.largest(self.signals.received or 0, -interval)
        self._next_question = step - negative
        self._asked = (step, time.monotonic())
        return received or None

    def _save(self, position: Position, metrics: dict) -> None:
        with status.in_phase("saving"), self.progress.account.during("saving"):
            self._start_writing(position, metrics)

    def _start_writing(self, position: Position, metrics: dict) -> None:
        arrays = state.capture(self.model)
        self._finish()  # Not before: other processes that read variables together wait ten minutes only for the chief.
        good = self.saved_step or self.progress.resumed.step or None
        check_finite(self.model, arrays, self.processes, step=position.step, good=good, directory=self.store.directory)
        callbacks, callback_arrays = self.callbacks.capture()
        now = state.random_state()
        data, data_arrays = self.data.capture(position) if self.data is not None else ({}, {})
        checkpoint = Checkpoint(
            step=position.step,
            arrays=Arrays.joined(arrays, metrics, callback_arrays, data_arrays),
            metadata={
                "position": dataclasses.asdict(position),
                "epochs": self.progress.epochs,
                "history": list(self.progress.rows),
                "breakdown": self.progress.breakdown,
                "callbacks": callbacks,
                "data": data,
                "logs": {name: np.asarray(value).tolist() for name, value in (self._logs or {}).items()},
                "seeds": seeds_drawn(),
                "random": {"now": now, "at_epoch": self._random_at_epoch if position.batch else now},
                "spent": self.progress.account.state,
                "compiled": self.compiled.capture(),
                "stop_training": bool(self.model.stop_training) and self.callbacks.have_ended_it,
            },
        )
        self._writing = Writing(self.store, checkpoint, end_of_epoch=position.batch == 0)

    def _finish(self) -> None:
        """Waits for the checkpoint that is being written, if there is one."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        step = writing.step
        try:
            with self.progress.account.during("saving"):
                writing.finish()
        except OSError as error:
            self._failures += 1
            _LOG.error("The checkpoint of step %d can't be written (%s); earlier ones are kept", step, error)
            if self._failures >= _MOST_FAILURES:
                raise CheckpointsFailing(
                    f"{self._failures} checkpoints in a row could not be written to {self.store.directory} ({error}). "
                    "Free some space or mend the disk, then resume."
                ) from error
            return
        self._failures = 0
        self.saved_step = step
        status.report(checkpoint=step, checkpoints=str(self.store.directory))

    def _stop(self, number: int, position: Position, metrics: dict) -> None:
        self._save(position, metrics)
        self._finish()
        raise StoppedBySignal(number, step=self.saved_step)


class Best(keras.callbacks.ModelCheckpoint):
    """Keeps the model of the best epoch, as Keras does. The file is always complete.

    Args:
        path: The .keras file.
        monitor: The metric.
    """

    def __init__(self, path: pathlib.Path, monitor: str) -> None:
        super().__init__(str(path.with_name(".writing-best.keras")), monitor, save_best_only=True)
        self._place = path

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        aside, before = pathlib.Path(self.filepath), getattr(self, "best", None)
        try:
            super().on_epoch_end(epoch, logs)
            if aside.exists():
                files.sync(aside)
                aside.rename(self._place)
        except OSError as error:
            self.best = before
            aside.unlink(missing_ok=True)
            _LOG.error("%s can't be written (%s); the earlier one is kept", self._place, error.strerror or error)


def check_finite(
    model: keras.Model,
    arrays: Arrays,
    processes: RunProcesses,
    *,
    step: int,
    good: int | None,
    directory: object,
) -> None:
    """Checks that a model's weights are finite. All processes must call it.

    Each looks at what it has: its shards, and its own statistics of BatchNormalization. So they agree.

    Args:
        model: The model.
        arrays: What `state.capture` returned for it.
        processes: Those that train it.
        step: Where training stands.
        good: The step of the last checkpoint that was written; None if there is none.
        directory: Where checkpoints are.

    Raises:
        Diverged: On every process, where a weight of any is NaN or infinite.
    """
    weights = {name: each for name, each in arrays.later.items() if name.startswith("model/")}
    bad = [name for name, each in weights.items() if not all(map(_finite, each.own))]
    (most,) = processes.largest(len(bad))
    if not most:
        return
    first = f" (the first is {model.variables[int(bad[0].split('/')[1])].path})" if bad else ""
    kept = "there is no checkpoint yet" if good is None else f"the last good one is step {good} in {directory}"
    raise Diverged(
        f"Training has diverged: after step {step}, {most} of {len(weights)} weights hold NaN or infinity{first}. "
        f"These weights are not saved; {kept}. "
        "Train with a lower learning rate, or check the data for NaN and infinity."
    )


def _finite(array: np.ndarray) -> bool:
    if array.dtype.kind in "biuS":
        return True
    # NumPy has no finiteness check for bfloat16 and float8.
    return bool(np.isfinite(array if array.dtype.kind in "fc" else array.astype(np.float32)).all())
