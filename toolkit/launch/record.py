"""A job's record: its logs, its options, an event for each start and end, the first failure, a copy of the script."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import secrets
import shlex
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from toolkit.errors import LaunchError, RequestError
from toolkit.launch import events
from toolkit.launch.events import Event
from toolkit.launch.spec import JobSpec
from toolkit.support import files

LEFT_OUT = ("/runs/", ".git/", "__pycache__/", ".venv/", "*.pyc")  # Excluded from a copy, as patterns of rsync.
_MOST_COPIED = 256 << 20  # The most bytes of a copy.
PREFIX = "launch-"  # The beginning of the directory's name, before the id.
SNAPSHOT = "snapshot"  # The folder of the copied script, in the job's directory.
_EVENTS, _FAILURE, _JOB = "events.jsonl", "failure.json", "job.json"
_CALL, _RESULTS = "call.pkl", "results"
# Output of a queue's batch script, or of a detached supervisor.
SCRIPT_LOG, LAUNCHER_LOG = "job.log", "launcher.log"


def _take_snapshot(command: tuple[str, ...], target: pathlib.Path) -> tuple[str, ...]:
    """Copies the folder from which a command imports modules, and returns the command that runs the copy.

    The working directory stays: what a script reads and writes is where it was.

    Args:
        command: A script, or -m MODULE, with its arguments.
        target: The copy; it isn't there yet.

    Raises:
        LaunchError: There is too much of it, or it can't be copied.
    """
    module = command[0] == "-m"
    source = pathlib.Path.cwd() if module else pathlib.Path(command[0]).resolve().parent
    try:
        found = _too_much(source)
        if not found:
            shutil.copytree(source, target, symlinks=True, ignore=functools.partial(_not_copied, source))
    except (OSError, shutil.Error) as error:
        found = f"it can't be copied ({error})"
    if found:
        raise LaunchError(
            asked=f"--snapshot copies {source}", found=found, remedy="Keep data and results out of the script's folder"
        )
    return command if module else (str((target / pathlib.Path(command[0]).name).absolute()), *command[1:])


def _not_copied(source: pathlib.Path, folder: str, names: Sequence[str]) -> set[str]:
    """Returns what a copy leaves out of a folder: also jobs' directories, one of which the copy is in.

    Args:
        source: What is copied. To rsync, a pattern that begins with / means what is in this folder itself.
        folder: That, or a folder below it.
        names: What is in it.
    """
    here = [each for each in LEFT_OUT if not each.startswith("/") or pathlib.Path(folder) == source]
    found = shutil.ignore_patterns(*(pattern.strip("/") for pattern in here))(folder, list(names))
    jobs = (name for name in names if name.startswith(PREFIX) and os.path.exists(os.path.join(folder, name, _EVENTS)))
    return {*found, *jobs}


def _too_much(source: pathlib.Path) -> str:
    """Returns why a folder is too large to be copied; "" if it isn't."""
    size = 0
    for folder, folders, names in os.walk(source):
        left_out = _not_copied(source, folder, [*folders, *names])
        folders[:] = [name for name in folders if name not in left_out]
        size += sum(os.lstat(os.path.join(folder, name)).st_size for name in names if name not in left_out)
        if size > _MOST_COPIED:
            return f"that holds more than {_MOST_COPIED >> 20} MiB"
    return ""


def _not_for_everybody(path: str, flags: int) -> int:
    """Opens a file that, if it is made now, not everybody may write, whatever the umask."""
    return os.open(path, flags, 0o664)


