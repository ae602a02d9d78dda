"""The page, from a template: everything on it is escaped but the charts, which are drawn here."""

import dataclasses
import datetime
import os
import pathlib
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from toolkit.observe.report.pictures import draw
from toolkit.observe.report.reading import RunData, tried
from toolkit.support.redaction import masked, masked_command

__all__ = ["render"]

_FACTS = {
    "status": "status",
    "recipe": "recipe",
    "strategy": "strategy",
    "replicas": "replicas",
    "devices": "devices of the process that wrote it",
    "dataset": "data set",
    "model": "model",
    "global_batch_size": "global batch",
    "learning_rate": "learning rate",
    "epochs": "epochs",
    "steps": "steps",
    "metrics": "",  # Here stand the model's own, by their names.
    "examples_per_second": "examples per second",
    "wall_seconds": "seconds in all",
    "resumed_from_step": "resumed after step",
    "weights_sha256": "weights, SHA-256",
}
# Where a summary of an earlier version has them.
_EARLIER_NAMES = {
    "loss": "train_loss",
    "accuracy": "train_accuracy",
    "val_loss": "test_loss",
    "val_accuracy": "test_accuracy",
}
_MOST_ROWS = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Table:
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tile:
    name: str
    value: str
    more: str = ""


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
    sentences = [sentence for run in runs for sentence in tried(notes, none, _sentences, run, several=several)]
    tables = [table for run in runs for table in tried(notes, no_tables, _tables, run, several=several)]
    pictures = draw(runs, notes)
    no_tiles: list[_Tile] = []
    tiles = [] if several else tried(notes, no_tiles, _tiles, runs[0])
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
        tiles=tiles,
        pictures=pictures,
        tables=tables,
        commands=commands,
        versions=versions,
    )
    return page.encode("utf-8", "replace").decode()  # A name of a file may hold what isn't text.


def _tiles(run: RunData) -> list[_Tile]:
    """Returns what somebody looks for first: outcome, metrics at the end, speed, and where a step's time went."""
    summary = run.summary
    seconds, resumed = summary.get("wall_seconds"), summary.get("resumed_from_step")
    outcome = [f"{_format('epochs', summary.get('epochs'))} epochs, {_format('steps', summary.get('steps'))} steps"]
    outcome += [f"{seconds:,.0f} s"] if isinstance(seconds, (int, float)) else []
    outcome += [f"resumed after step {resumed:,}"] if isinstance(resumed, int) else []
    tiles = [_Tile(name="outcome", value=str(summary.get("status") or "not ended"), more=", ".join(outcome))]
    shown = {name: text for name in run.metrics if (text := _format(name, _value(run, name)))}
    names = [name for name in shown if name.startswith("val_")] or list(shown)
    if names:
        first = next((name for name in names if not name.endswith("loss")), names[0])
        rest = [f"{name} {text}" for name, text in shown.items() if name != first]
        tiles.append(_Tile(name=first, value=shown[first], more=", ".join(rest[:3])))
    if speed := _format("examples_per_second", summary.get("examples_per_second")):
        replicas = _format("replicas", summary.get("replicas"))
        more = (
            f"{replicas} {'replica' if replicas == '1' else 'replicas'}, {summary.get('strategy')}" if replicas else ""
        )
        tiles.append(_Tile(name="examples per second", value=speed, more=more))
    step = summary.get("step")
    if isinstance(step, dict) and step.get("milliseconds"):
        whole = step["milliseconds"]
        shares = {part: round(100 * step.get(part, 0) / whole) for part in ("compute", "communication", "input")}
        shares["other"] = max(0, 100 - sum(shares.values()))
        more = ", ".join(f"{share} % {part}" for part, share in shares.items())
        tiles.append(_Tile(name="a step", value=f"{whole:,.1f} ms", more=more))
    return tiles


def _sentences(run: RunData, *, several: bool) -> list[str]:
    """Returns in words what the figures come to."""
    head = f"{run.name}: " if several else ""
    found = []
    if run.summary.get("emulated"):
        found.append(
            f"{head}CPU devices stood in for GPUs and shared the same cores: its speed says nothing about GPUs."
        )
    step = run.summary.get("step")
    if isinstance(step, dict) and step.get("exchanges") and step.get("exchanging"):
        found.append(
            f"{head}Replicas exchange something {step['exchanges']:.0f} times a step. Some exchange is under way for "
            f"{step['exchanging']:.1f} ms of it, {step.get('hidden', 0) / step['exchanging']:.0%} of that behind "
            "computing."
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
    metrics = list(dict.fromkeys(name for run in runs for name in (*run.metrics, *_EARLIER_NAMES)))
    for key, name in _FACTS.items():
        for fact in metrics if key == "metrics" else [key]:
            values = [_format(fact, _value(run, fact)) for run in runs]
            if any(values):
                yield name or fact, values


def _value(run: RunData, key: str) -> Any:
    """Returns a value of a run's summary; of a run that has not ended, a metric of its last epoch."""
    last = run.history[-1].get(key) if run.history and key in run.metrics else None
    return run.summary.get(key, run.summary.get(_EARLIER_NAMES.get(key, ""), last))


def _format(key: str, value: Any) -> str:
    try:
        return _in_words(key, value)
    except (OverflowError, ValueError):  # A number of four hundred digits.
        return "?"


def _in_words(key: str, value: Any) -> str:
    if value is None or value == []:
        return ""
    if key.endswith("accuracy") and isinstance(value, (int, float)):
        return f"{value:.2%}"
    if key == "weights_sha256":
        return str(value)[:16]
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _tables(run: RunData, *, several: bool) -> list[_Table]:
    of = f", {run.name}" if several else ""
    found = []
    rows = [row for row in run.summary.get("parallelism") or () if isinstance(row, dict)]
    if rows:
        found.append(_plan(rows, f"Ways to divide the layers{of}"))
    counted = run.summary.get("parameter_servers")
    if isinstance(counted, dict):
        scalars = [(key.replace("_", " "), _format("", value)) for key, value in counted.items() if _is_scalar(value)]
        counts = [
            (f"{key.replace('_', ' ')}, {name}", _format("", value))
            for key in ("steps_by_worker", "bytes_by_task")
            for name, value in (counted.get(key) or {}).items()
        ]
        found.append(_Table(title=f"Parameter servers{of}", headings=("", ""), rows=[*scalars, *counts]))
    for title, table in (("Epochs", run.history), ("Evaluations", run.evaluation)):
        if table:
            names = list(dict.fromkeys(name for row in table for name in row))
            cells = [[_format(name, _without_fraction(row.get(name))) for name in names] for row in table[-_MOST_ROWS:]]
            found.append(_Table(title=f"{title}{of}", headings=names, rows=cells))
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


def _without_fraction(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float, str)) and not isinstance(value, bool)


def _command(run: RunData) -> str:
    command = run.summary.get("command")
    return shlex.join(masked_command([str(part) for part in command], {})) if isinstance(command, list) else ""


def _versions(run: RunData) -> str:
    versions = run.summary.get("versions")
    return (
        ", ".join(f"{name} {version}" for name, version in versions.items()) + "." if isinstance(versions, dict) else ""
    )
