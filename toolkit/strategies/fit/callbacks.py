"""What Keras's training loop needs with several processes and has no hook for.

Keras 3 knows nothing of other workers. A `CallbackList` is the one object through which each call of `fit`, `evaluate`
or `predict` passes at the right moments. So where one is told its model, and that is of a strategy of ours, it is given
its own methods; others are left alone. `tests/multiprocess/test_fit.py` fails when Keras changes there.
"""

import concurrent.futures
import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from toolkit.errors import StrategyError
from toolkit.strategies import mesh
from toolkit.strategies.fit.equality import WeightsWatch, average_statistics, check_equal_weights
from toolkit.strategies.fit.models import prepare
from toolkit.strategies.options import options_of
from toolkit.strategies.processes.agreement import extremes, is_chief, processes
from toolkit.strategies.step.local_steps import agree
from toolkit.strategies.step.sharded_variable import (
    ReplicaShardedVariable,
    drop_snapshots,
    snapshots_of,
    take_snapshots,
)
from toolkit.strategies.variables import variables_of
from toolkit.support.wrapping import attach, instead, wrap

__all__ = ["adapt_callbacks"]


@functools.cache  # A temporary directory lives as long as its object: until the process ends.
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="toolkit-not-chief-")


# A callback of ours says this with an attribute, `reads_weights`.
_READ_NO_WEIGHTS = {
    keras.callbacks.CSVLogger,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TerminateOnNaN,
}
_NEVER = sys.maxsize  # Steps between two savings.
# Keras's callbacks that write or post: the attributes with which one of a worker that isn't the chief does so into
# nothing that anyone reads. It still decides and reads as the chief's does, because reading is a collective.
_WRITERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "BackupAndRestore": lambda _: {
        "save_freq": _NEVER,
        "delete_checkpoint": False,
    },  # It restores what the chief wrote.
    "CSVLogger": lambda _: {"filename": os.devnull},
    "ModelCheckpoint": lambda _: {"save_freq": _NEVER},
    "OrbaxCheckpoint": lambda callback: {"checkpointer": _NoCheckpointer(callback.checkpointer)},
    "RemoteMonitor": lambda _: {},  # `_quietly` replaces its method.
    "TensorBoard": lambda _: {"log_dir": _scratch().name},
}
# The others. A test fails for a callback of Keras's that is in neither.
_NO_WRITERS = {
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "History",
    "LambdaCallback",  # What the user's functions write is for the user to decide.
    "LearningRateScheduler",
    "ProgbarLogger",
    "ReduceLROnPlateau",
    "SwapEMAWeights",
    "TerminateOnNaN",
}


def adapt_callbacks() -> None:
    """Makes callbacks and saving work with several processes. Later calls do nothing."""
    wrap(keras.callbacks.CallbackList, "set_model", _set_model)


def _set_model(original: Callable, callbacks: Any, model: Any) -> None:
    """Gives the callback list of one call of `fit`, `evaluate` or `predict` our own methods."""
    if model is not None and mesh.is_toolkit_strategy(model.distribute_strategy):
        prepare(model)  # It may have been created and compiled before the strategy.
        attach(callbacks, "on_train_begin", _begin_training)
        attach(callbacks, "on_epoch_begin", _begin_epoch)
        attach(callbacks, "on_train_batch_end", _end_batch)
        attach(callbacks, "on_epoch_end", _end_epoch)
        attach(callbacks, "on_train_end", _end_training)
        for moment in ("on_test_begin", "on_predict_begin"):
            attach(callbacks, moment, _begin_other)
    _tell(original, callbacks, model)


def _shared(model: Any) -> bool:
    return model is not None and processes(model.distribute_strategy) > 1


def _has_replicas(model: Any) -> bool:
    strategy = model.distribute_strategy if model is not None else None
    return mesh.is_toolkit_strategy(strategy) and mesh.replica_count(strategy) > 1


def _dispatching(model: Any) -> Any:
    """Returns the model's strategy if it dispatches steps to workers, else None."""
    strategy = model.distribute_strategy if model is not None else None
    return strategy if hasattr(strategy, "replace_functions") else None


