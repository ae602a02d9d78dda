"""The run directory: whose run it holds, and which process uses it.

RUN_DIR/run.json        recipe, id and configuration, written when the run begins
        checkpoints/    see `toolkit.training.checkpoints`
        history.csv     one row per epoch
        summary.json    written when the run ends
        tensorboard/    for `tensorboard --logdir`
        model.keras     the trained model; model.weights.h5 where Keras can't save it whole
        best.keras      that of the best epoch, where a metric says which
        .copy           as whom this directory's last process wrote to its copy, see `toolkit.training.copying`

run.json names the script of a directory's run, its fixed configuration, and the logs of each launch.
"""

import datetime
import errno
import fcntl
import json
import logging
import os
import pathlib
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from toolkit.errors import CheckpointError, RunDirectoryError
from toolkit.support import files, redaction, status
from toolkit.training.checkpoints import REPLACED
from toolkit.training.copying import Copy, NullCopy

if TYPE_CHECKING:
    import keras


_LOG = logging.getLogger(__name__)
_ASKED = "{} is where this run writes"
_NO_COPY = NullCopy()


def choose(
    directory: str | os.PathLike | None,
    *,
    recipe: str,
    resume: bool | Literal["auto"] = False,
    under: str | os.PathLike = "runs",
    copy: Copy | NullCopy = _NO_COPY,
) -> tuple[pathlib.Path, bool]:
    """Returns the path of a run directory, and whether the run resumes.

    Args:
        directory: As the user names it; None for a new one, or on resume this recipe's newest. All tasks of a launched
            job, and what is started again in their place, get the same new one.
        recipe: Name of the program.
        resume: "auto" goes on where there is something to go on with. A job that its launcher has started again does
            so too.
        under: Where directories are made and looked for that nobody has named.
        copy: The run's copy, where there may be a checkpoint too.

    Raises:
        CheckpointError: `resume` without a directory, and there is no run of this recipe.
        RunDirectoryError: The name is no path, or the copy can't be read.
    """
    if directory is not None:
        path = expanded(directory)
    else:
        runs = pathlib.Path(under).glob(f"{recipe}-*")
        earlier = sorted(path for path in runs if _has_checkpoint(path / "checkpoints"))
        new = pathlib.Path(under) / f"{recipe}-{status.job_id() or f'{datetime.datetime.now():%Y%m%d-%H%M%S}'}"
        if resume is True and not earlier and not copy.has_checkpoint():
            raise CheckpointError(
                asked="resume without a run_dir continues the newest run",
                found=f"there is no run of {recipe} with a checkpoint under {pathlib.Path(under).absolute()}",
                remedy="Name its directory with run_dir, or leave resume out",
            )
        path = earlier[-1] if resume and earlier else new
    if resume == "auto" or (not resume and status.restarted()):
        return path, _has_checkpoint(path / "checkpoints") or copy.has_checkpoint()
    return path, bool(resume)


def _has_checkpoint(checkpoints: pathlib.Path) -> bool:
    """Whether there is a checkpoint, even a damaged one, but not only a partial one of a killed process."""
    if not checkpoints.is_dir():
        return False
    return any(entry.name.startswith(REPLACED) or not entry.name.startswith(".") for entry in checkpoints.iterdir())


def expanded(path: str | os.PathLike) -> pathlib.Path:
    """Returns a run directory's path with ~ and ~NAME expanded.

    Raises:
        RunDirectoryError: There is no such user, or no path is written so.
    """
    try:
        if b"\0" in os.fspath(path).encode():
            raise ValueError("no path holds a NUL")
        if re.match(r"[a-z][a-z0-9+.-]+://", os.fspath(path)):
            raise ValueError("it is a URL, and a run needs a file system on which files can be locked and renamed")
        return pathlib.Path(path).expanduser()
    except (RuntimeError, ValueError) as error:
        found = "its user's home directory isn't known" if isinstance(error, RuntimeError) else str(error)
        if isinstance(error, UnicodeEncodeError):
            found = "it is no UTF-8, and TensorFlow writes no file under such a name"
        raise RunDirectoryError(
            asked=_ASKED.format(repr(os.fspath(path))),
            found=found,
            remedy="Name a directory on a disk" + (", and give the URL as copy_to" if "it is a URL" in found else ""),
        ) from error


