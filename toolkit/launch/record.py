"""What became of a job's tasks, when: a line of JSON for each start and each end, beside their logs."""

import contextlib
import json
import pathlib
import time
from typing import Any

__all__ = ["FILE", "Record"]

FILE = "events.jsonl"


class Record:
    """Appends to events.jsonl; a disk that is full costs lines, and nothing else.

    Args:
        directory: Of the logs.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._path = directory / FILE

    def note(self, event: str, task: object, **facts: Any) -> None:
        """Writes a line: at (seconds since 1970), event, task, and more.

        Args:
            event: "started" or "ended".
            task: Which.
            facts: Values that JSON can hold.
        """
        line = json.dumps({"at": round(time.time(), 3), "event": event, "task": str(task), **facts})
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
