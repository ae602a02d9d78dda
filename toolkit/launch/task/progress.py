"""Step and speed of a script that knows nothing of this toolkit: whatever trains by Keras's `fit`.

Public methods of `CallbackList` and `Model` are wrapped, outside of what `toolkit.strategies.fit.callbacks` wraps. A
run of this toolkit's own reports by itself, and is left to it.
"""

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

from toolkit.support import status

__all__ = ["report_progress"]

_SECONDS = 0.5  # How often at most.
_WARM_UP = 2  # Steps in which functions are traced.


class _Progress:
    """Where the training of this process stands."""

    def __init__(self) -> None:
        self.batch_size: int | None = None
        self._step = self._timed = 0
        self._last = -1
        self._since = self._reported = 0.0

    def look_at(self, batch_size: int | None) -> None:
        """Training begins, with so many examples in a step; None where that isn't known."""
        self.batch_size, self._since = batch_size, 0.0

    def begin(self) -> None:
        """An epoch begins: its batches are counted from 0 again."""
        self._last = -1

    def train(self, batch: int) -> None:
        """A step has ended, or several that were executed at once."""
        now = time.monotonic()
        self._step += max(1, batch - self._last)
        self._last = batch
        if self._step <= _WARM_UP or not self._since:
            self._since, self._timed = now, self._step
        rate = (self._step - self._timed) / (now - self._since) if now > self._since else 0.0
        if self._due(now):
            known = {"images_per_second": rate * self.batch_size} if self.batch_size and rate else {}
            status.report(state="training", step=self._step, **known)

    def test(self) -> None:
        """A step of an evaluation has ended, in which no time is counted."""
        self._since = 0.0
        if self._due(time.monotonic()):
            status.report(state="evaluating")

    def end(self) -> None:
        """Training has ended: what comes now has no steps."""
        status.report(state="running", step=self._step)

    def _due(self, now: float) -> bool:
        if now - self._reported < _SECONDS:
            return False
        self._reported = now
        return True


def report_progress(keras: Any) -> None:
    """Has `fit` and `evaluate` report to the launcher; costs a look at the clock in each step.

    Args:
        keras: The module, just imported.
    """
    if not status.listened():
        return
    progress, callbacks = _Progress(), keras.callbacks.CallbackList
    _before(keras.Model, "fit", lambda *given, **named: progress.look_at(_batch_size(*given, **named)))
    _after(callbacks, "on_epoch_begin", lambda *_: progress.begin())
    _after(callbacks, "on_train_batch_end", lambda batch, *_: progress.train(batch))
    _after(callbacks, "on_test_batch_end", lambda *_: progress.test())
    _after(callbacks, "on_train_end", lambda *_: progress.end())


def _batch_size(x: Any = None, _: Any = None, batch_size: int | None = None, *__: Any, **___: Any) -> int | None:
    """Returns the global batch size as far as it can be seen without reading data: of arrays, and of fixed batches."""
    if x is None:
        return None
    if hasattr(x, "element_spec"):
        import tensorflow as tf

        shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(x.element_spec)]
        return shapes[0][0] if shapes and shapes[0] is not None and shapes[0].rank else None
    return (batch_size or 32) if hasattr(x, "shape") or isinstance(x, (list, tuple, dict)) else None


def _before(owner: Any, name: str, do: Callable) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # What only watches stops nobody; the original says what is wrong.
            do(*args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, do: Callable) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not any(type(each).__module__ == "toolkit.training.callbacks.recorder" for each in self.callbacks):
            do(*args, *kwargs.values())
        return result

    setattr(owner, name, wrapped)
