"""What Keras's training loop needs with several processes and has no hook for.

Keras 3 knows nothing of other workers. A `CallbackList` is the one object through which each call of `fit`, `evaluate`
or `predict` passes at the right moments. So where one is told its model, and that is of a strategy of ours, it becomes
a `FitCallbacks`; others are left alone. `tests/multiprocess/test_fit.py` fails when Keras changes there.
"""

import concurrent.futures
import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from toolkit.errors import StrategyError
from toolkit.strategies import mesh
from toolkit.strategies.fit.equality import WeightsWatch, average_statistics, check_equal_weights
from toolkit.strategies.fit.models import prepare
from toolkit.strategies.mesh import any_in_shards
from toolkit.strategies.options import options_of
from toolkit.strategies.processes.agreement import extremes, is_chief, processes
from toolkit.strategies.step.local_steps import agree
from toolkit.strategies.step.moments import may_differ
from toolkit.strategies.step.sharded_optimizer import by_shard
from toolkit.strategies.step.sharded_variable import chief_reads, drop_snapshots, snapshots_of, take_snapshots
from toolkit.strategies.upstream.wrapping import attach, extend, instead
from toolkit.strategies.variables import variables_of


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


def set_model(original: Callable, callbacks: Any, model: Any) -> None:
    """Makes callbacks and saving work with several processes, where a call of `fit` and the like begins."""
    if model is not None and mesh.is_toolkit_strategy(model.distribute_strategy):
        prepare(model)  # It may have been made and compiled before the strategy.
        extend(callbacks, FitCallbacks)
    if not isinstance(callbacks, FitCallbacks):
        original(callbacks, model)
        return
    callbacks._begin_call(model)
    with callbacks._quietly():
        original(callbacks, model)


def _by_shard(original: Callable, callback: Any, optimizer: Any) -> None:
    with by_shard():
        original(callback, optimizer)


