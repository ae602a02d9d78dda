"""What a job leaves: its logs, what it was asked for, an event for each start and end, and the first failure."""

import contextlib
import json
import os
import pathlib
import secrets
import shlex
import shutil
import socket
import time
from collections.abc import Sequence
from typing import Any

from toolkit.errors import JobStopped, LaunchError, RequestError, ToolkitError
from toolkit.launch import events
from toolkit.launch.events import Event
from toolkit.launch.job.spec import JobSpec
from toolkit.support import files, umask

__all__ = ["LAUNCHER_LOG", "SCRIPT_LOG", "Record", "log_name"]

_EVENTS, _FAILURE, _JOB = "events.jsonl", "failure.json", "job.json"
_CALL, _RESULTS = "call.pkl", "results"
# What Slurm's batch script writes, and a detached supervisor.
SCRIPT_LOG, LAUNCHER_LOG = "job.log", "launcher.log"


def log_name(task: object, attempt: int) -> str:
    """Returns the name of a task's log file: "worker-0.log", and "worker-0.attempt-2.log" after a restart."""
    return str(task).replace(":", "-") + (f".attempt-{attempt}" if attempt > 1 else "") + ".log"


@umask.guarded()
def _log_directory(asked: str | None, names: Sequence[str] = ()) -> pathlib.Path:
    """Makes the directory for logs, and returns it.

    Args:
        asked: A path; None for a new directory under ./runs.
        names: The logs' names.

    Raises:
        LaunchError: It can't be written.
    """
    try:
        if asked is not None:
            logs = pathlib.Path(asked).expanduser()
            logs.mkdir(parents=True, exist_ok=True)
            for name in names:
                with open(logs / name, "ab"):
                    pass
            return logs
        stem = f"launch-{time.strftime('%Y%m%d-%H%M%S')}"
        for number in range(1000):
            logs = pathlib.Path("runs", f"{stem}-{number}" if number else stem)
            try:
                logs.mkdir(parents=True)
            except FileExistsError:
                if logs.parent.is_dir():
                    continue
                raise
            return logs
        raise FileExistsError(f"{stem} is taken a thousand times")
    except (OSError, ValueError, RuntimeError) as error:  # A NUL raises ValueError, ~nobody RuntimeError.
        raise _unwritable(asked or "a new directory under ./runs", error) from error


def _unwritable(where: object, error: Exception) -> LaunchError:
    reason = (getattr(error, "strerror", None) or str(error)).lower()
    return LaunchError(
        asked=f"the tasks' logs are to go to {where}",
        found=f"it can't be written ({reason})",
        remedy="Name a directory that can be written with --log_dir",
    )


