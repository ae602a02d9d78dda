"""An epoch's results for history.csv, the screen or a log file, TensorBoard and the launcher."""

import logging
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import rich
import tensorflow as tf
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from toolkit.support import files, status
from toolkit.training.callbacks.tracker import Tracker
from toolkit.training.logs import in_words, scalars

__all__ = ["Board", "Recorder"]

_LOG = logging.getLogger(__name__)
_REPORT_SECONDS = 0.25  # The shortest time between two reports to the launcher.
_LINE_SECONDS = 30  # In a log file: seconds between two lines of progress.
_BAR_SECONDS = 0.2  # On a terminal: seconds between two updates of the bar. More updates would cost training time.
_WRITES = ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_test_begin", "on_test_end")


class Recorder(keras.callbacks.Callback):
    """Writes one row per epoch to a file that is always complete, and shows and reports progress in between.

    Args:
        path: history.csv; None for rows that are only kept.
        rows: Rows of epochs that earlier processes of this run have done.
        earlier: Those of them that earlier calls of `fit` have done, after which this one counts on.
        tracker: Where training stands.
        shows: Whether to show progress: a bar on a terminal, lines in a log file.
        bar: Whether a terminal gets a bar that moves. Of several processes on one terminal, as under mpirun, one has
            it.
    """

    reads_weights = False

    def __init__(
        self,
        path: pathlib.Path | None,
        rows: Sequence[dict],
        *,
        earlier: Sequence[dict],
        tracker: Tracker,
        shows: bool,
        bar: bool,
    ) -> None:
        super().__init__()
        self.path = path
        self.rows = list(rows)
        self._epochs, self._steps = len(earlier), earlier[-1]["step"] if earlier else 0
        self.tracker = tracker
        self.shows = shows
        self._console = rich.get_console()
        self._moves = shows and bar and self._console.is_terminal
        self._bar: Progress | None = None
        self._task: Any = None
        self._epoch_start = self._shown = self._reported = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        self._write()  # An interrupted run may have left rows of epochs that are now repeated.
        status.report(state="training", step=0, steps=self.tracker.total_steps)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch_start = self._shown = time.monotonic()
        if self._moves:
            self._bar = Progress(
                TextColumn(f"epoch {epoch + 1}/{self.tracker.epochs}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=self._console,
                transient=True,
                auto_refresh=False,
                expand=True,
            )
            self._task = self._bar.add_task("", total=self.tracker.steps_per_epoch)
            self._bar.start()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step, now = self.tracker.position.step, time.monotonic()
        if step == 1 or now - self._reported > _REPORT_SECONDS:
            self._reported = now
            rate = self.tracker.examples_per_second
            epoch = self._epochs + self.tracker.epoch
            spent = {"spent": self.tracker.account.own, "made": self.tracker.account.made}
            status.report(state="training", step=step, epoch=epoch, images_per_second=rate, **status.waited(), **spent)
        if self.shows and now - self._shown >= (_BAR_SECONDS if self._bar else _LINE_SECONDS):
            self._shown = now
            self._show(self.tracker.position.batch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        status.report(state="evaluating")
        if self._bar:
            self._bar.update(self._task, completed=self.tracker.steps_per_epoch, description="evaluating", refresh=True)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if time.monotonic() - self._reported > _REPORT_SECONDS:
            self._reported = time.monotonic()
            status.report(state="evaluating")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        rate, seconds = self.tracker.epoch_examples_per_second, time.monotonic() - self._epoch_start
        row = {"epoch": self._epochs + epoch + 1, "step": self._steps + self.tracker.position.step, **scalars(logs)}
        optimizer = getattr(self.model, "optimizer", None)  # A model with two optimizers logs rates under other names.
        if optimizer is not None:
            row["learning_rate"] = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        row |= {"examples_per_second": round(rate, 1) if rate else None, "seconds": round(seconds, 3)}
        self.rows.append(row)
        self._write()
        self.close()
        if self.shows:
            speed = f", {rate:,.0f} examples/s" if rate else ""
            self.say(f"epoch {epoch + 1}/{self.tracker.epochs}: {in_words(logs)}{speed}, {seconds:.0f} s")

    def on_train_end(self, logs: Any = None) -> None:
        self.close()
        account = self.tracker.account
        status.report(state="trained", step=self.tracker.position.step, spent=account.own, made=account.made)

    def close(self) -> None:
        """Removes the bar; called if `fit` ended in an exception."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def say(self, line: str) -> None:
        """Shows a line above the bar, or in the log."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)

    def _show(self, done: int, logs: Any) -> None:
        if self._bar:
            self._bar.update(self._task, completed=done, description=in_words(logs), refresh=True)
            return
        steps = f"/{self.tracker.steps_per_epoch}" if self.tracker.steps_per_epoch else ""
        self.say(f"epoch {self.tracker.epoch + 1}/{self.tracker.epochs}, step {done}{steps}: {in_words(logs)}")

    def _write(self) -> None:
        if self.path is None:
            return
        try:
            files.write_csv(self.path, self.rows, empty=["epoch"])
        except OSError as error:  # Every checkpoint also has the rows, so training goes on.
            _LOG.warning("%s can't be written (%s)", self.path, error.strerror or error)


class Board(keras.callbacks.TensorBoard):
    """TensorBoard's files as Keras writes them, vectors as single numbers.

    A failed write is reported once and ignored.
    """

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
