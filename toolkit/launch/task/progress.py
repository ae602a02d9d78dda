"""Reports step and speed of a script that doesn't import this toolkit but trains with Keras's `fit`.

The list of callbacks of each call of `fit` and `evaluate` is watched. A run of this toolkit's own reports by itself,
and is left to it.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from toolkit.errors import RequestError
from toolkit.support import status
from toolkit.support.goodput import Account
from toolkit.support.wrapping import attach, wrap

__all__ = ["report_progress"]

_SECONDS = 0.5  # The shortest time between two reports.
_WARM_UP = 2  # The first steps, in which functions are traced.


class _Progress:
    """The progress of this process's training."""

    def __init__(self) -> None:
        self.batch_size: int | None = None  # The size of batches, known before training begins.
        self._examples: int | None = None
        self._step = self._timed = 0
        self._last, self._epoch = -1, 0
        self._since = self._reported = 0.0
        self._account = Account()

    def look_at(self) -> None:
        """Called when training or evaluation begins; notes the size of batches if it can be seen."""
        self._examples, self._since = self.batch_size, 0.0
        self._account.mark("other" if self._step else "starting")

    def begin(self, epoch: int) -> None:
        """Called when an epoch begins: its batches are counted from 0."""
        self._last, self._epoch = -1, max(self._epoch, epoch)

    def train(self, batch: int) -> None:
        """Called after a step, or after several that were executed together."""
        now = time.monotonic()
        steps = max(1, batch - self._last)
        self._account.mark("progress" if self._step else "first_step", steps=steps)
        self._step += steps
        self._last = batch
        if self._step <= _WARM_UP or not self._since:
            self._since, self._timed = now, self._step
        rate = (self._step - self._timed) / (now - self._since) if now > self._since else 0.0
        if self._due(now):
            known = {"images_per_second": rate * self._examples} if self._examples and rate else {}
            status.report(
                state="training", step=self._step, epoch=self._epoch, **known, **status.waited(), **self._spent()
            )

    def test(self) -> None:
        """Called after a step of evaluation, whose time isn't counted."""
        self._since = 0.0
        self._account.mark("validating")
        if self._due(time.monotonic()):
            status.report(state="evaluating")

    def end(self) -> None:
        """Called when training has ended and no steps follow."""
        status.report(state="running", step=self._step, **self._spent())

    def _spent(self) -> dict[str, Any]:
        return {"spent": self._account.own, "made": self._account.made}

    def _due(self, now: float) -> bool:
        if now - self._reported < _SECONDS:
            return False
        self._reported = now
        return True


def _wait_for(logs: Any) -> None:
    """Waits until a GPU has computed a step, as callbacks are about to do when they read its logs."""
    import tensorflow as tf

    with contextlib.suppress(Exception):  # Keras reads them next, and raises what there is to raise.
        for value in logs.values():
            if isinstance(value, tf.Tensor):
                value.numpy()


def _mark_phases(callbacks: Any) -> None:
    """Marks each step, from a batch's begin to its end. What callbacks do between two steps may take any time."""
    first: set[str] = set()

    def forget(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
        status.forget_phases()
        original(self, *args, **kwargs)

    def begin(kind: str) -> Callable:
        def begun(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            first.add(kind)

        return begun

    def enter(kind: str, name: str) -> Callable:
        def entered(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            status.enter_phase(f"first step of {name}" if kind in first else kind)
            first.discard(kind)

        return entered

    def leave(original: Callable, self: Any, batch: int, logs: Any = None) -> None:
        if not (getattr(self, "_async_train", True) or getattr(self, "_async_test", True)):
            _wait_for(logs)
        status.enter_phase("")
        original(self, batch, logs)

    attach(callbacks, "on_train_begin", forget)
    attach(callbacks, "on_epoch_begin", begin("step"))
    attach(callbacks, "on_test_begin", begin("validation step"))
    attach(callbacks, "on_train_batch_begin", enter("step", "an epoch"))
    attach(callbacks, "on_test_batch_begin", enter("validation step", "a validation"))
    attach(callbacks, "on_train_batch_end", leave)
    attach(callbacks, "on_test_batch_end", leave)


def report_progress(keras: Any) -> None:
    """Makes `fit` and `evaluate` report to the launcher; each step costs a look at the clock.

    Args:
        keras: The module, just imported.
    """
    if not status.listened() or keras.backend.backend() != "tensorflow":
        return
    from keras.src.backend.tensorflow import trainer

    progress = _Progress()

    def read(original: Callable, iterator: Any, *args: Any, **kwargs: Any) -> None:
        original(iterator, *args, **kwargs)
        with contextlib.suppress(Exception):  # An observer must never stop the script.
            progress.batch_size = iterator.data_adapter.batch_size

    def watch(original: Callable, callbacks: Any, model: Any) -> None:
        if not any(type(each).__module__ == "toolkit.training.progress" for each in callbacks.callbacks):
            progress.look_at()
            attach(callbacks, "on_epoch_begin", after(lambda epoch, *_: progress.begin(epoch)))
            attach(callbacks, "on_train_batch_end", after(lambda batch, *_: progress.train(batch)))
            attach(callbacks, "on_test_batch_end", after(lambda *_: progress.test()))
            attach(callbacks, "on_train_end", after(lambda *_: progress.end()))
        _mark_phases(callbacks)
        original(callbacks, model)

    def after(do: Callable) -> Callable:
        def reported(original: Callable, callbacks: Any, *args: Any, **kwargs: Any) -> None:
            original(callbacks, *args, **kwargs)
            do(*args, *kwargs.values())

        return reported

    with contextlib.suppress(RequestError):  # With an unknown version of Keras, the script runs unobserved.
        wrap(trainer.TFEpochIterator, "__init__", read)
        wrap(keras.callbacks.CallbackList, "set_model", watch)