class FitCallbacks(keras.callbacks.CallbackList):
    """The callbacks of one call of `fit`, `evaluate` or `predict` under a strategy of ours."""

    def _begin_call(self, model: Any) -> None:
        """Takes a model, after a look at what the callbacks are to save."""
        strategy = model.distribute_strategy if model is not None else None
        ours = mesh.is_toolkit_strategy(strategy)
        self._shared = ours and processes(strategy) > 1
        self._replicated = ours and mesh.replica_count(strategy) > 1
        self._dispatching = strategy if hasattr(strategy, "replace_functions") else None  # It sends steps to workers.
        self._watch: WeightsWatch | None = None
        self._training = self._may_stop = self._compared = False
        self._order: Any = None
        self._quiet: list[tuple[Any, dict]] = []
        self._keeps_snapshots = not ours or options_of(strategy).weights != "sharded"
        if self._dispatching is not None:
            self._dispatching.replace_functions(model)
        if self._shared and model.built and any_in_shards(model.variables):
            _check_frequencies(self.callbacks, "the layers are sharded over processes, and gathered at its end")
        if ours and options_of(strategy).weights == "sharded":
            for each in self.callbacks:
                if isinstance(each, keras.callbacks.SwapEMAWeights):  # It sets what variables hold: their shards.
                    attach(each, _tf_swap_variables=_by_shard, _tf_finalize_ema_values=_by_shard)
        if self._shared and options_of(strategy).weights == "sharded":
            _check_frequencies(self.callbacks, "weights are sharded over processes, and gathered at its end")
        if self._shared and options_of(strategy).optimizer_state == "sharded":
            _check_frequencies(
                self.callbacks, "the optimizer's state is sharded over processes, and gathered at its end"
            )
        if ours and options_of(strategy).local is not None:
            _check_frequencies(self.callbacks, "replicas train by themselves, and agree at its end")
        if self._shared and not is_chief(strategy):
            self._quiet = [(callback, _without_writing(callback)) for callback in self.callbacks]

    @contextlib.contextmanager
    def _quietly(self, saving: Sequence = ()) -> Iterator[None]:
        """A context in which only the chief's callbacks write. The others' run, but write into nothing.

        It is entered for each of Keras's calls alone: where `fit` raises, callbacks are as the user made them.

        Args:
            saving: Those that save at the end of an epoch, which the chief does alone: the others help it to read.
        """
        replaced = [*self._quiet, *((each, {"on_epoch_end": self._chiefs(each.on_epoch_end)}) for each in saving)]
        if not replaced:
            yield
            return
        before = [(each, {name: vars(each)[name] for name in new if name in vars(each)}) for each, new in replaced]
        silent = lambda _: lambda *_, **__: None  # noqa: E731
        monitors = instead(keras.callbacks.RemoteMonitor, "on_epoch_end", silent)
        with monitors if self._quiet else contextlib.nullcontext():
            try:
                for callback, others in replaced:
                    vars(callback).update(others)
                yield
            finally:
                for (callback, others), (_, own) in zip(replaced, before, strict=True):
                    for name in others:
                        vars(callback).pop(name, None)
                    vars(callback).update(own)

    def _chiefs(self, save: Callable) -> Callable:
        """Returns what the chief does alone, on each process."""
        strategy = self.model.distribute_strategy

        def alone(*args: Any, **kwargs: Any) -> None:
            with chief_reads(strategy, list(variables_of(self.model))):
                if is_chief(strategy):
                    save(*args, **kwargs)

        return alone

    def on_train_begin(self, logs: Any = None) -> None:
        """Compares what must be the same in all processes."""
        if self._dispatching is not None:
            self._dispatching.begin(self.model)
        with self._quietly():
            super().on_train_begin(logs)  # A callback may restore weights.
        self._watch = WeightsWatch(self.model) if self._replicated else None
        if self._shared and self.model.built:
            check_equal_weights(self.model)
            self._training = True
            self._may_stop = bool(self._largest(any(_may_stop_in_an_epoch(callback) for callback in self.callbacks)))
            self._order = getattr(self.model.distribute_strategy, "order", None)
            self._compared = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins what is counted by epochs."""
        if self._shared:
            drop_snapshots(variables_of(self.model))
        if self._watch is not None:
            self._watch.begin(epoch)
        super().on_epoch_begin(epoch, logs)  # A callback may set metrics, or a learning rate.
        if self._dispatching is not None:
            steps, epochs = (self.params.get(name) for name in ("steps", "epochs"))
            self._dispatching.session(self.model).begin_epoch(steps, (epochs or epoch + 1) - epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Has all processes stop after the same step."""
        if self._watch is not None:
            self._watch.after_step(batch + 1)
        with self._quietly():
            super().on_train_batch_end(batch, logs)
        if self._may_stop:  # Each alone, they would wait for one another's steps.
            self.model.stop_training = bool(self._largest(bool(self.model.stop_training)))
        if self._order is not None and not self._compared:
            self._compared = True
            self._order.compare_first()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Makes and compares what all replicas have alike, before callbacks see it."""
        agree(self.model)
        if self._watch is not None:
            self._watch.compare(f"epoch {epoch + 1:,}")
        if self._replicated and may_differ(self.model):
            average_statistics(self.model)
        if self._order is not None:
            self._order.compare_epoch(epoch + 1)
        saving = []
        if self._shared and self._read_together:
            saving = [each for each in self.callbacks if _only_saves(each)]
            if self._some_read_weights("on_epoch_end", saving):  # Callbacks that only the chief has may save.
                take_snapshots(variables_of(self.model))
                saving = []
        with self._quietly(saving):
            super().on_epoch_end(epoch, logs)
        if self._shared:  # The other processes find the files of the chief's callbacks, and all stop together.
            self.model.stop_training = bool(self._largest(bool(self.model.stop_training)))

    def on_train_end(self, logs: Any = None) -> None:
        """Waits for the files of the chief's callbacks."""
        if self._shared and (self._keeps_snapshots or self._some_read_weights("on_train_end")):
            # After the last epoch's callbacks, `fit` replaces weights by an optimizer's averages, so what only the
            # chief saves must be gathered again.
            take_snapshots(variables_of(self.model))
        with self._quietly():
            super().on_train_end(logs)
        if self._shared and not self._keeps_snapshots:  # The model may be larger than a worker's memory.
            drop_snapshots(variables_of(self.model))
        if self._shared:
            self._training = False
            self._largest(0)

    def on_test_begin(self, logs: Any = None) -> None:
        """Makes what all replicas have alike."""
        self._begin_reading()
        super().on_test_begin(logs)

    def on_predict_begin(self, logs: Any = None) -> None:
        """Makes what all replicas have alike."""
        self._begin_reading()
        super().on_predict_begin(logs)

    def _begin_reading(self) -> None:
        agree(self.model)
        if self._replicated and self.model.built:  # A loop of the script's own may have trained.
            average_statistics(self.model)
        if self._shared and self.model.built and not self._training:  # `fit` has looked before it trained.
            check_equal_weights(self.model)

    @property
    def _read_together(self) -> bool:
        """Whether the model has what no process holds whole."""
        return next(snapshots_of(variables_of(self.model)), None) is not None

    def _some_read_weights(self, moment: str, saving: Sequence = ()) -> bool:
        """Returns whether a callback may read what no process holds whole. All must call it.

        Args:
            moment: The method in which it may do so.
            saving: Callbacks that only save, for which the chief reads alone if all processes have them.
        """
        if not self._read_together:
            return False
        reads = any(_may_read_weights(each, moment) for each in self.callbacks if each not in saving)
        asked = np.array([reads, len(saving), -len(saving)], np.int64)
        most = extremes(self.model.distribute_strategy, asked)[1]
        return bool(most[0] or most[1] != -most[2])

    def _largest(self, value: int) -> int:
        """Returns the largest of the workers' whole numbers. All must call it."""
        return int(extremes(self.model.distribute_strategy, np.array([value], np.int64))[1][0])


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


def _may_stop_in_an_epoch(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback has the user's own code for batches, which may end an epoch on one worker only.

    Workers then ask one another after each batch, which takes one or two milliseconds; others' steps cost nothing.
    """
    moments = ("on_train_batch_end", "on_batch_end", "on_train_batch_begin", "on_batch_begin")
    modules = (getattr(getattr(callback, name, None), "__module__", None) or "" for name in moments)
    return any(module.partition(".")[0] not in ("keras", "toolkit") for module in modules)


def _may_read_weights(callback: keras.callbacks.Callback, moment: str) -> bool:
    """Whether a method of it, such as "on_epoch_end", may change or read weights."""
    if isinstance(callback, keras.callbacks.EarlyStopping):
        return bool(callback.restore_best_weights)
    own = getattr(getattr(callback, moment), "__func__", getattr(callback, moment))
    known = type(callback) in _READ_NO_WEIGHTS or not getattr(callback, "reads_weights", True)
    return own is not getattr(keras.callbacks.Callback, moment) and not known


def _only_saves(callback: keras.callbacks.Callback) -> bool:
    """Whether all that it does at an epoch's end is saving."""
    kinds = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)
    made_by = getattr(callback.on_epoch_end, "__module__", None) or ""
    return isinstance(callback, kinds) and made_by.partition(".")[0] in ("keras", "toolkit")