def _unwritable(where: object, error: Exception) -> LaunchError:
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return LaunchError(
        asked=f"the tasks' logs are to go to {where}",
        found=f"it can't be written ({reason})",
        remedy="Name a directory that can be written with --log_dir",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Which task failed first, and how.

    Attributes:
        task: Its name, such as "worker:1".
        host: Its machine.
        at: When that was noticed, in seconds since 1970.
        exit_code: Its exit code; None where a signal ended it, or where it still ran and made no progress.
        signal: The number of that signal; None for none.
        words: How it ended, in words.
        last_lines: The last lines that it wrote.
    """

    task: str
    host: str
    at: float
    exit_code: int | None
    signal: int | None
    words: str
    last_lines: Sequence[str]


class Record:
    """The files of one job. If the disk is full, they are incomplete but the job goes on.

    Args:
        directory: Its own, launch-ID; it needn't be there yet.

    Attributes:
        directory: The same.
        id: The job's id.
        spec: Of one that this process has begun, what is to run.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.id = directory.name.removeprefix(PREFIX)
        self.spec: JobSpec | None = None
        self._read = 0

    @classmethod
    @files.guarded()
    def begin(cls, spec: JobSpec, *, function: str = "") -> "Record":
        """Gives a job an id and its directory, and writes job.json; returns its record.

        job.json has what was asked, where, when, and how to ask again; with its secrets, for the user only.

        Args:
            spec: What was asked.
            function: What is called in the place of a script.

        Raises:
            LaunchError: They can't be written.
        """
        name = f"{PREFIX}{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        try:
            record = cls(pathlib.Path(spec.log_dir or "runs").expanduser() / name)
            record.directory.mkdir(parents=True)
        except (OSError, ValueError, RuntimeError) as error:  # expanduser raises a RuntimeError for ~nobody.
            raise _unwritable(spec.log_dir or "a new directory under ./runs", error) from error
        record.add("job", id=record.id)
        record.spec = spec
        again = shlex.join(["toolkit", *spec.arguments])
        if spec.snapshot:
            command = _take_snapshot(spec.command, record.directory / SNAPSHOT)
            record.spec = dataclasses.replace(spec, command=command)
        found = {
            "id": record.id,
            "spec": dataclasses.asdict(record.spec),
            "cwd": os.getcwd(),
            "at": round(time.time(), 3),
        }
        found |= {"again": again, "function": function}
        with contextlib.suppress(OSError):
            own = os.open(record.directory / _JOB, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(own, "w", encoding="utf-8") as file:
                json.dump({**found, "host": socket.gethostname()}, file)
        return record

    def log(self, task: object, attempt: int) -> pathlib.Path:
        """Returns a task's log file: worker-0.log, and worker-0.attempt-2.log after a restart."""
        again = f".attempt-{attempt}" if attempt > 1 else ""
        return self.directory / f"{str(task).replace(':', '-')}{again}.log"

    def add(self, kind: str, **facts: Any) -> None:
        """Appends an event to events.jsonl, with `at`: seconds since 1970.

        Args:
            kind: Such as "started", "ended", "note", "restart" or "end".
            facts: Values that JSON can hold; a task is written as its name.
        """
        if "task" in facts:
            facts["task"] = str(facts["task"])
        found = {"at": round(time.time(), 3), **events.event(kind, **facts)}
        with contextlib.suppress(OSError), open(self.directory / _EVENTS, "ab", opener=_not_for_everybody) as file:
            file.write(events.line(found))

    def end(self, error: BaseException | None, text: str = "") -> None:
        """Adds the event of the job's end.

        Args:
            error: What has ended it, also one that has broken the launcher; None where it is done.
            text: The last message about the job.
        """
        words = ("asked", "found", "remedy") if isinstance(error, RequestError) else ()
        self.add("end", **events.ending(error, text), **{name: getattr(error, name) for name in words})

    def written(self, task: str, attempt: int) -> Iterator[bytes]:
        """Yields a task's output in an attempt, some lines at a time.

        Raises:
            LaunchError: Its log can't be read.
        """
        path = self.log(task, attempt)
        try:
            with path.open("rb") as file:
                while lines := b"".join(file.readlines(1 << 20)):
                    yield lines
        except OSError as error:
            raise LaunchError(
                asked=f"the log of {task}",
                found=f"{path} can't be read ({(error.strerror or '').lower()})",
                remedy="See `toolkit jobs`",
            ) from error

    def new(self) -> list[Event]:
        """Returns the events that any process has added since the last call."""
        try:
            with (self.directory / _EVENTS).open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return events.Reader().events(whole)

    def beginnings(self) -> str:
        """Returns the output of the program that starts the job: a queue's batch script, or a detached supervisor."""
        found = []
        for name in (SCRIPT_LOG, LAUNCHER_LOG):
            with contextlib.suppress(OSError):
                found.append((self.directory / name).read_text(encoding="utf-8", errors="replace"))
        return "".join(found).strip()

    def keep_call(self, work: bytes) -> None:
        """Writes the function that tasks call instead of a script, readable only by the user.

        Raises:
            LaunchError: It can't be written.
        """
        try:
            with open(os.open(self.directory / _CALL, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(work)
        except OSError as error:
            raise _unwritable(self.directory, error) from error

    def forget_call(self) -> None:
        """Removes the function and its results; the caller who waited for them has them."""
        with contextlib.suppress(OSError):
            (self.directory / _CALL).unlink(missing_ok=True)
            shutil.rmtree(self.directory / _RESULTS, ignore_errors=True)

    def call(self) -> bytes:
        """Returns the function that tasks call, b"" if they run a script."""
        try:
            return (self.directory / _CALL).read_bytes()
        except OSError:
            return b""

    def _result(self, task: object) -> pathlib.Path:
        return self.directory / _RESULTS / f"{task}.pkl".replace(":", "-")

    def keep_result(self, task: object, data: bytes) -> None:
        """Adds a piece to the result of a task's call; b"" marks the end.

        Raises:
            OSError: It can't be written.
        """
        path = self._result(task)
        part = path.with_suffix(".pkl.part")
        if data:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
                file.write(data)
        else:
            part.replace(path)

    def forget_result(self, task: object) -> None:
        """Removes the incomplete result of an earlier start of a task."""
        self._result(task).with_suffix(".pkl.part").unlink(missing_ok=True)

    def results(self) -> dict[str, bytes]:
        """Returns the results of the tasks' calls, by the tasks' names, in the order in which they ended."""
        paths = sorted((self.directory / _RESULTS).glob("*.pkl"), key=lambda path: path.stat().st_mtime)
        return {":".join(path.stem.rsplit("-", 1)): path.read_bytes() for path in paths}

    def job(self) -> dict[str, Any]:
        """Returns the content of job.json; its spec is a JobSpec.

        Raises:
            LaunchError: There is none, or it is damaged.
        """
        try:
            found = json.loads((self.directory / _JOB).read_text(encoding="utf-8"))
            return {**found, "spec": JobSpec(**{**found["spec"], "command": tuple(found["spec"]["command"])})}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LaunchError(
                asked=f"job {self.id}, whose logs are in {self.directory}",
                found=f"its {_JOB} can't be read ({error})",
                remedy="Name the directory of a job that `toolkit launch` has started",
            ) from error

    def forget_failure(self) -> None:
        """Removes the failure.json of an earlier attempt."""
        with contextlib.suppress(OSError):
            (self.directory / _FAILURE).unlink(missing_ok=True)

    def failure(self) -> Failure | None:
        """Returns the content of failure.json, or None."""
        try:
            return Failure(**json.loads((self.directory / _FAILURE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def keep_failure(self, found: Failure) -> None:
        """Writes failure.json."""
        with contextlib.suppress(OSError):
            files.write_json(self.directory / _FAILURE, dataclasses.asdict(found))
