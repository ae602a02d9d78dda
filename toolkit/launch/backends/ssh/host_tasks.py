"""The tasks of one host, as the launcher sees them: their lines, logs, and rows of the table."""

import contextlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.cluster import Task
from toolkit.launch import Display, Record
from toolkit.launch.backends.ssh.connection import Connection

__all__ = ["HostTasks"]

_CELLS = 7  # Cells of a row of the table; another version may send more.


class HostTasks:
    """What one host's agent reports, taken and shown.

    Args:
        connection: The connection to the host's agent.
        tasks: The tasks that run there.
        logs: Directory for a log file per task, here.
        record: Keeps what became of tasks, on this machine.
        display: Shows lines and messages.
    """

    def __init__(
        self,
        connection: Connection,
        tasks: Sequence[Task],
        *,
        logs: pathlib.Path,
        record: Record,
        display: Display,
    ) -> None:
        self.connection = connection
        self.tasks = {str(task): task for task in tasks}
        self.rows: list[tuple[str, ...]] = []
        self._logs = logs
        self._record = record
        self._display = display

    @property
    def name(self) -> str:
        """The name of the host."""
        return self.connection.host.name

    @property
    def ended(self) -> Mapping[str, Any] | None:
        """What the agent reported of its end; None before."""
        return self.connection.ended

    @property
    def last_message(self) -> str:
        """What the agent wrote last for a person, with the directory of the logs here in the place of the one there."""
        end = self.ended or {}
        text, there = str(end.get("text", "")), str(end.get("logs", ""))
        return text.replace(there, str(self._logs)) if there else text

    @property
    def trains(self) -> bool:
        """Whether a task here ends by itself, as parameter servers don't."""
        return any(task.job != "ps" for task in self.tasks.values())

    @property
    def steps(self) -> int:
        """The furthest step that a task here has reported; 0 before."""
        return max((int(row[3]) for row in self.rows if row[3].isdecimal()), default=0)

    def take(self) -> None:
        """Takes what has come; of a connection that is gone, all that is left."""
        gone = self.connection.gone
        while messages := self.connection.read():
            for message in messages:
                with contextlib.suppress(KeyError, TypeError, ValueError):  # Another version's message, which has more.
                    self._take(message)
            if not gone:
                break

    def _take(self, message: Mapping[str, Any]) -> None:
        kind = message["toolkit"]
        if kind == "lines":
            lines = [str(line).encode() for line in message["lines"]]
            self._write(self.tasks[message["task"]], lines)
            self._display.lines(self.tasks[message["task"]], lines)
        elif kind == "rows":
            self.rows = [tuple(map(str, row)) for row in message["rows"] if len(row) == _CELLS]
        elif kind == "note":
            self._display.say(f"{self.name}: {message['text']}")
        elif kind == "end":
            for event in message.get("events", ()):
                self._record.add({**event, "host": self.name})
            if message.get("failure"):
                self._record.keep_failure({**message["failure"], "host": self.name})

    def _write(self, task: Task, lines: Sequence[bytes]) -> None:
        # A full disk costs the log, not the job.
        with contextlib.suppress(OSError), (self._logs / f"{str(task).replace(':', '-')}.log").open("ab") as file:
            file.writelines(line + b"\n" for line in lines)
