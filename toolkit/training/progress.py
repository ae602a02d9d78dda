"""A run's progress: where training stands, how fast it goes, what its time is spent on, and what is shown of it.

`Progress` comes first among the callbacks of a run and counts; the others ask it. `EpochLog` comes after the user's
own, and tells what an epoch came to: history.csv, the screen or a log file, and the launcher. `RunTensorBoard` writes
TensorBoard's files.
"""

import logging
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import rich
import rich.progress as bars
import tensorflow as tf

from toolkit import devices, strategies
from toolkit.strategies.upstream.attributes import last_learning_rate
from toolkit.support import files, history, status
from toolkit.support.goodput import Account
from toolkit.training.checkpoints import Position

_LOG = logging.getLogger(__name__)
_WARM_UP_STEPS = 10  # The first steps trace and compile the training function.
_REPORT_SECONDS = 0.25  # The shortest time between two reports to the launcher.
_LINE_SECONDS = 30  # In a log file: seconds between two lines of progress.
_BAR_SECONDS = 0.2  # On a terminal: seconds between two updates of the bar. More updates would cost training time.
_WRITES = ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_test_begin", "on_test_end")


def scalars(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns Keras's logs as single numbers: a vector metric such as F1Score becomes name_0, name_1 ..."""
    found = {}
    for name, value in (logs or {}).items():
        array = np.asarray(value)
        if array.ndim == 0:
            found[name] = float(array)
        else:
            found.update({f"{name}_{place}": float(each) for place, each in enumerate(array.ravel())})
    return found


def in_words(logs: Mapping[str, Any] | None) -> str:
    """Returns logs as text for the screen or a log file: "loss 0.1234, accuracy 0.9876"."""
    return ", ".join(f"{name} {value:.4f}" for name, value in scalars(logs).items())


def write_rows(path: pathlib.Path, rows: Sequence[Mapping[str, Any]], *, empty: str) -> None:
    """Replaces a CSV file; training goes on where it can't be written.

    Args:
        path: The file.
        rows: Each row: column -> value.
        empty: The column of a table without rows.
    """
    try:
        files.write_csv(path, rows, empty=[empty])
    except OSError as error:
        _LOG.warning("%s can't be written (%s)", path, error.strerror or error)


class Progress(keras.callbacks.Callback):
    """Counts steps and epochs. It comes first among the callbacks, and the others ask it.

    A resumed run passes over the steps of its first epoch that an earlier process has done: Keras counts them and
    calls callbacks for them, but nothing is computed.

    Speed is measured from the end of one step to the end of the next, within an epoch. Validation, checkpoints between
    epochs and the first steps of the process don't count.

    Args:
        epochs: The epochs of the whole training.
        resumed: Where this process goes on.
        rows: Of history.csv, those of epochs that earlier processes and calls of `fit` have done.
        account: Is told what time is spent on.
        global_batch_size: Examples per step, over all replicas; None where it isn't known beforehand. It is then what
            Keras's mean of the loss counts in the second step, where the model has one.

    Attributes:
        position: Where training stands, by the steps that were really made: with `steps_per_execution`, Keras's last
            call in an epoch makes fewer than it tells callbacks, or more.
        made: How many steps Keras's last call has made.
        epoch: The number of the present epoch, from 0.
        steps_per_epoch: None until it is known: with data of unknown length, after the first epoch.
        passing_over: Whether Keras's present step is one that an earlier process has done.
        rows: One row per epoch.
        learning_rate: That of the last epoch's last step, before callbacks or a schedule change it for the next one;
            None if the model has no one rate.
        breakdown: A `Breakdown` of a step's time as a dict, also an earlier process's; None if no profile was taken.
    """

    reads_weights = False

    def __init__(
        self,
        *,
        epochs: int,
        resumed: Position,
        rows: Sequence[dict] = (),
        global_batch_size: int | None = None,
        account: Account | None = None,
        breakdown: dict | None = None,
    ) -> None:
        super().__init__()
        self.account = account or Account()
        self.breakdown = breakdown
        self.epochs = epochs
        self.resumed = resumed
        self.rows = list(rows)
        self.global_batch_size = global_batch_size
        self.position = resumed
        self.made = 0
        self.epoch = resumed.epoch
        self.steps_per_epoch: int | None = None
        self.passing_over = False
        self.learning_rate: float | None = None
        self._steps_before = resumed.step - resumed.batch  # Of whole epochs.
        self._seen = 0
        self._last: tuple[int, float] | None = None
        self._counted: tuple[int, int] | None = None
        self._count_of: Callable[[], int] | None = None  # The steps made so far; None where each call makes one.
        self._count_before = 0  # Steps that the present epoch begins with, in this process.
        self._total, self._of_epoch = [0, 0.0], [0, 0.0]  # Steps, seconds.

    @property
    def examples_per_second(self) -> float | None:
        """Over all replicas, in the whole run so far; None before the warm-up is over."""
        return self._rate(*self._total)

    @property
    def measured_steps(self) -> int:
        """How many steps this process's speed is the mean of."""
        return int(self._total[0])

    @property
    def epoch_examples_per_second(self) -> float | None:
        """The same for this epoch so far."""
        return self._rate(*self._of_epoch)

    @property
    def peak_memory(self) -> list[int]:
        """The most bytes that each of this process's devices had in use; [] where TensorFlow doesn't count."""
        return devices.peak_memory(getattr(self.model, "distribute_strategy", None) or tf.distribute.get_strategy())

    def set_model(self, model: keras.Model) -> None:
        """Makes the model count its steps, before Keras makes its step function."""
        super().set_model(model)
        if model.steps_per_execution > 1:
            from toolkit.strategies.step.train_step import count_steps

            self._count_of = count_steps(model)

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps_per_epoch = self.params.get("steps")
        self.account.mark("other" if self.account.made else "starting")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        if self._count_of is not None:
            self._count_before = self._count_of()
        self._last = self._counted = None
        self._of_epoch = [0, 0.0]

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.passing_over = (self.epoch, batch) < (self.resumed.epoch, self.resumed.batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.passing_over:
            self.account.mark("starting")
            return
        kind = "progress" if self._seen else "first_step"
        self._advance(batch + 1)
        self._measure()
        self.account.mark(kind, steps=self.made)

    def on_test_begin(self, logs: Any = None) -> None:
        self._advance()
        self.account.mark("progress")

    def on_test_end(self, logs: Any = None) -> None:
        self.account.mark("validating")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._advance()
        optimizer = getattr(self.model, "optimizer", None)  # A model with two optimizers logs rates under other names.
        if optimizer is not None:
            self.learning_rate = float(keras.ops.convert_to_numpy(last_learning_rate(optimizer)))
        self.steps_per_epoch = self.steps_per_epoch or self.position.batch
        self._steps_before += self.position.batch
        self.position = Position(step=self._steps_before, epoch=epoch + 1)

    def _advance(self, batch: int | None = None) -> None:
        """Brings the position to what was made of the epoch: `batch` steps, unless they are counted.

        A call in whose midst the data ends may be one that callbacks don't learn of.
        """
        if self._count_of is not None:
            resumed = self.resumed.batch if self.epoch == self.resumed.epoch else 0
            batch = resumed + self._count_of() - self._count_before
        if batch is not None:
            self.made = self._steps_before + batch - self.position.step
            self.position = Position(step=self._steps_before + batch, epoch=self.epoch, batch=batch)

    def _rate(self, steps: float, seconds: float) -> float | None:
        return steps * self.global_batch_size / seconds if seconds and self.global_batch_size else None

    def _measure(self) -> None:
        batch = self.position.batch
        if self.global_batch_size is None:
            self._count(batch)
        now = time.perf_counter()
        self._seen += 1
        if self._last is not None and self._seen > _WARM_UP_STEPS:
            for pair in (self._total, self._of_epoch):
                pair[0] += batch - self._last[0]
                pair[1] += now - self._last[1]
        self._last = (batch, now)

    def _count(self, batch: int) -> None:
        """Computes the examples of a step from the count of the loss's mean between two steps."""
        mean = next((m for m in self.model.metrics if isinstance(m, keras.metrics.Mean) and m.name == "loss"), None)
        if mean is None or self._seen > 1:
            return
        strategies.wait_for_steps(self.model)
        counted = round(float(keras.ops.convert_to_numpy(mean.count)))
        if self._counted is not None:
            self.global_batch_size = round((counted - self._counted[1]) / (batch - self._counted[0])) or None
        self._counted = (batch, counted)


class EpochLog(keras.callbacks.Callback):
    """Writes one row per epoch to a file that is always complete, and shows and reports progress in between.

    Args:
        path: history.csv; None for rows that are only kept.
        progress: Where training stands; gets the rows.
        earlier: Rows of earlier calls of `fit`, after which this one counts on.
        shows: Whether to show progress: a bar on a terminal, lines in a log file.
        bar: Whether a terminal gets a bar that moves. Of several processes on one terminal, as under mpirun, one has
            it.
    """

    reads_weights = False

    def __init__(
        self,
        path: pathlib.Path | None,
        progress: Progress,
        *,
        earlier: Sequence[dict],
        shows: bool,
        bar: bool,
    ) -> None:
        super().__init__()
        self.path = path
        self._progress = progress
        self._epochs, self._steps = len(earlier), earlier[-1]["step"] if earlier else 0
        self._shows = shows
        self._listened = progress.account.listened
        self._console = rich.get_console()
        self._moves = shows and bar and self._console.is_terminal
        self._bar: bars.Progress | None = None
        self._task: Any = None
        self._epoch_start = self._shown = self._reported = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        self._write()  # An interrupted run may have left rows of epochs that are now repeated.
        steps = self._progress.steps_per_epoch
        self._report(state="training", step=0, steps=steps and steps * self._progress.epochs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch_start = self._shown = time.monotonic()
        if self._moves:
            self._bar = bars.Progress(
                bars.TextColumn(f"epoch {epoch + 1}/{self._progress.epochs}"),
                bars.BarColumn(bar_width=None),
                bars.MofNCompleteColumn(),
                bars.TimeRemainingColumn(),
                bars.TextColumn("{task.description}"),
                console=self._console,
                transient=True,
                auto_refresh=False,
                expand=True,
            )
            self._task = self._bar.add_task("", total=self._progress.steps_per_epoch)
            self._bar.start()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        progress, now = self._progress, time.monotonic()
        step = progress.position.step
        if self._listened and (step == 1 or now - self._reported > _REPORT_SECONDS):
            self._reported = now
            facts = {"epoch": self._epochs + progress.epoch, "images_per_second": progress.examples_per_second}
            self._report(state="training", step=step, **facts, **status.waited(), **self._spent())
        if self._shows and now - self._shown >= (_BAR_SECONDS if self._bar else _LINE_SECONDS):
            self._shown = now
            self._show(progress.position.batch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        self._report(state="evaluating")
        if self._bar:
            done = self._progress.steps_per_epoch
            self._bar.update(self._task, completed=done, description="evaluating", refresh=True)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if time.monotonic() - self._reported > _REPORT_SECONDS:
            self._reported = time.monotonic()
            self._report(state="evaluating")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        rate, seconds = self._progress.epoch_examples_per_second, time.monotonic() - self._epoch_start
        row = {"epoch": self._epochs + epoch + 1, "step": self._steps + self._progress.position.step, **scalars(logs)}
        if self._progress.learning_rate is not None:
            row["learning_rate"] = self._progress.learning_rate
        peaks = [round(peak / 1e6, 3) for peak in self._progress.peak_memory]
        names = [history.MEMORY] if len(peaks) == 1 else [f"{history.MEMORY}_{number}" for number in range(len(peaks))]
        row |= dict(zip(names, peaks, strict=True))
        row |= {"examples_per_second": round(rate, 1) if rate else None, "seconds": round(seconds, 3)}
        self._progress.rows.append(row)
        self._write()
        self.close()
        if self._shows:
            speed = f", {rate:,.0f} examples/s" if rate else ""
            self.say(f"epoch {epoch + 1}/{self._progress.epochs}: {in_words(logs)}{speed}, {seconds:.0f} s")

    def on_train_end(self, logs: Any = None) -> None:
        self.close()
        if self._listened:
            self._report(state="trained", step=self._progress.position.step, **self._spent())

    def close(self) -> None:
        """Removes the bar; called if `fit` ended in an exception."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def say(self, line: str) -> None:
        """Shows a line above the bar, or in the log."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)

    def _report(self, **facts: Any) -> None:
        if self._listened:
            status.report(**facts)

    def _spent(self) -> dict[str, Any]:
        return {"spent": self._progress.account.own, "made": self._progress.account.made}

    def _show(self, done: int, logs: Any) -> None:
        if self._bar:
            self._bar.update(self._task, completed=done, description=in_words(logs), refresh=True)
            return
        steps = f"/{self._progress.steps_per_epoch}" if self._progress.steps_per_epoch else ""
        self.say(f"epoch {self._progress.epoch + 1}/{self._progress.epochs}, step {done}{steps}: {in_words(logs)}")

    def _write(self) -> None:
        if self.path is not None:  # Every checkpoint also has the rows.
            write_rows(self.path, self._progress.rows, empty="epoch")


class RunTensorBoard(keras.callbacks.TensorBoard):
    """TensorBoard's files as Keras writes them, vectors as single numbers.

    A failed write is reported once and ignored.
    """

    reads_weights = False

    def __init__(self, log_dir: str, **options: Any) -> None:
        super().__init__(log_dir, **options)
        self._said = False
        for name in (*_WRITES, "on_train_batch_begin", "on_train_batch_end"):
            setattr(self, name, self._spared(getattr(self, name)))

    def _spared(self, write: Callable) -> Callable:
        def tried(*args: Any, **kwargs: Any) -> None:
            plain = [scalars(each) if isinstance(each, dict) else each for each in args]
            named = {name: scalars(each) if isinstance(each, dict) else each for name, each in kwargs.items()}
            try:
                write(*plain, **named)
            except (OSError, tf.errors.OpError) as error:  # TensorFlow's writer raises OutOfRangeError on a full disk.
                if not self._said:
                    reason = str(error).rpartition("}} ")[2].partition("\n")[0]
                    _LOG.warning("TensorBoard's files can't be written (%s); training goes on", reason)
                self._said = True

        return tried
