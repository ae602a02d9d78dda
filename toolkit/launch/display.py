"""What a person sees of a job: lines of its tasks, without TensorFlow's own, messages of the launcher, and a table.

A task's output goes unchanged into its log, and as whole lines with a prefix to standard output. A thread writes there:
a terminal that is paused, or a reader that is slow, stops nobody but the thread.
"""

import collections
import contextlib
import os
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.cluster import Task
from toolkit.launch import events
from toolkit.support import files

if TYPE_CHECKING:
    from rich.table import Table

# "I0000 00:00:1795368268.607656    5322 port.cc:153] ...", and "2026-11-22 17:24:28.607: I tensorflow/...] ..."
_NATIVE = re.compile(
    rb"(?:(?P<new>[IWEF])\d{4} \d\d:\d\d:\d+\.\d+ +\d+ |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: (?P<old>[IWEF]) )\S+:\d+\]"
)
_ALONE = (
    b"WARNING: All log messages before ",
    b"To enable the following instructions:",
)
_NO_GPU = re.compile(rb"failed call to cuInit|CUDA_ERROR_NO_DEVICE|no NVIDIA GPU device is present")
_DUMP = b"goo.gle/debugstr"  # Protobuf marks a message printed over several lines with this.
_FIELD = re.compile(rb"\w+ \{|\}|\w+: (true|false)|  +(\w+ \{|\}|\w+: .*)")
# Tasks in a message of the coordination service, one on each line.
_TASK = re.compile(rb"/job:\w+/replica:\d+/task:\d+")
_LONGEST = 16 << 10  # The most bytes of a line; a longer one is shown in pieces.
# Seconds until an incomplete line is shown, and a line that overwrites itself, such as a progress bar.
_PARTIAL, _BAR = 1.0, 10.0
_KEPT = 200  # How many last lines a message about a failure has.
_SECONDS = 0.5  # Seconds between two updates of the table.
_TICK = 0.1
_WAITING = 8 << 20  # Bytes of lines that may wait for a slow terminal; further lines are left out and counted.
_MOST_HELD = 1000  # Lines of a task that may wait for `release`.
_LEFT_OUT = b"launch: %d lines are left out here; the logs have them"
_PATIENCE = 60.0  # Seconds that writing the last lines may take.
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")
_MOST_ROWS = 12


class Chatter:
    """Recognises TensorFlow's native log lines below the level of errors, with their continuation lines."""

    def __init__(self) -> None:
        self._dumps = False  # Whether continuation lines may follow, such as a ps's configuration.
        self._depth = 0

    def without(self, lines: Sequence[bytes]) -> list[bytes]:
        """Returns the lines that aren't such log lines."""
        return [line for line in lines if not self._is_note(line)]

    def _is_note(self, line: bytes) -> bool:
        found = _NATIVE.match(line)
        if found is None:
            if self._dumps and _FIELD.fullmatch(line) and (self._depth or not line.startswith(b" ")):
                self._depth = max(0, self._depth + line.count(b"{") - line.count(b"}"))
                return True
            self._dumps, self._depth = False, 0
            return line.startswith(_ALONE) or bool(_TASK.fullmatch(line))
        self._dumps, self._depth = _DUMP in line, 0
        noteworthy = (found["new"] or found["old"]) in b"EF"
        return bool(_NO_GPU.search(line)) if noteworthy else True


