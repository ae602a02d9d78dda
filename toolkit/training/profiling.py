"""A profile of a few steps, for the breakdown of a step's time, and for TensorBoard where it is asked for."""

import contextlib
import logging
import pathlib
import shutil
import tempfile
from typing import Any

import keras
import tensorflow as tf

from toolkit.training.breakdown import STEP, Breakdown, read
from toolkit.training.tracker import Tracker

__all__ = ["Profiling"]

_LOG = logging.getLogger(__name__)
_FIRST = 4  # Steps that trace, compile and allocate. Those that are profiled are over when throughput begins to count.
_STEPS = 5


class Profiling(keras.callbacks.Callback):
    """Profiles some early steps, once.

    Args:
        steps: How many; 0 for five, of which only the breakdown is kept.
        keep: Where the profile is to stay, for `tensorboard --logdir`; None for nowhere.
        tracker: Where training stands. A profile doesn't go across the end of an epoch.
    """

    def __init__(self, *, steps: int, keep: pathlib.Path | None, tracker: Tracker) -> None:
        super().__init__()
        self._steps = steps or _STEPS
        self._keep = keep if steps else None
        self._tracker = tracker
        self._seen = self._done = 0
        self._over = False
        self._trace: Any = None
        self._directory: pathlib.Path | None = None

    @property
    def breakdown(self) -> Breakdown | None:
        """Of the profiled steps; None where there were too few, or somebody else was profiling."""
        if self._directory is None or not self._over:
            return None
        try:
            return read(self._directory, replicas=self.model.distribute_strategy.num_replicas_in_sync)
        except Exception as error:
            # It is a look at the run, and never a reason for it to fail.
            _LOG.warning("The profile can't be read (%s: %s)", type(error).__name__, error)
            return None
        finally:
            if self._keep is None:
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._over or self._tracker.passing_over:
            return
        self._seen += 1
        if self._directory is None:
            length = self._tracker.steps_per_epoch
            if self._seen <= _FIRST or (length is not None and batch + self._steps > length):
                return
            self._start()
        if not self._over:
            self._trace = tf.profiler.experimental.Trace(STEP, step_num=self._done, _r=1)
            self._trace.__enter__()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._trace is None:
            return
        self._trace.__exit__(None, None, None)
        self._trace = None
        self._done += 1
        if self._done == self._steps:
            self._stop()

    def on_train_end(self, logs: Any = None) -> None:
        if self._keep is not None and self._directory is None and not self._over:
            _LOG.warning(
                "No profile: %d steps were asked for, and an epoch of %s has too few after the first %d",
                self._steps,
                self._tracker.steps_per_epoch,
                _FIRST,
            )
        self.close()

    def close(self) -> None:
        """Ends a profile that training was stopped in the midst of."""
        if self._directory is not None and not self._over:
            self._stop()

    def _start(self) -> None:
        self._directory = self._keep or pathlib.Path(tempfile.mkdtemp(prefix="toolkit-profile-"))
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=2, python_tracer_level=0)
        try:
            tf.profiler.experimental.start(str(self._directory), options=options)
        except tf.errors.OpError as error:  # TensorBoard's callback profiles, or the disk is full.
            self._over = True
            _LOG.info("No breakdown of a step's time (%s)", error.message)

    def _stop(self) -> None:
        self._over = True
        with contextlib.suppress(tf.errors.OpError):
            tf.profiler.experimental.stop()
        if self._keep is not None:
            _LOG.info("Profile of %d steps: tensorboard --logdir=%s", self._done, self._keep)
