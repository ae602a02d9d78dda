"""Checkpoints: a directory of them, and writing one while training goes on. Only checksums prove one complete.

    DIRECTORY/step-00000390-end/arrays.safetensors    every variable, by name
                                manifest.json         SHA-256 of the arrays, their dtypes, metadata

Keras's own files are written in place: killed in mid-write, `BackupAndRestore` and `.keras` leave
nothing that can be read. Here a checkpoint is written under another name, synced, and renamed. One
that is written again is renamed aside meanwhile, and still found there: no moment is without it.

    DIRECTORY/.writing-NAME     not finished: removed by the next `save`
              .replaced-NAME    the earlier NAME, which counts until there is a new one
              .removing-NAME    no longer wanted
              damaged-NAME      found damaged, and kept for inspection
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import pathlib
import queue
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from toolkit.errors import CheckpointError, RunDirectoryError
from toolkit.support import files

if TYPE_CHECKING:
    import numpy as np

    from toolkit.training.arrays import Arrays

_LOG = logging.getLogger(__name__)
_FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})(-end)?")
ARRAYS, MANIFEST = "arrays.safetensors", "manifest.json"
_WRITING, REPLACED, _REMOVING = ".writing-", ".replaced-", ".removing-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """The position after `step` steps in all: `epoch` whole epochs, and `batch` steps of the next one."""

    step: int = 0
    epoch: int = 0
    batch: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """What was saved.

    Attributes:
        step: Training steps done.
        arrays: By name, any shape and dtype. Those of an `Arrays` are made when they are read.
        metadata: Whatever JSON can hold.
    """

    step: int
    arrays: "Mapping[str, np.ndarray]"
    metadata: Mapping[str, Any]


class _Damaged(Exception):
    pass


def check_keep(keep: int) -> None:
    """Checks how many checkpoints are to be kept.

    Raises:
        RunDirectoryError: It is none.
    """
    if keep < 1:
        raise RunDirectoryError(
            asked=f"keep={keep} says how many checkpoints to keep",
            found="a run that keeps none can't be resumed",
            remedy="Give keep=1 or more",
        )


class CheckpointStore:
    """The checkpoints in one directory.

    Args:
        directory: Made when the first checkpoint is written.
        keep: How many to keep, the newest ones.
        saved: Is called when a checkpoint is complete, by the thread that has written it; None for nothing.

    Raises:
        RunDirectoryError: That is none.
    """

    def __init__(self, directory: pathlib.Path, *, keep: int = 3, saved: Callable[[], object] | None = None) -> None:
        check_keep(keep)
        self.directory = directory
        self.keep = keep
        self._saved = saved

    def names(self) -> list[str]:
        """Returns the names of the checkpoints, oldest first, damaged ones included."""
        if not self.directory.is_dir():
            return []
        found = {entry.name.removeprefix(REPLACED) for entry in self.directory.iterdir()}
        return sorted((name for name in found if _NAME.fullmatch(name)), key=order)

    def save(self, checkpoint: Checkpoint, *, end_of_epoch: bool = False) -> pathlib.Path:
        """Writes a checkpoint, then removes those beyond `keep` and partial ones of killed processes.

        Raises:
            OSError: It can't be written; all earlier ones are untouched.
        """
        path = self.directory / f"step-{checkpoint.step:08d}{'-end' if end_of_epoch else ''}"
        aside = self.directory / f"{_WRITING}{path.name}"
        replaced = self.directory / f"{REPLACED}{path.name}"
        try:
            with files.guarded():
                files.make_directory(self.directory)
                self._tidy()
                aside.mkdir()
                _write(aside, checkpoint)
            if path.exists():
                _remove(replaced)
                path.rename(replaced)
            aside.rename(path)
        except OSError:
            _remove(aside)
            raise
        files.sync(self.directory)
        for name in self.names()[: -self.keep]:
            self._forget(self.directory / name)
        self._tidy()
        if self._saved is not None:
            self._saved()
        return path

    def take(self, name: str, fill: Callable[[pathlib.Path], object]) -> str | None:
        """Takes in a checkpoint from elsewhere, if it is complete.

        Args:
            name: As of `names`.
            fill: Writes its files into a directory.

        Returns:
            None, or in what it is damaged.

        Raises:
            OSError: It can't be written.
        """
        aside = self.directory / f"{_WRITING}{name}"
        files.make_directory(self.directory)
        _remove(aside)
        try:
            with files.guarded():
                aside.mkdir()
                fill(aside)
            _read(aside)
            for each in (aside / ARRAYS, aside / MANIFEST, aside):
                files.sync(each)
            aside.rename(self.directory / name)
        except _Damaged as damage:
            return str(damage)
        finally:
            _remove(aside)
        files.sync(self.directory)
        return None

    def load(self) -> Checkpoint:
        """Returns the newest complete checkpoint. Damaged ones are named in the log and renamed.

        Raises:
            CheckpointError: There is none, or every one is damaged.
        """
        names = self.names()
        reasons = []
        for name in reversed(names):
            try:
                return _read(self.place(name))
            except _Damaged as error:
                reasons.append(f"{name}: {error}")
                _LOG.warning("Checkpoint %s is damaged (%s); trying the one before it", name, error)
                self._set_aside(self.place(name))
        raise CheckpointError(
            asked=f"{self.directory} is to be resumed from",
            found="every checkpoint is damaged: " + "; ".join(reasons) if reasons else "it holds no checkpoint",
            remedy="Start a new run without resume, in another run directory",
        )

    def newest(self, *, after: int) -> Checkpoint | None:
        """Returns the newest complete checkpoint after a step, None if there is none. Changes nothing on the disk.

        Another process may write and remove checkpoints meanwhile.
        """
        for name in reversed(self.names()):
            if order(name)[0] <= after:
                return None
            try:
                return _read(self.place(name))
            except _Damaged:
                continue
        return None

    def place(self, name: str) -> pathlib.Path:
        """Returns where a checkpoint is: a process killed while it replaced one has left the old one another name."""
        path, replaced = self.directory / name, self.directory / f"{REPLACED}{name}"
        return replaced if replaced.exists() and not path.exists() else path

    def _tidy(self) -> None:
        """Removes what isn't a checkpoint or was replaced by one."""
        for entry in self.directory.iterdir():
            left = entry.name.startswith((_WRITING, _REMOVING))
            if left or (entry.name.startswith(REPLACED) and self.place(entry.name[len(REPLACED) :]) != entry):
                _remove(entry)

    def _forget(self, path: pathlib.Path) -> None:
        """Removes a checkpoint; it is renamed first, so that half of it is never visible."""
        for each in (path.with_name(f"{REPLACED}{path.name}"), path):
            if each.exists():
                removing = path.with_name(f"{_REMOVING}{path.name}")
                _remove(removing)
                try:
                    each.rename(removing)
                except OSError:
                    _LOG.warning("%s can't be removed", each)

    def _set_aside(self, path: pathlib.Path) -> None:
        aside = path.with_name(f"damaged-{path.name.removeprefix(REPLACED)}")
        _remove(aside)
        try:
            path.rename(aside)
        except OSError:  # On a read-only disk the damaged checkpoint stays, and is found damaged again.
            _LOG.warning("%s can't be renamed", path)