class Output:
    """Takes bytes as they arrive.

    Args:
        log: The task's log file.

    Attributes:
        log: The same.
        fault: What is to be said of a log that can't be written, once; "" for nothing.
        ended: Whether nothing more will come.
        rest: The beginning of an incomplete line.
    """

    def __init__(self, log: pathlib.Path | str) -> None:
        self.log = pathlib.Path(log)
        self.ended = False
        self._last: collections.deque[bytes] = collections.deque(maxlen=_KEPT)
        with files.guarded():
            # The user may have deleted the log between two attempts.
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(log, "ab", buffering=0)  # noqa: SIM115 - closed in close().
        self.rest = b""
        self._failed, self.fault = False, ""
        self._came = 0.0

    def take(self, text: str) -> list[bytes]:
        """Writes to the log, and returns the lines that are now complete, without line ends.

        Args:
            text: Of an event; "" when nothing more will come.
        """
        data, self.ended = events.data(text), not text
        self.write(data)
        self._came = time.monotonic()
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > _LONGEST:
            self.rest = _visible(self.rest)
        if len(self.rest) > _LONGEST:
            lines.append(self.rest)
            self.rest = b""
        shown = visible_lines(lines)
        self._last.extend(shown[-_KEPT:])
        return shown

    def flush(self, *, late: bool = False) -> list[bytes]:
        """Returns the beginning of an incomplete line.

        Args:
            late: Only if it has been there for a while, a progress bar for longer.
        """
        patience = _BAR if b"\r" in self.rest else _PARTIAL
        if not self.rest.strip() or (late and time.monotonic() - self._came < patience):
            return []
        rest, self.rest = self.rest, b""
        lines = [line for line in map(_visible, rest.split(b"\n")) if line.strip()]
        self._last.extend(lines)
        return lines

    def last_lines(self) -> list[str]:
        """Returns the last lines as text, each of at most 500 characters."""
        return [line.decode(errors="replace")[:500] for line in self._last]

    def write(self, data: bytes) -> None:
        """Appends to the log. If the disk is full, the log is lost but the job goes on."""
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            if not self._failed:
                self.fault = f"note: {self.log} can't be written any more ({error.strerror or error}); the job goes on"
            self._failed = True

    def close(self) -> None:
        """Closes the log."""
        with contextlib.suppress(OSError):
            self._file.close()


def say(message: str) -> None:
    """Shows a message of the launcher before there is a display."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout is not None:  # Standard error may be closed.
            sys.stdout.write(f"{message}\n")
            sys.stdout.flush()


def visible_lines(lines: Sequence[bytes]) -> list[bytes]:
    """Returns what a terminal shows of whole lines, long ones in pieces.

    Blank lines stay, empty ends of progress bars don't.
    """
    return [piece for line in lines for piece in _pieces(_visible(line)) if piece.strip() or not line]


def _visible(line: bytes) -> bytes:
    """Returns what a terminal shows of a line: progress bars go back and overwrite themselves."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].replace(b"\b", b"")


def _pieces(line: bytes) -> list[bytes]:
    return [line[start : start + _LONGEST] for start in range(0, len(line), _LONGEST)] or [line]


