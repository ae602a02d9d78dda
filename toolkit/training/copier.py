"""The process that copies a run directory to a URL of fsspec's, and brings it back. `copying` starts it.

    URL/checkpoints/step-00000390-end/arrays.safetensors
                                      manifest.json      put last: without it, a checkpoint doesn't count
        run.json, history.csv, best.keras ...            as in the run directory; put before the manifest
        writer.json                                      which process copies to this place

The layout is the run directory's own. Object stores have no rename, but show an object whole or not at all. Other
stores may show a part: a manifest that doesn't fit its own SHA-256, or its arrays', doesn't count either.

It is a process because drivers draw from Python's random generator before they try again (botocore does): in the
training's process, a network that fails would change what the training draws. It reads JSON, a line for each order, and
writes what came of it, and ends when nobody is left to give orders.
"""

import contextlib
import functools
import json
import logging
import math
import os
import pathlib
import queue
import re
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from toolkit.errors import RunDirectoryError
from toolkit.support import files, signals
from toolkit.training.checkpoints import ARRAYS, MANIFEST, CheckpointStore, order
from toolkit.training.copying import SILENT, Times
from toolkit.training.place import Place, words
from toolkit.training.writer import WRITER, TakenOver, Writer, facts_of

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_IDENTITY, _TOKEN = "run.json", ".copy"
_CHECKPOINT = re.compile(r"(checkpoints(?:-\d+)?)/(step-\d{8,}(?:-end)?)/([^/]+)")
_FOR_GOOD = (PermissionError, FileNotFoundError, NotImplementedError, RunDirectoryError)  # No second attempt helps.