def _tell(original: Callable, callbacks: Any, model: Any) -> None:
    """Tells callbacks their model, after a look at what they are to save."""
    if (strategy := _dispatching(model)) is not None:
        strategy.replace_functions(model)
    if _shared(model) and model.built and any(isinstance(v, ReplicaShardedVariable) for v in model.variables):
        _check_frequencies(callbacks.callbacks, "the layers are sharded over processes, and gathered at its end")
    if model is not None and options_of(model.distribute_strategy).local is not None:
        _check_frequencies(callbacks.callbacks, "replicas train by themselves, and agree at its end")
    if (
        _shared(model)
        and mesh.is_toolkit_strategy(model.distribute_strategy)
        and not is_chief(model.distribute_strategy)
    ):
        callbacks._toolkit_quiet = [(callback, _without_writing(callback)) for callback in callbacks.callbacks]
    with _quietly(callbacks):
        original(callbacks, model)


@contextlib.contextmanager
def _quietly(callbacks: Any) -> Iterator[None]:
    """A context in which only the chief's callbacks write. The others' run, but write into nothing.

    It is entered for each of Keras's calls alone: where `fit` raises, callbacks are as the user made them.
    """
    quiet = getattr(callbacks, "_toolkit_quiet", None)
    if quiet is None:
        yield
        return
    before = [(callback, {name: getattr(callback, name) for name in others}) for callback, others in quiet]
    with instead(keras.callbacks.RemoteMonitor, "on_epoch_end", lambda _: lambda *_, **__: None):
        try:
            for callback, others in quiet:
                vars(callback).update(others)
            yield
        finally:
            for callback, own in before:
                vars(callback).update(own)