class Display:
    """Writes to standard output. If the terminal is closed or the reader has ended, it writes nothing.

    Args:
        show: Names of the tasks whose lines are shown, or "all", or "none"; () for the first one that trains.
        native_logs: Show TensorFlow's notes, too.
    """

    def __init__(self, *, show: Sequence[str] = (), native_logs: bool = False) -> None:
        import rich

        self._console = rich.get_console()
        self._show_only, self._native = show, native_logs
        self._shown: Sequence[str] = ()
        self._hides = ""  # The message about lines that were left out, which is shown before the next line.
        self._width = 0
        self._colours: dict[str, str] = {}
        self._chatter: dict[Task, Chatter] = {}
        self._items: collections.deque[tuple[Task | None, Sequence[Any]]] = collections.deque()
        self._waiting = 0
        self._left_out: list[int] | None = None  # How many lines were left out.
        self._held: dict[Task, collections.deque[bytes]] | None = None  # The last lines that wait for `release`.
        self._kept: collections.Counter[Task] = collections.Counter()  # How many lines wait in all.
        self._rows: Sequence[Sequence[str]] = ()
        self._drawn = 0.0
        self.live: Any = None
        self._news = threading.Condition()
        self._closing = False
        self._gone = sys.stdout is None  # Closed by the parent process.
        if sys.stdout is not None:  # Earlier output must come first.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
        if self._console.is_terminal and not self._console.is_jupyter:
            from rich.live import Live

            self.live = Live(console=self._console, auto_refresh=False, transient=True)
        self._thread = threading.Thread(target=self._write_all, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def expect(self, tasks: Sequence[Task]) -> None:
        """Names the tasks whose lines may follow."""
        with self._news:
            names = [str(task) for task in tasks]
            first = next((str(task) for task in tasks if task.job in ("chief", "worker")), names[0])
            self._shown = names if "all" in self._show_only else self._show_only or [first]
            if not self._show_only and len(names) > 1 and not self._colours:
                self._hides = f"launch: these are the lines of {first}; --show=all shows those of all tasks"
            self._width = max((len(name) for name in names if name in self._shown), default=0)
            self._colours = {str(task): _COLOURS[number % len(_COLOURS)] for number, task in enumerate(tasks)}
            self._chatter = {task: Chatter() for task in tasks}
            self._held = None

    def lines(self, task: Task, lines: Sequence[bytes]) -> None:
        """Shows whole lines of a task."""
        if str(task) not in self._shown:
            return
        if not self._native:
            lines = self._chatter[task].without(lines)
        size = sum(map(len, lines))
        if self._held is not None:
            self._held.setdefault(task, collections.deque(maxlen=_MOST_HELD)).extend(lines)
            self._kept[task] += len(lines)
            return
        with self._news:
            if lines and self._waiting + size > _WAITING:
                if self._left_out is None:
                    self._left_out = [0]
                    self._items.append((None, self._left_out))
                self._left_out[0] += len(lines)
            elif lines:
                if self._hides:
                    self._items.append((None, [self._hides.encode()]))
                    self._hides = ""
                self._waiting += size
                self._items.append((task, lines))
                self._news.notify()

    def hold(self) -> None:
        """Holds back the tasks' lines until `release`."""
        if self._held is None:
            self._held = {}

    def release(self, *, of: Sequence[Task] | None = None) -> dict[Task, int]:
        """Shows the tasks' lines again.

        Args:
            of: Of the lines that were kept, those of these tasks are shown, and the others dropped; None: all.

        Returns:
            How many lines of each task were dropped.
        """
        (held, self._held), (kept, self._kept) = (self._held or {}, None), (self._kept, collections.Counter())
        for task, lines in held.items():
            if of is None or task in of:
                self.lines(task, list(lines))
                kept[task] -= len(lines)
        return +kept

    def say(self, message: str) -> None:
        """Shows a message of the launcher."""
        with self._news:
            self._items.append((None, [message.encode(errors="replace")]))
            self._news.notify()

    def wait(self) -> None:
        """Returns when nothing needs to be left out, for callers that read lines which exist already."""
        while self._waiting > _WAITING // 2 and not self._gone:
            time.sleep(_TICK / 10)

    def draw(self, rows: Callable[[], Sequence[Sequence[str]]]) -> None:
        """Updates the table, at most twice a second.

        Args:
            rows: Returns for each task: name, state, pid, step, images a second, CPU, memory.
        """
        now = time.monotonic()
        if self.live is not None and now - self._drawn > _SECONDS:
            self._drawn, self._rows = now, rows()

    def close(self) -> None:
        """Shows the remaining lines, and removes the table."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(_PATIENCE)

    def _write_all(self) -> None:
        drawn: Sequence[Sequence[str]] = ()
        if self.live is not None:
            with contextlib.suppress(OSError):
                self.live.start()
        while True:
            with self._news:
                if not self._items and not self._closing:
                    self._news.wait(_TICK)
                items, self._items = list(self._items), collections.deque()
                closing, self._left_out = self._closing, None
            for task, lines in items:
                name = "" if task is None else str(task)
                self._show([(name, line if isinstance(line, bytes) else _LEFT_OUT % line) for line in lines])
            with self._news:
                self._waiting -= sum(len(line) for task, lines in items if task is not None for line in lines)
            if closing:
                break
            if self.live is not None and self._rows is not drawn and not self._gone:
                drawn = self._rows
                with self._unless_gone():
                    self.live.update(_table(drawn), refresh=True)
        if self.live is not None:
            with contextlib.suppress(OSError):
                self.live.stop()

    def _show(self, lines: Sequence[tuple[str, bytes]]) -> None:
        """Shows lines, each with its source: a task's name, or "" for the launcher."""
        if not lines:
            return
        if self.live is None:
            heads = {name: f"{name:<{self._width}} | ".encode() if name else b"" for name, _ in lines}
            self._write(b"".join(heads[name] + line + b"\n" for name, line in lines))
            return
        from rich.text import Text

        text = Text()
        for number, (name, line) in enumerate(lines):
            text.append("\n" if number else "")
            if name:
                text.append(f"{name:<{self._width}} | ", style=self._colours.get(name, "bold"))
            text.append_text(Text.from_ansi(line.decode(errors="replace")) if name else Text(line.decode()))
        with self._unless_gone():
            self._console.print(text, soft_wrap=True)

    @contextlib.contextmanager
    def _unless_gone(self) -> Any:
        try:
            yield
        except OSError:
            self._gone = True

    def _write(self, data: bytes) -> None:
        if sys.stdout is not sys.__stdout__:  # A notebook's or a test's output has no file descriptor.
            with self._unless_gone():
                sys.stdout.write(data.decode(errors="replace"))
                sys.stdout.flush()
            return
        view = memoryview(data)
        while view and not self._gone:
            try:
                view = view[os.write(1, view) :]
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
