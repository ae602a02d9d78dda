"""What a job leaves: its logs, what it was asked for, an event for each start and end, and the first failure."""

import contextlib
import json
import os
import pathlib
import shlex
import socket
import time
from collections.abc import Sequence
from typing import Any

from toolkit.errors import JobStopped, LaunchError, RequestError, ToolkitError
from toolkit.launch import events
from toolkit.launch.events import Event
from toolkit.launch.job.spec import JobSpec
from toolkit.support import files, umask

__all__ = ["Record", "log_directory", "log_name"]

_EVENTS, _FAILURE, _JOB = "events.jsonl", "failure.json", "job.json"
_CALL, _RESULTS = "call.pkl", "results"


def log_name(task: object, attempt: int) -> str:
    """Returns the name of a task's log file: "worker-0.log", and "worker-0.attempt-2.log" after a restart."""
    return str(task).replace(":", "-") + (f".attempt-{attempt}" if attempt > 1 else "") + ".log"


@umask.guarded()
def log_directory(asked: str | None, names: Sequence[str] = ()) -> pathlib.Path:
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
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise LaunchError(
            asked=f"the tasks' logs are to go to {asked or 'a new directory under ./runs'}",
            found=f"it can't be written ({reason})",
            remedy="Name a directory that can be written with --log_dir",
        ) from error


class Record:
    """The files beside the logs. A disk that is full costs them, and not the job.

    Args:
        directory: The directory of the logs.

    Attributes:
        directory: The same.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self._read = 0

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

    def so_far(self) -> list[Event]:
        """Returns the events of the job that was started last in this directory."""
        found = self.new()
        starts = [number for number, event in enumerate(found) if event["event"] == "job"]
        return found[starts[-1] :] if starts else []

    def start_job(self, spec: JobSpec, job_id: str, **facts: Any) -> None:
        """Writes job.json: what was asked, where, when, and how to ask again; with its secrets, for the user only."""
        self.add("job", id=job_id)
        found = {"id": job_id, "spec": json.loads(spec.to_json()), "cwd": os.getcwd(), "at": round(time.time(), 3)}
        found["again"] = shlex.join(["toolkit", *spec.arguments])
        with contextlib.suppress(OSError):
            own = os.open(self.directory / _JOB, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(own, "w", encoding="utf-8") as file:
                json.dump({**found, "host": socket.gethostname(), **facts}, file)

    def keep_call(self, work: bytes) -> None:
        """Writes what the tasks are to call in the place of a script.

        Raises:
            OSError: It can't be written.
        """
        self._keep(self.directory / _CALL, work)

    def call(self) -> bytes:
        """Returns what the tasks are to call, b"" where they run a script."""
        try:
            return (self.directory / _CALL).read_bytes()
        except OSError:
            return b""

    def keep_result(self, task: object, data: bytes) -> None:
        """Writes what a task's call has come to.

        Raises:
            OSError: It can't be written.
        """
        self._keep(self.directory / _RESULTS / f"{task}.pkl".replace(":", "-"), data)

    def results(self) -> dict[str, bytes]:
        """Returns what the tasks' calls have come to, by the tasks' names, in the order in which they ended."""
        paths = sorted((self.directory / _RESULTS).glob("*.pkl"), key=lambda path: path.stat().st_mtime)
        return {":".join(path.stem.rsplit("-", 1)): path.read_bytes() for path in paths}

    @staticmethod
    def _keep(path: pathlib.Path, data: bytes) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.with_name(f"{path.name}.part")  # For the user's eyes only, and never half written.
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        part.replace(path)

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
                asked=f"the job whose logs are in {self.directory}",
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
