"""What a script that doesn't import this toolkit is given: strategies by TensorFlow's names, reports of progress.

The list of callbacks of each call of Keras's `fit` and `evaluate` is watched. A run of this toolkit's own reports by
itself, and is left to it.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from toolkit.errors import RequestError, StrategyError
from toolkit.strategies.upstream import replaced
from toolkit.strategies.upstream.wrapping import extend
from toolkit.support import source_lines, status
from toolkit.support.goodput import Account

_LOG = logging.getLogger(__name__)
_SECONDS = 0.5  # The shortest time between two reports.
_WARM_UP = 2  # The first steps, in which functions are traced.


def patch_strategies(tensorflow: Any) -> None:
    """Replaces two of TensorFlow's strategy classes by functions that create ours and log it.

    They are `tf.distribute.MultiWorkerMirroredStrategy` and `ParameterServerStrategy`. A name stays a
    class, which scripts and Keras use with isinstance, and is made ours only when the script asks
    for it: the toolkit's strategies import Keras.

    Args:
        tensorflow: The module, just imported.
    """
    _stand_in(tensorflow, "MultiWorkerMirroredStrategy", _multi_worker)
    _stand_in(tensorflow, "ParameterServerStrategy", _parameter_server)


def note_converted_lines(_: Any) -> None:
    """Has AutoGraph note which lines of the script its own are, for stacks that the launcher asks for.

    Args:
        _: TensorFlow, just imported.
    """
    if not status.listened():
        return

    def load(original: Callable, *args: Any, **kwargs: Any) -> Any:
        module, source, source_map = original(*args, **kwargs)
        with contextlib.suppress(OSError):  # An observer must never stop the script.
            source_lines.note(source_map or {})
        return module, source, source_map

    with contextlib.suppress(RequestError):  # With an unknown version of TensorFlow, stacks name AutoGraph's lines.
        replaced.LOAD_CONVERTED.answer(launcher=load)


def guard_fit(_: Any) -> None:
    """Makes `fit` refuse to train in a worker or ps that serves a chief.

    A script that doesn't serve there would train as often as it was launched.

    Args:
        _: Keras, just imported.
    """
    from toolkit.cluster import discover

    found = discover(os.environ)
    if found is None or found.task.job not in ("worker", "ps") or "ps" not in {t.job for t in found.cluster.tasks}:
        return

    def refuse(_: Callable, *_args: Any, **_kwargs: Any) -> None:
        raise StrategyError(
            asked=f"{found.task} calls fit, evaluate or predict",
            found="in a job with parameter servers only the chief trains, and workers and ps serve it",
            remedy="Call toolkit.strategies.create() first: it serves the chief here. Or train in the chief only",
        )

    replaced.SET_MODEL.answer(served=refuse)


def _stand_in(tensorflow: Any, name: str, make: Callable) -> None:
    original = getattr(tensorflow.distribute, name)

    class Patched(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not stand_in:
                return super().__call__(*args, **kwargs)
            # A warning, because scripts don't show information.
            _LOG.warning(
                "toolkit: the launcher replaced tf.distribute.%s by a subclass that works with Keras 3's fit; "
                "launch with --as_is to keep TensorFlow's own",
                name,
            )
            return make(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original) if cls is stand_in else super().__instancecheck__(instance)

    stand_in = Patched(original.__name__, (original,), {"__doc__": original.__doc__})
    for home in (tensorflow.distribute, tensorflow.distribute.experimental):
        setattr(home, name, stand_in)


def _multi_worker(*args: Any, communication: Any = None, **kwargs: Any) -> Any:
    """Creates our strategy for either of TensorFlow's. The experimental one takes the communication first."""
    import tensorflow as tf

    from toolkit.strategies.multi_worker import MultiWorkerStrategy

    if args and isinstance(args[0], tf.distribute.experimental.CommunicationImplementation):
        communication, args = args[0], args[1:]
    if communication is not None:
        kwargs["communication_options"] = tf.distribute.experimental.CommunicationOptions(implementation=communication)
    return MultiWorkerStrategy(*args, **kwargs)


