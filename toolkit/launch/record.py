"""What a job leaves: the directory of its logs, a line of JSON for each start and end, and the first failure."""

import contextlib
import json
import pathlib
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.errors import LaunchError
from toolkit.support import files, umask

__all__ = ["FAILURE", "FILE", "Record", "log_directory"]

FILE = "events.jsonl"
FAILURE = "failure.json"


@umask.guarded()
def log_directory(asked: str | None, names: Sequence[str]) -> pathlib.Path:
    """Makes the directory for logs, and returns it.

    Args:
        asked: A path; None for a new directory under ./runs.
        names: The logs' names, without their ends.

    Raises:
        LaunchError: It can't be written.
    """
    try:
        if asked is not None:
            logs = pathlib.Path(asked).expanduser()
            logs.mkdir(parents=True, exist_ok=True)
            for name in names:
                with open(logs / f"{name}.log", "ab"):
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
    """Appends to events.jsonl; a disk that is full costs lines, and nothing else.

    Args:
        directory: The directory of the logs.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory

    def task_event(self, event: str, task: object, **facts: Any) -> None:
        """Writes a line: at (seconds since 1970), event, task, and more.

        Args:
            event: "started" or "ended".
            task: The task.
            facts: Values that JSON can hold.
        """
        self.add({"at": round(time.time(), 3), "event": event, "task": str(task), **facts})

    @umask.guarded()
    def add(self, event: Mapping[str, Any]) -> None:
        """Writes a line, perhaps one that another launcher has made."""
        with contextlib.suppress(OSError), (self._directory / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def failed_first(self, task: object, *, code: int, lines: Sequence[str]) -> None:
        """Writes failure.json unless another task has: for tasks that nobody but themselves can tell apart.

        Args:
            task: The task.
            code: The exit code that it ends with.
            lines: The last ones that it writes.
        """
        with contextlib.suppress(OSError):
            (self._directory / FAILURE).touch(exist_ok=False)
            self.task_failed(task, code=code, words=f"ended with exit code {code}", lines=lines)

    def task_failed(self, task: object, *, code: int | None, words: str, lines: Sequence[str]) -> None:
        """Writes failure.json: the task whose failure was the cause, and its last lines.

        Args:
            task: The task.
            code: Its exit code; below 0 the number of the signal that ended it; None where it still ran.
            words: How it ended.
            lines: The last ones that it wrote.
        """
        found = {
            "task": str(task),
            "host": socket.gethostname(),
            "at": round(time.time(), 3),
            "exit_code": code if code is None or code >= 0 else None,
            "signal": -code if code is not None and code < 0 else None,
            "words": words,
            "last_lines": list(lines),
        }
        self.keep_failure(found)

    def keep_failure(self, found: Mapping[str, Any]) -> None:
        """Writes failure.json, perhaps as another launcher has made it; a later failure replaces it."""
        with contextlib.suppress(OSError):
            files.write_json(self._directory / FAILURE, found)