class RunDirectory:
    """A new or existing directory, locked by this process until `close`.

    Args:
        path: The directory; it is made where it doesn't exist.
        recipe: Name of the program whose run it is.
        resume: Go on with the run that is there.
        copy: The run's copy. What it has and the directory lacks is brought here on resume.

    Raises:
        RunDirectoryError: It is a file, not writable, full, in use, or holds another run; or the copy does.
        CheckpointError: `resume` with no run there.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        recipe: str,
        resume: bool = False,
        copy: Copy | NullCopy = _NO_COPY,
    ) -> None:
        self.path = expanded(path)
        self.checkpoints = self.path / "checkpoints"
        self.history = self.path / "history.csv"
        self.summary = self.path / "summary.json"
        self.tensorboard = self.path / "tensorboard"
        self.model = self.path / "model.keras"
        self.best = self.path / "best.keras"
        self._identity = self.path / "run.json"
        self._recipe = recipe
        self._resume = resume
        self._lock: int | None = None
        self._launches: list[str] = []
        self._id = uuid.uuid4().hex
        try:
            if resume and not _has_checkpoint(self.checkpoints) and not copy.has_checkpoint():
                raise CheckpointError(
                    asked=f"resume continues the run in {self.path}",
                    found="it holds no checkpoint" if self.path.exists() else "there is no such directory",
                    remedy="Name the run directory of an earlier run, or leave resume out",
                )
            files.make_directory(self.path)
            self._lock = self._hold()
            copy.begin(self.path, recipe=recipe, resume=resume)
            self._config = self._check_identity()
            self._try_writing()
        except OSError as error:
            copy.leave()
            self.close()
            raise self._unusable(error) from error
        except RunDirectoryError:
            copy.leave()
            self.close()
            raise

    def record_config(self, config: Mapping[str, Any]) -> None:
        """Records the configuration that must not change, or on resume compares it with the record.

        Args:
            config: Values that JSON can hold.

        Raises:
            CheckpointError: The run was started with other values.
            RunDirectoryError: They can't be written.
        """
        if config:
            config = redaction.masked_all(dict(config), os.environ)
        if not self._resume:
            self._config.update(config)
        try:
            facts = {"recipe": self._recipe, "id": self._id, "config": self._config}
            _write_identity(self._identity, facts, launches=self._launches)
        except OSError as error:
            raise self._unusable(error) from error
        if not self._resume:
            return
        names = [name for name, value in config.items() if self._config.get(name) != value]
        if names:
            raise CheckpointError(
                asked="resume with " + ", ".join(f"{name}={config[name]}" for name in names),
                found=f"the run in {self.path} was started with "
                + ", ".join(f"{name}={self._config.get(name)}" for name in names),
                remedy="Resume with the same values, or start a new run in another directory",
            )

    def write_model(self, model: "keras.Model") -> None:
        """Writes the trained model for plain Keras; an OSError leaves an earlier one untouched."""
        write_model(model, self.model)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes the summary without the environment's secrets; an OSError leaves an earlier one untouched."""
        files.write_json(self.summary, redaction.masked_all(dict(summary), os.environ))

    def close(self) -> None:
        """Unlocks the directory for other processes."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def check_space(self, checkpoint_bytes: int) -> None:
        """Checks that two checkpoints of this size fit on the disk.

        Raises:
            RunDirectoryError: They don't.
        """
        status = os.statvfs(self.path)
        free = status.f_bavail * status.f_frsize
        needed = 2 * checkpoint_bytes
        if free < needed:
            raise RunDirectoryError(
                asked=_ASKED.format(self.path),
                found=f"its disk has {free / 1e6:.1f} MB free, and two checkpoints take {needed / 1e6:.1f} MB",
                remedy="Free some space, or name a directory on another disk",
            )

    def _hold(self) -> int:
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise RunDirectoryError(
                asked=_ASKED.format(self.path),
                found=f"process {holder} is using it",
                remedy="Wait for that run to end, or name another directory",
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):  # Some network disks can't lock.
                os.close(descriptor)
                raise
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        except OSError:  # The disk is full, or .lock isn't a file.
            os.close(descriptor)
            raise
        return descriptor

    def _check_identity(self) -> dict[str, Any]:
        before = _read_identity(self._identity, needed=_has_checkpoint(self.checkpoints))
        if before is None:
            return {}
        if before["recipe"] != self._recipe:
            raise RunDirectoryError(
                asked=_ASKED.format(self.path),
                found=f"it holds a run of {before['recipe']}, and this is {self._recipe}",
                remedy="Name another directory",
            )
        self._id = before["id"] or self._id
        self._launches = before["launches"]  # One that was killed before its first checkpoint counts, too.
        if self._resume:
            return before["config"]
        if _has_checkpoint(self.checkpoints) or self.summary.exists():
            raise RunDirectoryError(
                asked=_ASKED.format(self.path),
                found="it holds an earlier run, which would be overwritten",
                remedy="Add --resume (Run: resume=True) to continue that run, or name another directory",
            )
        return {}

    def _try_writing(self) -> None:
        probe = self.path / ".writing"
        files.write_text(probe, "x" * 4096)
        probe.unlink()

    def _unusable(self, error: OSError) -> RunDirectoryError:
        reasons = {
            errno.EEXIST: ("that is a file", "Name a directory"),
            errno.ENOTDIR: ("part of that path is a file", "Name a directory"),
            errno.EACCES: ("this user may not write there", "Give write permission, or name another directory"),
            errno.EROFS: ("its disk is read-only", "Name a directory on another disk"),
            errno.ENOSPC: ("its disk is full", "Free some space, or name a directory on another disk"),
            errno.EDQUOT: ("the disk quota is used up", "Free some space, or name a directory on another disk"),
        }
        found, remedy = reasons.get(error.errno or 0, (f"{error.strerror or error}", "Name another directory"))
        return RunDirectoryError(asked=_ASKED.format(self.path), found=found, remedy=remedy)


class NullRunDirectory:
    """Replaces the run directory in a process that isn't the chief: only the chief touches it."""

    path = "the chief's run directory"
    history = tensorboard = None
    best = pathlib.Path("best.keras")  # A process that isn't the chief never writes to it.

    def record_config(self, config: Mapping[str, Any]) -> None:
        """Does nothing: the chief records and compares."""

    def check_space(self, checkpoint_bytes: int) -> None:
        """Does nothing: the chief checks its disk."""

    def write_model(self, model: "keras.Model") -> None:
        """Does nothing: the chief writes the model."""

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Does nothing: the chief writes the summary."""

    def close(self) -> None:
        """Does nothing: no directory is locked."""


def write_model(model: "keras.Model", path: pathlib.Path) -> None:
    """Writes a model atomically; of a `Loop` each of its models, by its name.

    Of a model that Keras can't save, such as one with the user's own layer without `get_config`, it writes the
    weights instead, beside `path` as model.weights.h5.

    Args:
        model: Trained.
        path: A file that ends in .keras.

    Raises:
        OSError: It can't be written. An earlier file is untouched.
    """
    from toolkit.training.loop import Loop

    if isinstance(model, Loop):
        for name, part in model.models.items():
            write_model(part, path.with_name(f"{name}.keras"))
        return
    try:
        with files.replacing(path, name=".writing.keras") as aside:  # Keras takes the format from the end of the name.
            model.save(aside)
            files.sync(aside)
    except OSError:
        raise
    except Exception as error:  # The user's own classes may raise anything.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        _LOG.warning(
            "%s can't be written (%s); model.weights.h5 has the weights, for load_weights", path.name, lines[0]
        )
        with files.replacing(path.with_name("model.weights.h5"), name=".writing.weights.h5") as aside:
            model.built = True  # It has trained. To Keras, a model that can't be called isn't built.
            model.save_weights(aside)
            files.sync(aside)
    files.sync(path.parent)


def _read_identity(path: pathlib.Path, *, needed: bool) -> dict[str, Any] | None:
    """Returns "recipe", "id", "config" and "launches" of a run.json; None if there is none.

    Args:
        path: The file.
        needed: Whether there must be one, because there are checkpoints beside it.

    Raises:
        RunDirectoryError: It can't be read, or is missing and needed.
    """
    try:
        found = json.loads(files.read_text(path))
        made = {"recipe": str(found["recipe"]), "id": str(found.get("id", "")), "config": dict(found["config"])}
        return {**made, "launches": [each for each in found.get("launches", []) if isinstance(each, str)]}
    except FileNotFoundError:
        if not needed:
            return None
        reason = "it is missing"
    except (ValueError, KeyError, TypeError, RecursionError):
        reason = "it can't be read"
    raise RunDirectoryError(
        asked=f"{path.parent} is where this run writes",
        found=f"run.json doesn't name the script that wrote its checkpoints: {reason}",
        remedy="Name another directory",
    )


def _write_identity(path: pathlib.Path, facts: Mapping[str, Any], *, launches: Sequence[str]) -> None:
    """Writes a run.json, with this launch's logs after those of earlier ones; raises an OSError if it can't."""
    logs = status.logs()
    every = [*launches, *([logs] if logs is not None and logs not in launches else [])]
    files.write_json(path, {**facts, "launches": every})
