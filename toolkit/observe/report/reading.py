"""Reads a run directory and, from the launcher's records, the processes of its tasks.

A killed run has fewer files than one that is complete. Files of a run may be damaged, or edited: each costs a part of
the page, and not the page.
"""

import contextlib
import csv
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from toolkit.errors import RunDirectoryError
from toolkit.launch import jobs
from toolkit.support import signals
from toolkit.support.files import check_file, read_text
from toolkit.support.history import is_own
from toolkit.support.redaction import masked, masked_all

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunData:
    """The content of a run directory. Rates are examples per second; earlier versions called them images per second.

    Attributes:
        path: The directory.
        name: The directory's name, which stands for the run where several are compared.
        summary: summary.json, or what run.json says of a run that has none.
        history: Rows of history.csv, numbers where they are numbers.
        evaluation: Rows of evaluation.csv, which an evaluator task writes.
        events: Starts and ends of tasks, from the records of all its launches. Those of a launch whose launcher is gone
            have "over" beside.
        written: When a file of it was last written, in seconds since 1970; 0 for never.
        notes: What is missing or can't be read, a sentence each without its full stop.
    """

    path: pathlib.Path
    name: str
    summary: dict[str, Any]
    history: tuple[dict[str, Any], ...]
    evaluation: tuple[dict[str, Any], ...]
    events: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    written: float = 0.0

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the model's metrics in Keras: "loss", "val_loss", and whatever else was compiled."""
        return tuple(dict.fromkeys(name for row in self.history for name in row if not is_own(name)))


def read(path: str | pathlib.Path) -> RunData:
    """Reads a run directory.

    Raises:
        RunDirectoryError: It isn't one.
    """
    path = pathlib.Path(path)
    found = _no_run(path)
    if found:
        raise RunDirectoryError(
            asked=f"a report of {path}", found=found, remedy="Name the directory of a run, such as one under ./runs"
        )
    notes: list[str] = []
    summary = _object(path / "summary.json", notes)
    if summary is None and (path / "summary.json").exists():
        summary = {"status": "unknown"}
    elif summary is None:
        identity = _object(path / "run.json", notes) or {}
        config = identity.get("config")
        summary = {
            "recipe": identity.get("recipe"),
            **(config if isinstance(config, dict) else {}),
            "status": "not finished",
        }
        notes.append("The run hasn't ended by itself: it is running, or was killed")
    launches = (_object(path / "run.json", []) or {}).get("launches")
    every = [*(launches if isinstance(launches, list) else []), summary.get("launch_logs")]
    logs = list(dict.fromkeys(each for each in every if isinstance(each, str)))
    return RunData(
        path=path,
        name=_readable(masked(path.resolve().name, os.environ)),
        summary=_in_examples(summary),
        history=tuple(_rows(path / "history.csv", notes)),
        evaluation=tuple(_rows(path / "evaluation.csv", notes)),
        events=tuple(event for each in logs for event in _events(each, notes, last=each == logs[-1])),
        written=max(map(_changed, (path / "history.csv", path / "summary.json"))),
        notes=tuple(notes),
    )


def _events(logs: str, notes: list[str], *, last: bool) -> list[dict[str, Any]]:
    """Returns the events of a launch. It is over if another of the run came after it, or its launcher is gone."""
    found = _lines(pathlib.Path(logs) / "events.jsonl", notes)
    over = not last or any(job.over for job in jobs.every() if job.directory == os.path.abspath(logs))
    return [{**event, "over": True} for event in found] if over else found


def _changed(path: pathlib.Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def told_apart(runs: Sequence[RunData]) -> list[RunData]:
    """Renames runs of equal names by as much of their paths as distinguishes them."""
    for deep in range(1, 100):
        names = ["/".join(run.path.resolve().parts[-deep:]) for run in runs]
        if len(set(names)) == len({run.path.resolve() for run in runs}):
            break
    return [
        dataclasses.replace(run, name=_readable(masked(name, os.environ)))
        for run, name in zip(runs, names, strict=True)
    ]


def _no_run(path: pathlib.Path) -> str:
    """Returns why a path isn't a run directory; "" if it is one."""
    try:
        if not path.is_dir():
            return "there is no such directory"
        there = any((path / name).exists() for name in ("run.json", "summary.json", "history.csv"))
    except OSError as error:
        return f"it can't be read ({(error.strerror or str(error)).lower()})"
    return "" if there else "it holds no run.json, summary.json or history.csv"


def _object(path: pathlib.Path, notes: list[str]) -> dict[str, Any] | None:
    try:
        value = _readable(masked_all(json.loads(read_text(path)), os.environ))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} can't be read ({type(error).__name__})")
        return None
    if not isinstance(value, dict):
        notes.append(f"{path.name} holds no object")
    return value if isinstance(value, dict) else None


