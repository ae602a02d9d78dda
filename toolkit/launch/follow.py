"""Shows a job that another process supervises, from its files."""

import pathlib
from collections.abc import Iterator

from toolkit.cluster import Task
from toolkit.launch.display import Display, visible_lines
from toolkit.launch.events import Event, ending, raise_ending
from toolkit.launch.record import Record


class Follower:
    """Reads a job's growing events and logs.

    Args:
        record: The job's.
        display: Shows what has come.

    Attributes:
        end: The event of the job's end; None before.
        record: The same.
        attempt: The number of the attempt that was started last; 0 before.
    """

    def __init__(self, record: Record, display: Display) -> None:
        self.record = record
        self._display = display
        self._logs: dict[str, pathlib.Path] = {}
        self._read: dict[pathlib.Path, int] = {}  # How much of each file has been shown.
        self.end: Event | None = None
        self.attempt = 0

    def catch_up(self, lines: int | None) -> None:
        """Skips what has happened so far, except this many last lines of each task (None: all)."""
        for event in self.record.new():
            if event["event"] == "attempt":
                self._expect(event)
            elif event["event"] == "end":
                self.end = event
        for path in self._logs.values():
            try:
                text = path.read_bytes()
            except OSError:
                continue
            kept = text.splitlines(keepends=True)[-lines if lines else None :]
            self._read[path] = len(text) - sum(map(len, kept))

    def look(self) -> list[Event]:
        """Shows everything new, and returns the new events."""
        found = self.record.new()
        for event in found:
            kind = event["event"]
            if kind == "attempt":
                self._show_lines()
                self._expect(event)
            elif kind in ("note", "restart"):
                self._show_lines()
                self._display.say(event["text"])
            elif kind == "end":
                self._show_lines()
                self.end = event
        self._show_lines()
        return found

    def conclude(self) -> None:
        """Says how the job has ended, in its launcher's words.

        Raises:
            TaskFailed: It has failed.
            JobStopped: It was stopped.
        """
        end = self.end or ending(None)
        raise_ending(end)
        self._display.say(end["text"])

    def _expect(self, event: Event) -> None:
        self.attempt = event["number"]
        self._display.expect([Task.parse(name) for name in event["tasks"]])
        self._logs = {name: self.record.log(name, self.attempt) for name in event["tasks"]}

    def _show_lines(self) -> None:
        for name, path in self._logs.items():
            if lines := list(self._new_lines(path)):
                self._display.lines(Task.parse(name), lines)

    def _new_lines(self, path: pathlib.Path) -> Iterator[bytes]:
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
        except OSError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        yield from visible_lines(whole.split(b"\n")[:-1])