class Record:
    """The files of one job. A disk that is full costs them, and not the job.

    Args:
        directory: Its own, LOGS/ID; it needn't be there yet.

    Attributes:
        directory: The same.
        id: The job's id.
        logs: The directory of its tasks' logs, which other jobs may share.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.id = directory.name
        self.logs = directory.parent
        self._read = 0

    @classmethod
    def begin(cls, spec: JobSpec, names: Sequence[str] = (), *, function: str = "") -> "Record":
        """Gives a job an id and its directories, and writes job.json; returns its record.

        Args:
            spec: What was asked.
            names: The logs that must be writable.
            function: What is called in the place of a script.

        Raises:
            LaunchError: They can't be written.
        """
        record = cls(_log_directory(spec.log_dir, names) / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")
        record._start(spec, function)
        return record

    @umask.guarded()
    def add(self, kind: str, **facts: Any) -> None:
        """Appends an event to events.jsonl, with `at`: seconds since 1970.

        Args:
            kind: Such as "started", "ended", "note", "restart" or "end".
            facts: Values that JSON can hold; a task is written as its name.
        """
        if "task" in facts:
            facts["task"] = str(facts["task"])
        found = {"at": round(time.time(), 3), **events.event(kind, **facts)}
        with contextlib.suppress(OSError), (self.directory / _EVENTS).open("ab") as file:
            file.write(events.line(found))

    def end(self, error: ToolkitError | None, text: str = "") -> None:
        """Adds the event of the job's end.

        Args:
            error: What has ended it; None where it is done.
            text: What is said of a job that is done.
        """
        words = ("asked", "found", "remedy") if isinstance(error, RequestError) else ()
        self.add(
            "end",
            code=0 if error is None else error.exit_code,
            text=text if error is None else str(error),
            stopped=isinstance(error, JobStopped),
            **{name: getattr(error, name) for name in words},
        )

    def log_sizes(self, tasks: Sequence[str], attempt: int) -> dict[str, int]:
        """Returns how many bytes the logs of an attempt's tasks have, which other jobs may have written to as well."""
        paths = {task: self.logs / log_name(task, attempt) for task in tasks}
        return {task: path.stat().st_size for task, path in paths.items() if path.exists()}

    def new(self) -> list[Event]:
        """Returns the events that have been added, by whatever process, since this was last called."""
        try:
            with (self.directory / _EVENTS).open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return events.Reader().events(whole)

    def _start(self, spec: JobSpec, function: str) -> None:
        """Writes job.json: what was asked, where, when, and how to ask again; with its secrets, for the user only."""
        try:
            with umask.guarded():
                self.directory.mkdir()
        except OSError as error:
            raise _unwritable(self.directory, error) from error
        self.add("job", id=self.id)
        found = {"id": self.id, "spec": json.loads(spec.to_json()), "cwd": os.getcwd(), "at": round(time.time(), 3)}
        found["again"] = shlex.join(["toolkit", *spec.arguments])
        found["function"] = function
        with contextlib.suppress(OSError):
            own = os.open(self.directory / _JOB, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(own, "w", encoding="utf-8") as file:
                json.dump({**found, "host": socket.gethostname()}, file)

    def beginnings(self) -> str:
        """Returns what was written of a job by whatever starts it: Slurm's batch script, or a detached supervisor."""
        found = []
        for name in (SCRIPT_LOG, LAUNCHER_LOG):
            with contextlib.suppress(OSError):
                found.append((self.directory / name).read_text(encoding="utf-8", errors="replace"))
        return "".join(found).strip()

    def keep_call(self, work: bytes) -> None:
        """Writes what the tasks are to call in the place of a script, for the user's eyes only.

        Raises:
            LaunchError: It can't be written.
        """
        try:
            with open(os.open(self.directory / _CALL, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(work)
        except OSError as error:
            raise _unwritable(self.directory, error) from error

    def forget_call(self) -> None:
        """Removes it, and what it has come to: whoever has waited for that has it."""
        with contextlib.suppress(OSError):
            (self.directory / _CALL).unlink(missing_ok=True)
            shutil.rmtree(self.directory / _RESULTS, ignore_errors=True)

    def call(self) -> bytes:
        """Returns what the tasks are to call, b"" where they run a script."""
        try:
            return (self.directory / _CALL).read_bytes()
        except OSError:
            return b""

    def _result(self, task: object) -> pathlib.Path:
        return self.directory / _RESULTS / f"{task}.pkl".replace(":", "-")

    def keep_result(self, task: object, data: bytes) -> None:
        """Adds a piece to what a task's call has come to; b"" says that it is whole.

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
        """Removes what a start of a task before this one has begun to keep."""
        self._result(task).with_suffix(".pkl.part").unlink(missing_ok=True)

    def results(self) -> dict[str, bytes]:
        """Returns what the tasks' calls have come to, by the tasks' names, in the order in which they ended."""
        paths = sorted((self.directory / _RESULTS).glob("*.pkl"), key=lambda path: path.stat().st_mtime)
        return {":".join(path.stem.rsplit("-", 1)): path.read_bytes() for path in paths}

    def job(self) -> dict[str, Any]:
        """Returns what `start_job` has written; its spec is a JobSpec.

        Raises:
            LaunchError: There is none, or it is damaged.
        """
        try:
            found = json.loads((self.directory / _JOB).read_text(encoding="utf-8"))
            return {**found, "spec": JobSpec.from_json(json.dumps(found["spec"]))}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LaunchError(
                asked=f"job {self.id}, whose logs are in {self.logs},",
                found=f"its {_JOB} can't be read ({error})",
                remedy="Name the directory of a job that `toolkit launch` has started",
            ) from error

    def forget_failure(self) -> None:
        """Removes what an earlier attempt has left in failure.json."""
        with contextlib.suppress(OSError):
            (self.directory / _FAILURE).unlink(missing_ok=True)

    def keep_failure(self, task: object, *, code: int | None, words: str, lines: Sequence[str], host: str) -> None:
        """Writes failure.json: the task whose failure was the cause, and its last lines.

        Args:
            task: The task.
            code: Its exit code; below 0 the number of the signal that ended it; None where it still ran.
            words: How it ended.
            lines: The last ones that it wrote.
            host: Its machine; "" for this one.
        """
        found = {
            "task": str(task),
            "host": host or socket.gethostname(),
            "at": round(time.time(), 3),
            "exit_code": code if code is None or code >= 0 else None,
            "signal": -code if code is not None and code < 0 else None,
            "words": words,
            "last_lines": list(lines),
        }
        with contextlib.suppress(OSError):
            files.write_json(self.directory / _FAILURE, found)
