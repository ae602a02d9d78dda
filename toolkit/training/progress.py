"""Progress of `fit`: a bar on a terminal, lines in a log file."""

import time
from typing import Any

import keras
import rich
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from toolkit.training.throughput import Throughput
from toolkit.training.tracker import Tracker, scalars

__all__ = ["ProgressDisplay"]

_LINE_SECONDS = 30  # In a log file: how often a line says how far the epoch is.
_BAR_SECONDS = 0.2  # On a terminal: how often the bar moves. More often costs training time.


class ProgressDisplay(keras.callbacks.Callback):
    """Shows each epoch while it runs, and one line that stays when it has ended.

    Args:
        tracker: Where training stands.
        throughput: Where examples per second are measured.
        bar: Whether a terminal gets a bar that moves. Of several processes on one terminal, as under mpirun, one has
            it.
    """

    reads_weights = False

    def __init__(self, *, tracker: Tracker, throughput: Throughput, bar: bool = True) -> None:
        super().__init__()
        self.tracker = tracker
        self.epochs = tracker.epochs
        self.throughput = throughput
        self._console = rich.get_console()
        self._moves = bar and self._console.is_terminal
        self._bar: Progress | None = None
        self._task: Any = None
        self._epoch_start = self._shown = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch_start = self._shown = time.monotonic()
        if self._moves:
            self._bar = Progress(
                TextColumn(f"epoch {epoch + 1}/{self.epochs}"),
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
        now = time.monotonic()
        if now - self._shown < (_BAR_SECONDS if self._bar else _LINE_SECONDS):
            return
        self._shown = now
        if self._bar:
            self._bar.update(self._task, completed=batch + 1, description=_words(logs), refresh=True)
        else:
            steps = f"/{self.tracker.steps_per_epoch}" if self.tracker.steps_per_epoch else ""
            self.say(f"epoch {self.tracker.epoch + 1}/{self.epochs}, step {batch + 1}{steps}: {_words(logs)}")

    def on_test_begin(self, logs: Any = None) -> None:
        if self._bar:
            self._bar.update(self._task, completed=self.tracker.steps_per_epoch, description="evaluating", refresh=True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.close()
        rate = self.throughput.epoch_examples_per_second
        speed = f", {rate:,.0f} examples/s" if rate else ""
        seconds = time.monotonic() - self._epoch_start
        self.say(f"epoch {epoch + 1}/{self.epochs}: {_words(logs)}{speed}, {seconds:.0f} s")

    def on_train_end(self, logs: Any = None) -> None:
        self.close()

    def close(self) -> None:
        """Takes the bar away; call it where `fit` ended in an exception."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def say(self, line: str) -> None:
        """Shows a line above the bar, or in the log."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)


def _words(logs: Any) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in scalars(logs).items())
