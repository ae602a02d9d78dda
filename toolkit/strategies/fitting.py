"""What Keras's own training loop needs from several processes, and has no hook for.

Keras 3 knows nothing of other workers. `CallbackList` is the one object through which `fit`,
`evaluate` and `predict` of every model pass at the right moments, and `Model.save` and
`save_weights` are how it writes; so those public methods are wrapped, once for the process, for
models that were built under a strategy of several processes. Others notice nothing. This is the one
place where Keras's classes are touched; `tests/strategies/test_fitting.py` fails when they change.
"""

import functools
import logging
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import keras

from toolkit.strategies import statistics
from toolkit.strategies.agreement import is_chief, processes

__all__ = ["adapt_keras"]

_LOG = logging.getLogger(__name__)
_NEVER = sys.maxsize  # Steps between two savings.


def adapt_keras() -> None:
    """Makes callbacks and saving fit several processes; calling it again changes nothing."""
    callbacks, model = keras.callbacks.CallbackList, keras.Model
    _wrap(callbacks, "set_model", _quieten)
    for moment in ("on_epoch_end", "on_test_begin", "on_predict_begin"):
        _wrap(callbacks, moment, _average)
    _wrap(model, "save", _save)
    _wrap(model, "save_weights", _save)


def _wrap(owner: type, name: str, around: Callable) -> None:
    original = getattr(owner, name)
    if getattr(original, "_toolkit", False):
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    method._toolkit = True  # type: ignore[attr-defined]
    setattr(owner, name, method)


def _shared(model: Any) -> bool:
    return model is not None and processes(model.distribute_strategy) > 1


def _quieten(original: Callable, callbacks: Any, model: Any) -> None:
    """Lets only the chief's callbacks write: the others' go on watching, with nothing to write to."""
    if _shared(model) and not is_chief(model.distribute_strategy):
        for callback in callbacks.callbacks:
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.filename = os.devnull
            elif isinstance(callback, keras.callbacks.TensorBoard):
                callback.log_dir = _scratch()
            elif isinstance(callback, keras.callbacks.ModelCheckpoint):
                callback.save_freq = _NEVER
            elif isinstance(callback, keras.callbacks.BackupAndRestore):
                callback.save_freq = _NEVER  # It still restores what the chief wrote.
                callback.delete_checkpoint = False
    original(callbacks, model)


@functools.cache
def _scratch() -> str:
    """A directory that is gone when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="toolkit-not-chief-")
    _KEPT.append(folder)
    return folder.name


_KEPT: list = []  # A temporary directory lives as long as its object.


def _average(original: Callable, callbacks: Any, *args: Any, **kwargs: Any) -> Any:
    if _shared(callbacks.model) and callbacks.model.built:
        statistics.average(callbacks.model)
    return original(callbacks, *args, **kwargs)


def _save(original: Callable, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """Writes aside and puts the whole file in place; a worker that isn't chief never replaces one.

    Every worker of an unmodified script calls `model.save` with the same path. Written in place,
    they would write into each other's file.
    """
    if not _shared(model) or not isinstance(filepath, (str, os.PathLike)) or "://" in str(filepath):
        return original(model, filepath, *args, **kwargs)
    path = pathlib.Path(filepath)
    chief = is_chief(model.distribute_strategy)
    if not chief and path.exists():
        _LOG.info("%s is left to the chief", path)
        return None
    # Keras tells the format by the end of the name.
    suffix = "".join(path.suffixes[-2:]) if path.name.endswith(".weights.h5") else path.suffix
    aside = path.with_name(f".{path.name.removesuffix(suffix)}.{os.getpid()}{suffix}")
    try:
        result = original(model, aside, *args, **kwargs)
        if chief:
            aside.replace(path)
        else:
            _put_if_absent(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return result


def _put_if_absent(aside: pathlib.Path, path: pathlib.Path) -> None:
    try:
        os.link(aside, path)
    except FileExistsError:  # The chief was faster.
        pass
    except OSError:  # A disk without links.
        if not path.exists():
            aside.replace(path)
