"""Files that every worker of a script writes under the same name: each is always complete.

Every worker of an unmodified script calls `model.save`, or saves a `tf.train.Checkpoint`, with the same path. Written
in place, they would write into each other's files. Each worker writes them, although all write the same: it may read
them at once, and if it left them to the chief, it could read older ones, or have its own disk.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import socket
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import tensorflow as tf

from toolkit.strategies.processes.agreement import processes
from toolkit.strategies.upstream import private
from toolkit.support.graphs import outside


def save(original: Callable, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """Writes to a temporary directory, and renames the complete files."""
    strategy = model.distribute_strategy
    if hasattr(strategy, "replace_functions"):  # It dispatches steps to workers.
        strategy.wait_for_steps(model)
    if processes(strategy) == 1 or not _is_here(filepath):
        return original(model, filepath, *args, **kwargs)
    _look_at_optimizers()
    path = pathlib.Path(filepath)
    if kwargs.get("zipped") is False:  # Keras makes the directory, and those above it.
        path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.is_dir():
        return original(model, filepath, *args, **kwargs)  # Keras says so.
    overwrite = args[0] if args else kwargs.get("overwrite", True)
    # A file that is younger than this process is another worker's, which all but the first find in their way.
    older = not overwrite and path.exists() and path.stat().st_mtime < psutil.Process().create_time()
    if older and not private.ask_to_proceed_with_overwrite(str(path)):
        return None
    with _aside(path) as aside:
        return original(model, aside, *args, **kwargs)


def _look_at_optimizers() -> None:
    """Keras creates an optimizer to see which attributes any has; this makes it do so outside of a strategy's scope.

    `fit` in a scope, as Keras's guide has it, has callbacks save there: that optimizer's variable would be a broadcast,
    which the chief alone enters. Keras 3.15 keeps the answer under one name and looks for it under another.
    """
    if tf.distribute.has_strategy():
        names = outside(lambda: private.get_attr_skipset("Optimizer"))
        private.global_state.set_global_attribute("saving_attr_skiplist_Optimizer", names)
        private.global_state.set_global_attribute("saving_attr_skipset_Optimizer", names)


def save_checkpoint(original: Callable, saver: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
    """Writes a checkpoint's temporary files, and renames all of them: another process's index has other data.

    tf.train.Checkpoint and CheckpointManager write through it; both then record the path that it returns.
    """
    if not tf.executing_eagerly() or not _is_here(file_prefix):
        return original(saver, file_prefix, *args, **kwargs)
    path = pathlib.Path(file_prefix)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _aside(path) as aside:
        original(saver, str(aside), *args, **kwargs)
    return tf.constant(os.fspath(file_prefix))


@contextlib.contextmanager
def _aside(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields this name in a temporary directory beside `path`: at the end of the block all that is there replaces it.

    Keras takes the format from a name's end, and other files' names from a name: those of shards.
    """
    directory = path.with_name(f".{path.name}.{_own()}")
    try:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        yield directory / path.name
        with _locked(path.parent):
            _move(directory, path.parent)
    except OSError as error:  # Errors must name `path`, the only name that the caller knows.
        for part in ("filename", "strerror"):
            if (text := getattr(error, part)) is not None:
                setattr(error, part, str(text).replace(str(directory / path.name), str(path)))
        raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _move(source: pathlib.Path, target: pathlib.Path) -> None:
    """Moves files into a directory, an index after the files that it names."""
    for each in sorted(source.iterdir(), key=lambda each: (each.suffix in (".index", ".json"), each.name)):
        place = target / each.name
        if each.is_dir() and place.is_dir():  # Keras, too, writes into one that is there.
            _move(each, place)
        else:
            each.replace(place)


def _is_here(path: Any) -> bool:
    return isinstance(path, (str, os.PathLike)) and "://" not in str(path)


def _own() -> str:
    """A name that no other process uses."""
    return f"{socket.gethostname()}-{os.getpid()}"


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
    """A context that one process at a time is in for this directory, as far as its file system has locks."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