class NullCheckpointStore:
    """Replaces the store in a process that isn't the chief: the chief's may be on another host."""

    directory = "the chief's run directory"

    def load(self) -> None:
        """Returns None: the chief reads, and broadcasts what it has read."""

    def save(self, checkpoint: Checkpoint, *, end_of_epoch: bool) -> None:
        """Does nothing: the chief writes."""


def _remove(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):  # rmtree would open it, and wait for ever if it is a pipe.
        path.unlink()


def order(name: str) -> tuple[int, bool]:
    """Returns a checkpoint's step, and whether it is that of an epoch's end, which is newer."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(name)
    return int(match[1]), match[2] is not None


def _write(directory: pathlib.Path, checkpoint: Checkpoint) -> None:
    from toolkit.training import arrays_file
    from toolkit.training.arrays import Arrays

    arrays = Arrays.joined(checkpoint.arrays)
    digest = arrays_file.write(directory / ARRAYS, arrays)
    files.sync(directory / ARRAYS)
    manifest = {
        "format": _FORMAT,
        "step": checkpoint.step,
        "sha256": digest,
        "dtypes": {name: each.dtype.name for name, each in arrays.later.items()},
        "metadata": files.plain(checkpoint.metadata),
    }
    manifest["manifest_sha256"] = _manifest_sum(manifest)
    files.write_json(directory / MANIFEST, manifest)


def _read(directory: pathlib.Path) -> Checkpoint:
    from toolkit.training import arrays_file

    try:
        manifest = json.loads(files.read_text(directory / MANIFEST))
        files.check_file(directory / ARRAYS)

        def check(found: str) -> None:
            claimed = manifest.pop("manifest_sha256")
            if claimed != _manifest_sum(manifest):
                raise _Damaged(f"{MANIFEST} doesn't match its own SHA-256")
            if manifest["format"] != _FORMAT:
                raise _Damaged(f"format {manifest['format']} is not one this version reads")
            if found != manifest["sha256"]:
                raise _Damaged(f"{ARRAYS} doesn't match the SHA-256 in {MANIFEST}")

        arrays = arrays_file.read(directory / ARRAYS, dtypes=manifest["dtypes"], check=check)
        if manifest["step"] != order(directory.name.removeprefix(REPLACED).removeprefix(_WRITING))[0]:
            raise _Damaged(f"{MANIFEST} is that of step {manifest['step']}")
        return Checkpoint(step=manifest["step"], arrays=arrays, metadata=dict(manifest["metadata"]))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _Damaged(f"{type(error).__name__}: {error}") from error


def _manifest_sum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


class Writing:
    """A checkpoint on its way to the disk. A program doesn't end before it is there, unless it is killed.

    The thread reads what it was given and calls the operating system: it takes part in no exchange between processes.
    Hashing, writing and syncing release Python's lock: with 408 MB no other thread waited longer than 50 ms.

    What all processes must read together is read in the thread that makes this, as the other one asks for it: one
    array at a time, and all of them before training goes on.

    Args:
        store: Where it goes.
        checkpoint: Nothing else may change its arrays or metadata.
        end_of_epoch: As for `CheckpointStore.save`.

    Attributes:
        step: Of the checkpoint.
    """

    def __init__(
        self, store: CheckpointStore | NullCheckpointStore, checkpoint: Checkpoint, *, end_of_epoch: bool
    ) -> None:
        from toolkit.training.arrays import Arrays

        self.step = checkpoint.step
        self._error: BaseException | None = None
        arrays = Arrays.joined(checkpoint.arrays)
        asked: queue.SimpleQueue[bool] = queue.SimpleQueue()  # Whether the thread wants the next array; else it ends.
        given: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()

        def next_one() -> "np.ndarray":
            asked.put(True)
            array = given.get()
            if array is None:
                raise OSError("the other processes can't be reached")
            return array

        handed = dataclasses.replace(checkpoint, arrays=_handed(arrays, next_one))

        def write(handed: Checkpoint) -> None:
            try:
                store.save(handed, end_of_epoch=end_of_epoch)
            except BaseException as error:  # `finish` raises it.
                self._error = error
            finally:
                asked.put(False)

        self._thread = threading.Thread(target=write, args=(handed,), name="checkpoint")
        del handed
        self._thread.start()
        reads = True
        try:
            # Where the thread has failed, or another process writes, the others still need this process's part.
            for each in arrays.later.values():
                if each.together:
                    reads = reads and asked.get()
                    array = each.read()
                    if reads:
                        given.put(array)
                    del array
        except BaseException:
            given.put(None)
            raise

    @property
    def ended(self) -> bool:
        """Whether `finish` returns or raises at once."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Waits until the checkpoint is complete on the disk.

        Raises:
            OSError: It can't be written; all earlier ones are untouched.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error


def _handed(arrays: "Arrays", next_one: "Callable[[], np.ndarray]") -> "Arrays":
    """Returns arrays of which those that all processes read together come from another thread, in their order."""
    from toolkit.training.arrays import Arrays

    return Arrays(
        {
            name: dataclasses.replace(each, read=next_one, own=(), together=False) if each.together else each
            for name, each in arrays.later.items()
        }
    )