class Copier:
    """Copies a run directory.

    Args:
        url: Such as "s3://bucket/mine" or "file:///mnt/shared/mine".
        keep: How many complete checkpoints the copy keeps, the newest ones.
        token: By which this run's process is known there.
        copied: Time and size of each file of the directory when it was copied, as far as that is known.
        times: How long it waits.
        tell: Is called with what the run should know.

    Raises:
        RunDirectoryError: There is no such kind of place, or what reads and writes it isn't installed.
    """

    def __init__(
        self,
        url: str,
        *,
        keep: int,
        token: str,
        copied: Mapping[str, Sequence[int]],
        times: Times,
        tell: Callable[..., object],
    ) -> None:
        self._times, self._report = times, tell
        self._place = Place(url)
        self._writer = Writer(self._place, token=token, times=times)
        self._keep = keep
        self._token = token
        self._directory = pathlib.Path()
        self._recipe, self._resume = "", False
        self._there: set[str] | None = None  # What was found there before the run began.
        self._copied = {name: list(signature) for name, signature in copied.items()}
        self._unreadable: set[str] = set()
        self._news = threading.Condition()
        self._wanted = self._done = 0  # Times that something was to be copied, and that all was.
        self._ending = self._over = False
        self._hurries = False  # Whether the run waits for the copy.
        self._reason = ""  # Why the last attempt failed.

    def has_checkpoint(self) -> bool:
        """Does what `Copy.has_checkpoint` promises."""
        if self._there is None:
            try:
                self._there = self._patiently(self._place.names, seconds=self._times.patience)
            except Exception as error:
                raise self._place.unusable(error) from error
        return any(_complete(self._there).values())

    def begin(self, directory: str, recipe: str, resume: bool) -> None:
        """Does what `Copy.begin` promises, with the same arguments.

        Raises:
            RunDirectoryError: Another run is copied there, or one that would be overwritten, or it can't be reached.
        """
        self._directory, self._recipe, self._resume = pathlib.Path(directory), recipe, resume
        if self._place.folder is not None:
            here, there = self._directory.resolve(), self._place.folder.resolve()
            if here == there or here in there.parents or there in here.parents:
                raise self._place.refused(f"the run directory is {directory}", "Name a place outside of it")
        has_one = bool(CheckpointStore(self._directory / "checkpoints").names())
        try:
            self._patiently(
                self._claim,
                seconds=self._times.impatience if has_one else self._times.patience,
                longest=self._times.silence,
            )
            if resume:
                self._bring()
        except RunDirectoryError:
            self.leave()
            raise
        except Exception as error:  # Drivers raise errors of their own libraries.
            if not has_one:
                self.leave()
                raise self._place.unusable(error) from error
            _LOG.warning(
                "The copy in %s can't be read (%s): the run goes on from its directory", self._place.shown, words(error)
            )

    def leave(self) -> None:
        """Leaves the place to others where the run didn't begin."""
        with contextlib.suppress(Exception):  # Another error is on its way.
            self._writer.release()

    def start(self) -> None:
        """Begins to copy, in the background."""
        threading.Thread(target=self._work, name="copy", daemon=True).start()
        threading.Thread(target=self._writer.beat, name="beat", daemon=True).start()

    def wake(self, wanted: int) -> None:
        """Has the thread look for what has changed in the directory. Returns at once.

        Args:
            wanted: The number of this order.
        """
        with self._news:
            self._wanted = wanted
            self._news.notify_all()

    def finish(self, hurries: bool) -> None:
        """Ends this process when the copy is as the directory is, and the place is left to others.

        Args:
            hurries: Whether the run waits for it.
        """
        with self._news:
            self._ending, self._hurries = True, hurries
            self._news.notify_all()

    # What the thread does.

    def _work(self) -> None:
        failures = 0
        while True:
            with self._news:
                self._news.wait_for(lambda: self._wanted > self._done or self._ending)
                wanted = self._wanted
            try:
                if wanted > self._done:
                    self._copy()
                with self._news:
                    self._done, self._reason = wanted, ""
                    ends = self._ending and self._wanted == wanted
                if failures:
                    _LOG.info("The copy in %s is complete again", self._place.shown)
                failures = 0
                self._report(done=wanted, copied=self._copied)
                if ends:
                    self._writer.release()
                    os._exit(0)
            except (TakenOver, RunDirectoryError) as error:
                self._over = True
                _LOG.error("This run is no longer copied to %s: %s", self._place.shown, error)
                self._report(over=True)
                os._exit(0)
            except Exception as error:  # Drivers raise errors of their own libraries, and training goes on.
                failures += 1
                reason = self._place.masked(words(error))
                if reason != self._reason:
                    _LOG.warning("Copying to %s failed (%s); it is tried again", self._place.shown, reason)
                self._report(reason=reason)
                with self._news:
                    self._reason = reason
                    pause = min(self._times.pause, 2.0 ** min(failures, 10))
                    self._news.wait_for(lambda: self._hurries, timeout=pause)
                if self._hurries:
                    time.sleep(self._times.look)

    def _copy(self) -> None:
        """Copies what the place lacks, and removes what the directory wouldn't keep."""
        if not self._writer.claimed:  # It couldn't be reached as the run began.
            self._claim()
        self._writer.check()
        there = self._place.names()
        self._put_files()
        while (chosen := self._next(there)) is not None:
            folder, name = chosen
            if self._put_checkpoint(folder, name):
                there |= {f"{folder}/{name}/{file}" for file in (ARRAYS, MANIFEST)}
        self._writer.check()
        complete = _complete(there)
        kept = {(folder, name) for folder, names in complete.items() for name in names[-self._keep :]}
        gone = {path for path in there if (found := _CHECKPOINT.fullmatch(path)) and found.groups()[:2] not in kept}
        for path in sorted(gone, key=lambda path: not path.endswith(MANIFEST)):  # Half of one never counts.
            self._place.remove(path)

    def _next(self, there: set[str]) -> tuple[str, str] | None:
        """Returns the checkpoint to copy next: each folder's newest first, the folder of the first `fit` before others.

        A run that resumes needs the end of each earlier part.
        """
        complete = _complete(there)
        waiting = []
        for path in self._directory.glob("checkpoints*"):
            here, copied = CheckpointStore(path).names(), complete.get(path.name, [])
            wanted = sorted({*here, *copied}, key=order)[-self._keep :]
            missing = [name for name in wanted if name not in copied]
            waiting += [(name != wanted[-1], _part(path.name), path.name, name) for name in reversed(missing)]
        if not waiting:
            return None
        first = min(waiting, key=lambda each: each[:2])  # Of several, the newest stands first.
        return first[2:]

    def _put_checkpoint(self, folder: str, name: str) -> bool:
        """Copies a checkpoint; returns whether the place has it, or it was removed from the directory meanwhile."""
        path = CheckpointStore(self._directory / folder).place(name)
        try:
            manifest = (path / MANIFEST).read_bytes()
            self._place.put(path / ARRAYS, f"{folder}/{name}/{ARRAYS}")
        except FileNotFoundError:
            if path.exists():  # Then it is the place that doesn't exist.
                raise
            return False
        with contextlib.suppress(FileNotFoundError):  # It was removed, but what was read of it was whole.
            if (path / MANIFEST).read_bytes() != manifest:  # It was written again.
                return False
        self._put_files()  # What belongs to it, such as the best model, is there before it counts.
        self._writer.check()
        self._place.write(f"{folder}/{name}/{MANIFEST}", manifest)
        return True

    def _put_files(self) -> None:
        """Copies what has changed beside checkpoints."""
        for path, relative in self._others():
            try:
                with path.open("rb"):
                    found = path.stat()
            except OSError as error:
                if relative not in self._unreadable and not isinstance(error, FileNotFoundError):
                    self._unreadable.add(relative)
                    _LOG.warning("%s isn't copied (%s)", path, error.strerror or error)
                continue
            if self._copied.get(relative) == (signature := _signature(found)):
                continue
            try:
                self._place.put(path, relative)
            except FileNotFoundError:
                if path.exists():
                    raise
                continue
            self._copied[relative] = signature

    def _others(self) -> Iterator[tuple[pathlib.Path, str]]:
        """Yields the files of the directory that aren't a checkpoint's, and their names in the copy."""
        for folder, folders, names in os.walk(self._directory):
            here = pathlib.Path(folder)
            top = here == self._directory
            folders[:] = sorted(n for n in folders if n[0] != "." and not (top and n.startswith("checkpoints")))
            # The identity first: a directory with checkpoints and without it is nobody's.
            for name in sorted(names, key=lambda name: (name != _IDENTITY, name)):
                path = here / name
                with contextlib.suppress(OSError):
                    if name[0] != "." and stat.S_ISREG(path.lstat().st_mode):  # Opening a pipe would wait for ever.
                        yield path, path.relative_to(self._directory).as_posix()

    # Whose place it is.

    def _claim(self) -> None:
        """Takes the place for this process, once it is sure that no other run is or was copied there.

        Raises:
            RunDirectoryError: One is, or was.
        """
        there = self._place.names()
        complete, here = _complete(there), self._directory / "checkpoints"
        identity = self._place.read(_IDENTITY)
        if not self._resume and (any(complete.values()) or "summary.json" in there):
            raise self._place.refused(
                "it holds the copy of an earlier run, which would be overwritten",
                "Add --resume (Run: resume=True) to continue that run, or name another place for the copy",
            )
        if any(complete.values()):
            theirs, ours = facts_of(identity), facts_of(_content(self._directory / _IDENTITY))
            if theirs.get("recipe") != self._recipe:
                name = theirs.get("recipe", "a script that nothing names")
                raise self._place.refused(
                    f"it holds a run of {name}, and this is {self._recipe}", "Name another place for the copy"
                )
            if CheckpointStore(here).names() and theirs.get("id") != ours.get("id"):
                raise self._place.refused(
                    f"it holds the copy of another run than {self._directory}", "Name another place for the copy"
                )
        self._writer.take(before=(_content(self._directory / _TOKEN) or b"").decode(errors="replace"))
        self._resume = True  # From now on, what is there is this run's.
        files.write_text(self._directory / _TOKEN, self._token)

    # From the place to the disk.

    def _bring(self) -> None:
        """Brings each part's newest complete checkpoint that is newer than the disk's, and what belongs to it."""
        there = self._place.names()
        ahead = {
            folder: [name for name in names if order(name) > _newest(self._directory / folder)]
            for folder, names in _complete(there).items()
        }
        if not any(ahead.values()):
            return
        _LOG.info("Taking the run from its copy in %s", self._place.shown)
        for relative in sorted(there):
            parts = relative.split("/")
            plain = not any(part.startswith(".") or not part for part in parts) and relative != WRITER
            if plain and not parts[0].startswith("checkpoints"):
                path = self._directory.joinpath(*parts)
                files.make_directory(path.parent)
                with files.replacing(path) as aside:
                    self._get(relative, aside)
                self._copied[relative] = _signature(path.stat())
        for folder, names in ahead.items():
            store = CheckpointStore(self._directory / folder)
            for name in reversed(names):
                fill = functools.partial(self._get_checkpoint, f"{folder}/{name}")
                damage = store.take(name, fill)
                if damage is None:
                    break
                _LOG.warning("The copy's checkpoint %s is damaged (%s); trying the one before it", name, damage)
                self._place.remove(f"{folder}/{name}/{MANIFEST}")

    def _get_checkpoint(self, relative: str, into: pathlib.Path) -> None:
        for name in (MANIFEST, ARRAYS):
            self._get(f"{relative}/{name}", into / name)

    def _get(self, relative: str, path: pathlib.Path) -> None:
        self._patiently(
            functools.partial(self._place.get, relative, path),
            seconds=self._times.patience,
            longest=math.inf,
        )

    def _patiently(self, action: Callable[[], _Result], *, seconds: float, longest: float = 0.0) -> _Result:
        """Tries something until it succeeds, or for so long.

        Args:
            action: It.
            seconds: How long it is tried again.
            longest: How much longer an attempt may take that has begun by then.
        """
        ends = time.monotonic() + seconds
        while True:
            try:
                return _within(action, seconds=max(ends - time.monotonic(), self._times.look) + longest)
            except _FOR_GOOD:
                raise
            except Exception:
                if time.monotonic() > ends:
                    raise
                time.sleep(self._times.look)


