"""What became of a job's tasks, and when: a line of JSON for each start and end; and the first failure."""

import contextlib
import json
import pathlib
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.support import files, umask

__all__ = ["FAILURE", "FILE", "Record"]

FILE = "events.jsonl"
FAILURE = "failure.json"


class Record:
    """Appends to events.jsonl; a disk that is full costs lines, and nothing else.

    Args:
        directory: Of the logs.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._path = directory / FILE
        self._failure = directory / FAILURE

    @umask.guarded()
    def note(self, event: str, task: object, **facts: Any) -> None:
        """Writes a line: at (seconds since 1970), event, task, and more.

        Args:
            event: "started" or "ended".
            task: Which.
            facts: Values that JSON can hold.
        """
        self.add({"at": round(time.time(), 3), "event": event, "task": str(task), **facts})

    def add(self, event: Mapping[str, Any]) -> None:
        """Writes a line that another launcher has made."""
        line = json.dumps(event)
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def failed(self, task: object, *, code: int | None, words: str, lines: Sequence[str]) -> None:
        """Writes failure.json: the task whose failure was the cause, and its last lines; a later failure replaces it.

        Args:
            task: Which.
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
        self.keep(found)

    def keep(self, found: Mapping[str, Any]) -> None:
        """Writes failure.json as another launcher has made it."""
        with contextlib.suppress(OSError):
            files.write_json(self._failure, found)
