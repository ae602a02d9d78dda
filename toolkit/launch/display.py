"""What the launcher shows: the tasks' lines, its own messages, and on a terminal a table that moves."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.cluster import Task

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Display"]

_SECONDS = 0.5  # Between two states of the table.
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
_MOST_ROWS = 12


class Display:
    """Writes to standard output; a terminal that is closed, or a reader that is gone, is no reason to stop.

    Args:
        tasks: The tasks that are started here.
        tee: Show their lines.
        only: Names of the tasks whose lines are shown; () for all.
    """

    def __init__(self, tasks: Sequence[Task], *, tee: bool, only: Sequence[str]) -> None:
        import rich

        self._console = rich.get_console()
        self._shown = {task for task in tasks if tee and (not only or str(task) in only)}
        self._width = max(len(str(task)) for task in tasks)
        self._colours = {task: _COLOURS[number % len(_COLOURS)] for number, task in enumerate(tasks)}
        self._live: Any = None
        self._drawn = 0.0
        self._gone = sys.stdout is None  # Closed by whoever started this.
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def lines(self, task: Task, lines: Sequence[bytes]) -> None:
        """Shows whole lines that a task has written."""
        if not lines or task not in self._shown:
            return
        prefix = f"{task!s:<{self._width}} | "
        if self._live is None:
            start = prefix.encode()
            self._write(b"".join(start + line + b"\n" for line in lines))
            return
        from rich.text import Text

        text = Text()
        for number, line in enumerate(lines):
            text.append("\n" if number else "").append(prefix, style=self._colours[task])
            text.append_text(Text.from_ansi(line.decode(errors="replace")))
        self._print(text)

    def say(self, message: str) -> None:
        """Shows a message of the launcher's own."""
        if self._live is None:
            self._write(message.encode(errors="replace") + b"\n")
        else:
            from rich.text import Text

            self._print(Text(message))

    def draw(self, rows: Callable[[], Sequence[Sequence[str]]]) -> None:
        """Brings the table up to date, at most twice a second.

        Args:
            rows: Returns for each task: name, state, pid, step, images a second, CPU, memory.
        """
        now = time.monotonic()
        if self._live is None or self._gone or now - self._drawn < _SECONDS:
            return
        self._drawn = now
        try:
            self._live.update(_table(rows()), refresh=True)
        except OSError:
            self._gone = True

    def close(self) -> None:
        """Removes the table."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    def _print(self, text: Any) -> None:
        if not self._gone:
            try:
                self._console.print(text, soft_wrap=True)
            except OSError:
                self._gone = True

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._gone:
            try:
                view = view[os.write(sys.stdout.fileno(), view) :]
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:
                self._gone = True


def _table(rows: Sequence[Sequence[str]]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("task")
    table.add_column("state", no_wrap=True, max_width=24)
    for heading in ("pid", "step", "images/s", "CPU", "memory"):
        table.add_column(heading, justify="right")
    for row in rows[:_MOST_ROWS]:
        table.add_row(*row)
    if len(rows) > _MOST_ROWS:
        table.add_row(f"{len(rows) - _MOST_ROWS} more", *[""] * 6)
    return table