def _complete(there: set[str]) -> dict[str, list[str]]:
    """Returns the names of complete checkpoints by folder, "checkpoints" or "checkpoints-2", oldest first."""
    found: dict[str, list[str]] = {}
    for path in there:
        match = _CHECKPOINT.fullmatch(path)
        if match and match[3] == MANIFEST and f"{match[1]}/{match[2]}/{ARRAYS}" in there:
            found.setdefault(match[1], []).append(match[2])
    return {folder: sorted(found[folder], key=order) for folder in sorted(found, key=_part)}


def _part(folder: str) -> int:
    return int(folder.partition("-")[2] or 1) if re.fullmatch(r"checkpoints(-\d+)?", folder) else 0


def _newest(directory: pathlib.Path) -> tuple[int, bool]:
    names = CheckpointStore(directory).names()
    return order(names[-1]) if names else (-1, False)


def _signature(found: os.stat_result) -> list[int]:
    return [found.st_mtime_ns, found.st_size]


def _content(path: pathlib.Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _within(action: Callable[[], _Result], *, seconds: float) -> _Result:
    """Returns what a function returns, or raises TimeoutError after so long; the function isn't stopped then."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="copy-start", daemon=True)
    thread.start()
    thread.join(None if seconds == math.inf else seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer in {seconds:.0f} s")
    return results[0]


class _Telling(logging.Handler):
    """Has the run log what this process logs."""

    def __init__(self, tell: Callable[..., object]) -> None:
        super().__init__()
        self._report = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._report(level=record.levelno, text=record.getMessage())


def _main() -> None:
    """Obeys a run's orders, one a line; ends with it."""
    os.nice(10)  # Training goes first.
    for number in signals.SIGNALS:  # A launcher sends them to the run, which then has seconds in which it copies.
        signal.signal(number, signal.SIG_IGN)
    channel, lock = os.fdopen(os.dup(1), "w", encoding="utf-8"), threading.Lock()
    os.dup2(2, 1)  # What a driver prints is no answer.
    parent, orders = os.getppid(), queue.SimpleQueue[dict[str, Any]]()

    def tell(**facts: Any) -> None:
        with lock, contextlib.suppress(OSError, ValueError):
            channel.write(json.dumps(facts) + "\n")
            channel.flush()

    def read() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        os._exit(0)

    def watch() -> None:
        while os.getppid() == parent:  # A fork of the run may hold its end of the pipe.
            time.sleep(1)
        os._exit(0)

    for logger in (_LOG, logging.getLogger("toolkit")):
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(_Telling(tell))
    for each in (read, watch):
        threading.Thread(target=each, daemon=True).start()
    copier: Any = None
    with files.guarded():
        while True:
            order = orders.get()
            do = order.pop("do")
            try:
                if do == "open":
                    copier = Copier(**{**order, "times": Times(**order["times"]), "tell": tell})
                    answer = None
                else:
                    answer = getattr(copier, do)(**order)
                if do not in SILENT:
                    tell(answer=answer)
            except RunDirectoryError as error:
                tell(asked=error.asked, found=error.found, remedy=error.remedy)


if __name__ == "__main__":
    _main()