def _without_writing(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Returns the attributes with which a Keras callback writes nothing that anyone reads."""
    kinds = (
        (getattr(keras.callbacks, name, ()), others) for name, others in _WRITERS.items()
    )  # Older Keras has fewer.
    return next((others(callback) for kind, others in kinds if isinstance(callback, kind)), {})


class _NoCheckpointer:
    """Orbax's checkpointer in a process that isn't the chief: it saves nothing."""

    def __init__(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpointer, name)

    def save_checkpointables(self, *_: Any, **__: Any) -> bool:
        return True

    def save_checkpointables_async(self, *_: Any, **__: Any) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_result(True)
        return future


def _check_frequencies(callbacks: Iterable, why: str) -> None:
    for callback in callbacks:
        frequency = getattr(callback, "save_freq", None)
        if isinstance(frequency, int):
            raise StrategyError(
                asked=f"{type(callback).__name__} is to save every {callback.save_freq} batches",
                found=f"only the end of an epoch is sure to be whole: {why}",
                remedy='Save with save_freq="epoch", or use toolkit.training.Run with checkpoint_steps',
            )


def _begin_training(original: Callable, callbacks: Any, *args: Any, **kwargs: Any) -> None:
    if (strategy := _dispatching(callbacks.model)) is not None:
        strategy.begin(callbacks.model)
    with _quietly(callbacks):
        original(callbacks, *args, **kwargs)  # A callback may restore weights.
    callbacks._toolkit_watch = WeightsWatch(callbacks.model) if _has_replicas(callbacks.model) else None
    if _shared(callbacks.model) and callbacks.model.built:
        check_equal_weights(callbacks.model)
        callbacks._toolkit_training = True
        mine = any(_may_stop_in_an_epoch(callback) for callback in callbacks.callbacks)
        callbacks._toolkit_may_stop = bool(_largest(callbacks.model, mine))
        callbacks._toolkit_order = getattr(callbacks.model.distribute_strategy, "order", None)
        callbacks._toolkit_began = False


def _begin_epoch(original: Callable, callbacks: Any, epoch: int, *args: Any, **kwargs: Any) -> None:
    if _shared(callbacks.model):
        drop_snapshots(variables_of(callbacks.model))
    if (watch := getattr(callbacks, "_toolkit_watch", None)) is not None:
        watch.begin(epoch)
    original(callbacks, epoch, *args, **kwargs)  # A callback may set metrics, or a learning rate.
    if (strategy := _dispatching(callbacks.model)) is not None:
        steps, epochs = (callbacks.params.get(name) for name in ("steps", "epochs"))
        strategy.session(callbacks.model).begin_epoch(steps, (epochs or epoch + 1) - epoch)


def _end_batch(original: Callable, callbacks: Any, batch: int, *args: Any, **kwargs: Any) -> None:
    if (watch := getattr(callbacks, "_toolkit_watch", None)) is not None:
        watch.after_step(batch + 1)
    with _quietly(callbacks):
        original(callbacks, batch, *args, **kwargs)
    if getattr(callbacks, "_toolkit_may_stop", False):  # Each alone, they would wait for one another's steps.
        callbacks.model.stop_training = bool(_largest(callbacks.model, bool(callbacks.model.stop_training)))
    if (order := getattr(callbacks, "_toolkit_order", None)) is not None and not callbacks._toolkit_began:
        callbacks._toolkit_began = True
        order.compare_first()


def _end_epoch(original: Callable, callbacks: Any, epoch: int, *args: Any, **kwargs: Any) -> None:
    model = callbacks.model
    agree(model)
    if _has_replicas(model):
        if (watch := getattr(callbacks, "_toolkit_watch", None)) is not None:
            watch.compare(f"epoch {epoch + 1:,}")
        average_statistics(model)
    if not _shared(model):
        original(callbacks, epoch, *args, **kwargs)
        return
    if (order := getattr(callbacks, "_toolkit_order", None)) is not None:
        order.compare_epoch(epoch + 1)
    if _some_read_weights(callbacks):  # Callbacks that only the chief has may save.
        take_snapshots(variables_of(model))
    with _quietly(callbacks):
        original(callbacks, epoch, *args, **kwargs)
    # The other processes find the files of the chief's callbacks, and all stop together.
    model.stop_training = bool(_largest(model, bool(model.stop_training)))


def _some_read_weights(callbacks: Any) -> bool:
    """Returns whether a callback may read, at the end of an epoch, what no process holds whole. All must call it."""
    model = callbacks.model
    if next(snapshots_of(variables_of(model)), None) is None:
        return False
    return bool(_largest(model, any(_may_read_weights(callback) for callback in callbacks.callbacks)))


def _largest(model: Any, value: int) -> int:
    """Returns the largest of the workers' whole numbers. All must call it."""
    return int(extremes(model.distribute_strategy, np.array([value], np.int64))[1][0])


def _may_stop_in_an_epoch(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback has the user's own code for batches, which may end an epoch on one worker only.

    Workers then ask one another after each batch, which takes one or two milliseconds; others' steps cost nothing.
    """
    moments = ("on_train_batch_end", "on_batch_end", "on_train_batch_begin", "on_batch_begin")
    modules = (getattr(getattr(callback, name, None), "__module__", None) or "" for name in moments)
    return any(module.partition(".")[0] not in ("keras", "toolkit") for module in modules)


def _may_read_weights(callback: keras.callbacks.Callback) -> bool:
    """Whether its end of an epoch may change or read weights."""
    if isinstance(callback, keras.callbacks.EarlyStopping):
        return bool(callback.restore_best_weights)
    own = getattr(callback.on_epoch_end, "__func__", callback.on_epoch_end)
    known = type(callback) in _READ_NO_WEIGHTS or not getattr(callback, "reads_weights", True)
    return own is not keras.callbacks.Callback.on_epoch_end and not known


def _end_training(original: Callable, callbacks: Any, *args: Any, **kwargs: Any) -> None:
    if _shared(callbacks.model):
        # After the last epoch's callbacks, `fit` replaces weights by an optimizer's averages, so what only the chief
        # saves must be gathered again.
        take_snapshots(variables_of(callbacks.model))
    with _quietly(callbacks):
        original(callbacks, *args, **kwargs)
    if _shared(callbacks.model):
        callbacks._toolkit_training = False
        extremes(callbacks.model.distribute_strategy, np.array([0], np.int64))


def _begin_other(original: Callable, callbacks: Any, *args: Any, **kwargs: Any) -> None:
    agree(callbacks.model)
    if _has_replicas(callbacks.model) and callbacks.model.built:
        average_statistics(callbacks.model)
    looked_at = getattr(callbacks, "_toolkit_training", False)  # Called in `fit`, before training.
    if _shared(callbacks.model) and callbacks.model.built and not looked_at:
        check_equal_weights(callbacks.model)
    original(callbacks, *args, **kwargs)
