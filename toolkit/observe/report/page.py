"""Fills the page's template. Everything on the page is escaped except the charts, which are drawn here."""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from toolkit.observe.report.figures import EARLIER_NAMES, column, in_words, value_of
from toolkit.observe.report.pictures import draw
from toolkit.observe.report.reading import RunData, tried
from toolkit.observe.report.tiles import Tile, tiles
from toolkit.support import goodput
from toolkit.support.files import read_text
from toolkit.support.redaction import masked, masked_command

__all__ = ["render"]

_FACTS = {
    "status": "status",
    "recipe": "recipe",
    "strategy": "strategy",
    "replicas": "replicas",
    "sharded_layers": "sharded layers",
    "hardware": "hardware of a worker",
    "parameters": "parameters",
    "devices": "devices of the process that wrote it",
    "dataset": "data set",
    "model": "model",
    "global_batch_size": "global batch",
    "optimizer": "optimizer",
    "learning_rate": "learning rate",
    "dtype_policy": "dtype policy",
    "epochs": "epochs",
    "steps": "steps",
    "metrics": "",  # Filled with the model's own metrics, by name.
    "examples_per_second": "examples per second",
    "wall_seconds": "seconds in all",
    "resumed_from_step": "resumed after step",
    "weights_sha256": "weights, SHA-256",
}
_MOST_ROWS = 200
_MOSTLY = 0.5  # A share of a step: with more communication, two workers take longer than one.
_EMULATED = "CPU devices stood in for GPUs and shared the same cores: its speed says nothing about GPUs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Table:
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def render(runs: Sequence[RunData]) -> str:
    """Returns the whole page.

    Args:
        runs: One, or several to be compared.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    several = len(runs) > 1
    recipe = str(runs[0].summary.get("recipe") or "A run")
    title = runs[0].name if runs[0].name.startswith(recipe) else f"{recipe}: {runs[0].name}"
    notes = [f"{run.name}: {note}" if several else note for run in runs for note in run.notes]
    none: list[str] = []
    no_tables: list[_Table] = []
    notes += [f"{run.name + ': ' if several else ''}{_EMULATED}" for run in runs if run.summary.get("emulated")]
    sentences = [sentence for run in runs for sentence in tried(notes, none, _sentences, run, several=several)]
    tables = [table for run in runs for table in tried(notes, no_tables, _tables, run, several=several)]
    pictures = draw(runs, notes)
    no_tiles: list[Tile] = []
    facts: list[tuple[str, list[str]]] = tried(notes, [], lambda: list(_facts(runs)))
    commands = [tried(notes, "", _command, run) for run in runs]
    versions = " ".join(sorted({tried(notes, "", _versions, run) for run in runs} - {""}))
    paths = [masked(str(run.path), os.environ) for run in runs]
    page = environment.get_template("page.html.j2").render(
        title=f"{len(runs)} runs compared" if several else title,
        written=f"Written {datetime.datetime.now():%Y-%m-%d %H:%M} from {', '.join(paths)}",
        runs=runs,
        sentences=sentences,
        notes=list(dict.fromkeys(notes)),
        facts=facts,
        tiles=tried(notes, no_tiles, tiles, runs),
        pictures=pictures,
        tables=tables,
        commands=commands,
        versions=versions,
    )
    return page.encode("utf-8", "replace").decode()  # A file's name may not be valid text.


def _sentences(run: RunData, *, several: bool) -> list[str]:
    """Returns conclusions in sentences."""
    head = f"{run.name}: " if several else ""
    found = []
    slow = [event for event in run.events if event["event"] == "waits" and isinstance(event.get("share"), float)]
    found += [
        f"{head}{event['task']} kept the others waiting for {event['share']:.0%} of their time: by its input, or by "
        "what it does between steps. Their waiting counts as communication."
        for event in slow
    ]
    useful = run.summary.get("goodput")
    if isinstance(useful, dict) and (said := goodput.in_words(useful["seconds"])):
        found.append(f"{head}{said}.")
    step = run.summary.get("step")
    if isinstance(step, dict) and step.get("exchanges") and step.get("exchanging"):
        found.append(
            f"{head}Replicas exchange something {step['exchanges']:.0f} times a step. Some exchange is under way for "
            f"{step['exchanging']:.1f} ms of it, {step.get('hidden', 0) / step['exchanging']:.0%} of that behind "
            "computing."
        )
    if not (several or slow or run.summary.get("emulated")) and isinstance(step, dict) and step.get("milliseconds"):
        share = step.get("communication", 0) / step["milliseconds"]
        if share > _MOSTLY:
            found.append(
                f"{share:.0%} of a step is communication that nothing hides: fewer replicas may be as fast. Compare it "
                "with a run on one device, or see the guide on slow networks."
            )
    if several and isinstance(step, dict) and step.get("milliseconds"):
        shares = {part: step.get(part, 0) / step["milliseconds"] for part in ("compute", "communication", "input")}
        found.append(
            f"{head}Of a step's {step['milliseconds']:.1f} ms (mean of {step.get('steps')} early steps), "
            f"{shares['compute']:.0%} is computing, {shares['communication']:.0%} communication not hidden behind it, "
            f"{shares['input']:.0%} waiting for input."
        )
    return found


def _facts(runs: Sequence[RunData]) -> Iterator[tuple[str, list[str]]]:
    metrics = list(dict.fromkeys(name for run in runs for name in (*run.metrics, *EARLIER_NAMES)))
    for key, name in _FACTS.items():
        for fact in metrics if key == "metrics" else [key]:
            values = [in_words(fact, value_of(run, fact)) for run in runs]
            if any(values):
                yield name or fact, values


def _tables(run: RunData, *, several: bool) -> list[_Table]:
    of = f", {run.name}" if several else ""
    found = []
    rows = [row for row in run.summary.get("parallelism") or () if isinstance(row, dict)]
    if rows:
        found.append(_plan(rows, f"Ways to divide the layers{of}"))
    counted = run.summary.get("parameter_servers")
    if isinstance(counted, dict):
        scalars = [(key.replace("_", " "), in_words("", value)) for key, value in counted.items() if _is_scalar(value)]
        counts = [
            (f"{key.replace('_', ' ')}, {name}", in_words("", value))
            for key in ("steps_by_worker", "bytes_by_task")
            for name, value in (counted.get(key) or {}).items()
        ]
        found.append(_Table(title=f"Parameter servers{of}", headings=("", ""), rows=[*scalars, *counts]))
    for title, table in (("Epochs", run.history), ("Evaluations", run.evaluation)):
        if table:
            names = list(dict.fromkeys(name for row in table for name in row))
            columns = [column(name, [row.get(name) for row in table[-_MOST_ROWS:]]) for name in names]
            found.append(_Table(title=f"{title}{of}", headings=names, rows=list(zip(*columns, strict=True))))
    return found


def _plan(rows: Sequence[dict[str, Any]], title: str) -> _Table:
    def scaled(row: dict[str, Any], name: str, scale: float, digits: int) -> str:
        value = row.get(name)
        return f"{value * scale:,.{digits}f}" if isinstance(value, (int, float)) else "-"

    return _Table(
        title=title,
        headings=(
            "convolutions, FC",
            "ms predicted",
            "measured",
            "MB received predicted",
            "measured",
            "million weights",
            "loss",
        ),
        rows=[
            [
                f"{row.get('conv')}, {row.get('fc')}",
                scaled(row, "predicted_seconds", 1e3, 1),
                scaled(row, "measured_seconds", 1e3, 1),
                scaled(row, "predicted_bytes", 1e-6, 2),
                scaled(row, "measured_bytes", 1e-6, 2),
                scaled(row, "parameters", 1e-6, 2),
                scaled(row, "loss", 1, 4),
            ]
            for row in rows
        ],
    )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float, str)) and not isinstance(value, bool)


def _command(run: RunData) -> str:
    """Returns the command that starts the run again, behind the variables that matter to it; "" for Ray."""
    given = run.summary.get("environment")
    variables = (
        [f"{name}={shlex.quote(str(value))}" for name, value in given.items()] if isinstance(given, dict) else []
    )
    return " ".join([*variables, command]) if (command := _started_by(run)) else ""


def _started_by(run: RunData) -> str:
    """Returns the launcher's command, if there is one, or the script's own."""
    if isinstance(logs := run.summary.get("launch_logs"), str):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            again = json.loads(read_text(pathlib.Path(logs, "job.json")))["again"]
            return shlex.join(masked_command(shlex.split(again), {}))
    command = run.summary.get("command")
    if isinstance(command, list) and any(str(part).endswith("default_worker.py") for part in command):
        return ""
    return shlex.join(masked_command([str(part) for part in command], {})) if isinstance(command, list) else ""


def _versions(run: RunData) -> str:
    versions = run.summary.get("versions")
    return (
        ", ".join(f"{name} {version}" for name, version in versions.items()) + "." if isinstance(versions, dict) else ""
    )