def _parameter_server(cluster_resolver: Any, variable_partitioner: Any = None) -> Any:
    """Creates our strategy. A partitioner means that large variables are sharded, in this toolkit's way."""
    from toolkit.cluster import Cluster, Task
    from toolkit.strategies.options import ParameterServerOptions
    from toolkit.strategies.parameter_servers import strategy

    cluster = Cluster(cluster_resolver.cluster_spec().as_dict())
    task = Task(cluster_resolver.task_type or "chief", cluster_resolver.task_id or 0)
    options = ParameterServerOptions(variables="sharded" if variable_partitioner is not None else "round_robin")
    return strategy.create(cluster, task, options=options)


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


class _Observed:
    """What a list of callbacks does beside: it marks each step, and each call of callbacks, and reports progress.

    What a script does outside of them may take any time.
    """

    _progress: "_Progress | None" = None  # None if the run reports by itself.

    def on_train_begin(self, logs: Any = None) -> None:
        status.forget_phases()
        super().on_train_begin(logs)  # type: ignore[misc]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        with status.in_phase("on_epoch_begin"):
            super().on_epoch_begin(epoch, logs)  # type: ignore[misc]
        self._first_of = "an epoch"
        if self._progress is not None:
            self._progress.begin(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        with status.in_phase("on_epoch_end"):
            super().on_epoch_end(epoch, logs)  # type: ignore[misc]

    def on_test_begin(self, logs: Any = None) -> None:
        with status.in_phase("on_test_begin"):
            super().on_test_begin(logs)  # type: ignore[misc]
        self._first_of_test = "a validation"

    def on_test_end(self, logs: Any = None) -> None:
        with status.in_phase("on_test_end"):
            super().on_test_end(logs)  # type: ignore[misc]

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        with status.in_phase("on_train_batch_begin"):
            super().on_train_batch_begin(batch, logs)  # type: ignore[misc]
        status.enter_phase(f"first step of {self._first_of}" if self._first_of else "step")
        self._first_of = ""

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        with status.in_phase("on_test_batch_begin"):
            super().on_test_batch_begin(batch, logs)  # type: ignore[misc]
        status.enter_phase(f"first step of {self._first_of_test}" if self._first_of_test else "validation step")
        self._first_of_test = ""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._leave(logs)
        with status.in_phase("on_train_batch_end"):
            super().on_train_batch_end(batch, logs)  # type: ignore[misc]
        if self._progress is not None:
            self._progress.train(batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._leave(logs)
        with status.in_phase("on_test_batch_end"):
            super().on_test_batch_end(batch, logs)  # type: ignore[misc]
        if self._progress is not None:
            self._progress.test()

    def on_train_end(self, logs: Any = None) -> None:
        super().on_train_end(logs)  # type: ignore[misc]
        if self._progress is not None:
            self._progress.end()

    def _leave(self, logs: Any) -> None:
        if not (getattr(self, "_async_train", True) or getattr(self, "_async_test", True)):
            _wait_for(logs)
        status.enter_phase("")

    _first_of = _first_of_test = ""


def report_progress(keras: Any) -> None:
    """Makes `fit` and `evaluate` report to the launcher; each step costs a look at the clock.

    Args:
        keras: The module, just imported.
    """
    if not status.listened() or keras.backend.backend() != "tensorflow":
        return
    progress = _Progress()

    def read(original: Callable, iterator: Any, *args: Any, **kwargs: Any) -> None:
        original(iterator, *args, **kwargs)
        with contextlib.suppress(Exception):  # An observer must never stop the script.
            progress.batch_size = iterator.data_adapter.batch_size

    def watch(original: Callable, callbacks: Any, model: Any) -> None:
        original(callbacks, model)
        extend(callbacks, _Observed)
        if not any(type(each).__module__ == "toolkit.training.progress" for each in callbacks.callbacks):
            progress.look_at()
            callbacks._progress = progress

    with contextlib.suppress(RequestError):  # With an unknown version of Keras, the script runs unobserved.
        replaced.EPOCH_ITERATOR.answer(launcher=read)
        replaced.SET_MODEL.answer(launcher=watch)