def _readable(value: Any) -> Any:
    """Replaces by ? what isn't text: unpaired surrogates, as JSON and Python's file names may contain."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_readable(name): _readable(each) for name, each in value.items()}
    return [_readable(each) for each in value] if isinstance(value, list) else value


def _rows(path: pathlib.Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        check_file(path)
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            rows = [{str(key): _number(value) for key, value in row.items()} for row in csv.DictReader(file)]
            if any(_is_infinite(value) for row in rows for value in row.values()):
                notes.append(f"{path.name} has numbers that are not finite: training diverged")
            return [
                _in_examples({key: None if _is_infinite(each) else each for key, each in row.items()}) for row in rows
            ]
    except FileNotFoundError:
        return []
    except (OSError, csv.Error) as error:
        notes.append(f"{path.name} can't be read ({type(error).__name__})")
        return []


def _in_examples(values: dict[str, Any]) -> dict[str, Any]:
    return {"examples_per_second" if key == "images_per_second" else key: value for key, value in values.items()}


def _lines(path: pathlib.Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        text = read_text(path, errors="replace")
    except (OSError, ValueError):
        notes.append(f"The launcher's record {path} is gone")
        return []
    found = []
    for line in text.splitlines():
        try:
            event = _readable(json.loads(line))
            known = {"at": float(event["at"]), "task": str(event["task"]), "event": str(event["event"])}
            found.append({**event, **known, "pid": int(event["pid"])})
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # Its last line may be incomplete.
            continue
    return found


def _number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None if value == "" else value


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def tried(notes: list[str], otherwise: T, make: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Returns `make`'s result for the arguments, or `otherwise` if the run's files hold invalid values.

    Args:
        notes: A sentence without its full stop is added to them where that is so.
        otherwise: Returned in the place of a part that can't be made.
        make: Makes a part of the page.
        args: What `make` is called with.
        kwargs: What `make` is called with.
    """
    try:
        return make(*args, **kwargs)
    except Exception as error:  # Edited files can hold anything.
        notes.append(f"A part of this page is missing: a file of the run can't be understood ({type(error).__name__})")
        return otherwise


@dataclasses.dataclass(frozen=True)
class Span:
    """A process of a task; its code is None while it runs, as far as is known.

    It is `lost` if its launcher has gone without saying how it ended.
    """

    task: str
    start: float
    end: float
    code: int | None
    dismissed: bool
    lost: bool = False

    @property
    def ending(self) -> str:
        """How it ended, in words: "done", "ended by the launcher" or with it, still "running ...", or a failure."""
        if self.lost:
            return "ended with its launcher"
        if self.code is None:
            return "running when this was written"
        if self.code == 0:
            return "done"
        if self.dismissed:
            return "ended by the launcher"
        return signals.name(-self.code) if self.code < 0 else f"exit code {self.code}"

    @property
    def failed(self) -> bool:
        """Whether it ended before its work was done, and not by the launcher."""
        return bool(self.code) and not self.dismissed


def spans_of(run: RunData, *, prefix: str) -> list[Span]:
    """Returns the processes of a run's tasks, in the order in which they were started.

    Args:
        run: A run directory with the launcher's record.
        prefix: What each task's name begins with, where several runs are shown.
    """
    started: dict[tuple[str, Any], dict[str, Any]] = {}
    found = []
    for event in run.events:
        key = (event["task"], event.get("pid"))
        if event["event"] == "started":
            started[key] = event
        elif event["event"] == "ended" and key in started:
            code = event.get("code")
            dismissed = bool(event.get("dismissed"))
            found.append(
                Span(
                    prefix + key[0],
                    started.pop(key)["at"],
                    event["at"],
                    code if isinstance(code, int) else None,
                    dismissed,
                )
            )
    # A process that still runs ends, for the chart, at its last event or at the run's last written file.
    latest = max([run.written, *(event["at"] for event in run.events)])
    for (task, _), event in started.items():
        at, lost = event["at"], bool(event.get("over"))
        # A launch that was followed by another ended before that one began.
        later = [other["at"] for other in run.events if other["at"] > at and not other.get("over")] if lost else []
        found.append(Span(prefix + task, at, max(min([latest, *later]), at), None, False, lost))
    return sorted(found, key=lambda span: span.start)
