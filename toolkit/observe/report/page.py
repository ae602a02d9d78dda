"""The page: tiles, sentences, facts, charts and tables, filled into its template and written to a file.

Everything on the page is escaped except the charts, which are drawn here.
"""

import contextlib
import datetime
import json
import logging
import math
import os
import pathlib
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit.errors import RequestError
from toolkit.observe.report.pictures import draw, is_share, parts_of
from toolkit.observe.report.reading import RunData, Span, read, spans_of, told_apart, tried
from toolkit.support import goodput
from toolkit.support.files import read_text, write_text
from toolkit.support.redaction import masked, masked_command
from toolkit.support.words import counted

if TYPE_CHECKING:
    from toolkit.training import Run

NAME = "report.html"
_LOG = logging.getLogger(__name__)


def write(directories: Sequence[str | pathlib.Path], out: str | pathlib.Path | None = None) -> pathlib.Path:
    """Writes the page about one run, or about several compared, and returns its path.

    Args:
        directories: Run directories.
        out: The file; None for report.html in the run's directory, or here where there are several.

    Raises:
        RunDirectoryError: One of them is no run directory.
        RequestError: The page can't be written there.
    """
    runs = told_apart([read(path) for path in directories])
    file = pathlib.Path(out) if out is not None else (runs[0].path / NAME if len(runs) == 1 else pathlib.Path(NAME))
    with _errors_explained(file):
        _check(file, runs)
    text = render(runs)
    with _errors_explained(file):
        if file.exists() and not file.is_file():  # A device or a pipe is written to, not replaced.
            file.write_text(text, encoding="utf-8")
        else:
            write_text(file.resolve(), text)
    return file


@contextlib.contextmanager
def _errors_explained(file: pathlib.Path) -> Iterator[None]:
    try:
        yield
    # A NUL character raises a ValueError, a link to itself a RuntimeError.
    except (OSError, ValueError, RuntimeError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise RequestError(
            asked=f"the report is to be written to {file}",
            found=f"that can't be done ({reason})",
            remedy="Use --out to name a file in an existing directory",
        ) from error


def _check(file: pathlib.Path, runs: Sequence[RunData]) -> None:
    """Refuses a path that would overwrite a run's own files, before any work."""
    found = ""
    if not file.name or file.is_dir():
        found = "that is no name of a file"
    elif file.suffix.lower() not in (".html", ".htm") and file.resolve().parent in {run.path.resolve() for run in runs}:
        found = "there it could take the place of the run's own files"
    if found:
        raise RequestError(asked=f"--out={file}", found=found, remedy="Name a file that ends in .html")


def write_after(run: "Run") -> None:
    """Writes the page about a run that has ended, if this process has its directory; a failure is only logged."""
    if run.path is None:
        return
    try:
        _LOG.info("Report: %s", write([run.path]))
        run.update_copy()
    except Exception as error:  # A report must never make a run fail.
        _LOG.warning("The report can't be written (%s: %s)", type(error).__name__, error)


_FACTS = {
    "status": "status",
    "recipe": "recipe",
    "strategy": "strategy",
    "replicas": "replicas",
    "communication": "communication",
    "sharded_layers": "sharded layers",
    "weights": "weights at rest",
    "optimizer_state": "optimizer state",
    "mesh": "mesh of what is sharded",
    "batch_statistics": "batch statistics",
    "compression": "compression of gradients",
    "local_steps": "local steps",
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
    "peak_memory": "most memory of tensors",
    "wall_seconds": "seconds of the last process",
    "resumed_from_step": "resumed after step",
    "weights_sha256": "weights, SHA-256",
}
_MOST_ROWS = 200
_MOSTLY = 0.5  # A share of a step: with more communication, two workers take longer than one.
_EMULATED = "CPU devices stood in for GPUs and shared the same cores: its speed says nothing about GPUs"


class _Table(NamedTuple):
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
            values = [_peaks(run) if fact == "peak_memory" else in_words(fact, value_of(run, fact)) for run in runs]
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
        scalars = [
            (key.replace("_", " "), in_words("", value))
            for key, value in counted.items()
            if isinstance(value, (int, float, str)) and not isinstance(value, bool)
        ]
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


_MOST_FAILURES = 3  # The most failures that are named.


class Tile(NamedTuple):
    """A figure with its label and a note."""

    name: str
    value: str
    more: str = ""


def tiles(runs: Sequence[RunData]) -> list[Tile]:
    """Returns the tiles of one run, or one tile for each of several."""
    if len(runs) > 1:
        first = min((run for run in runs if _speed(run)), key=_replicas, default=runs[0])
        return [_compared(run, first) for run in runs]
    (run,) = runs
    return [tile for tile in (_outcome(run), _metrics(run), _rate(run), _step(run), _model(run)) if tile is not None]


def _outcome(run: RunData) -> Tile:
    summary = run.summary
    more = [f"{in_words('epochs', summary.get('epochs'))} epochs, {in_words('steps', summary.get('steps'))} steps"]
    seconds, resumed = summary.get("wall_seconds"), summary.get("resumed_from_step")
    again = isinstance(resumed, int)
    more += [f"resumed after step {resumed:,}"] if again else []
    more += [f"{seconds:,.0f} s{' since then' if again else ''}"] if isinstance(seconds, (int, float)) else []
    more += _failures(spans_of(run, prefix=""))
    return Tile(name="outcome", value=str(summary.get("status") or "not ended"), more=", ".join(more))


def _failures(spans: Sequence[Span]) -> list[str]:
    """Says which processes failed, and how many were restarted after a failure."""
    failed = [f"{span.task} ended by {span.ending}" for span in spans if span.failed]
    more = [", ".join([*failed[:_MOST_FAILURES], *(["..."] if failed[_MOST_FAILURES:] else [])])] if failed else []
    before: dict[str, Span] = {}
    restarts = 0
    for span in spans:
        restarts += span.task in before and before[span.task].ending != "done"
        before[span.task] = span
    return more + ([f"{counted(restarts, 'task')} started again"] if restarts else [])


def _metrics(run: RunData) -> Tile | None:
    shown = {name: text for name in run.metrics if (text := in_words(name, value_of(run, name)))}
    names = [name for name in shown if name.startswith("val_")] or list(shown)
    if not names:
        return None
    first = next((name for name in names if not name.endswith("loss")), names[0])
    rest = [f"{name} {text}" for name, text in shown.items() if name != first]
    return Tile(name=first, value=shown[first], more=", ".join(rest[:3]))


def _rate(run: RunData) -> Tile | None:
    speed = in_words("examples_per_second", run.summary.get("examples_per_second"))
    steps = run.summary.get("measured_steps")
    over = [f"mean of {counted(steps, 'step')}"] if isinstance(steps, int) and steps else []
    more = ", ".join(filter(None, [_replicas_in_words(run), *over]))
    return Tile(name="examples per second", value=speed, more=more) if speed else None


def _model(run: RunData) -> Tile | None:
    parameters = in_words("parameters", run.summary.get("parameters"))
    more = [str(run.summary.get("hardware") or ""), _memory_in_words(run)]
    return Tile(name="parameters", value=parameters, more="; ".join(filter(None, more))) if parameters else None


def _memory_in_words(run: RunData) -> str:
    """Returns the most memory that the replicas of the process that wrote the summary had in use."""
    amounts = _peaks(run)
    if not amounts:
        return ""
    here = [device for device in run.summary.get("devices") or () if str(device).startswith("CPU")]
    several = len(run.summary["peak_memory"]) > 1
    whose = "by replica" if several else f"of {counted(len(here), 'replica')} together" if here[1:] else ""
    return " ".join(filter(None, [f"at most {amounts} of tensors in memory", whose]))


def _peaks(run: RunData) -> str:
    """Returns the most memory by device, such as "5, 7 MB"; "" where it isn't known."""
    peaks = run.summary.get("peak_memory")
    if not isinstance(peaks, list) or not all(isinstance(peak, int) and peak > 0 for peak in peaks) or not peaks:
        return ""
    return ", ".join(f"{peak / 1e6:,.0f}" for peak in peaks) + " MB"


def _step(run: RunData) -> Tile | None:
    parts = parts_of(run.summary.get("step"))
    whole = run.summary["step"]["milliseconds"] if parts else 0
    if not parts or not whole:
        return None
    shares = {part: round(100 * milliseconds / whole) for part, milliseconds in parts.items()}
    shares["other"] = max(0, 100 - sum(shares.values()) + shares["other"])
    more = ", ".join(f"{share}% {part}" for part, share in shares.items() if share or part != "between steps")
    more = more.replace("between steps", "between steps (callbacks, starting a step)")
    profiled = f"{counted(run.summary['step'].get('steps') or 0, 'early step')} while profiled, {whole:,.1f} ms"
    rate, batch = _speed(run), run.summary.get("global_batch_size")
    more = f"{profiled}: {more}"
    if rate and isinstance(batch, int) and run.summary.get("measured_steps"):
        whole = 1e3 * batch / rate  # Steps are slower while they are profiled. So it agrees with the tile beside it.
    late = [event["task"] for event in run.events if event["event"] == "waits"]
    more += f"; most of the communication is waiting for {late[0]}" if late else ""
    return Tile(name="a step", value=f"{whole:,.1f} ms", more=more)


def _compared(run: RunData, first: RunData) -> Tile:
    """Compares one of several runs with the run that has the fewest replicas."""
    more = [_replicas_in_words(run)]
    if run is not first and _speed(run) and _speed(first) and not (_emulated(run) or _emulated(first)):
        times = _speed(run) / _speed(first)
        more.append(f"{times:.2f} times the speed of {first.name}")
        if _replicas(run) != _replicas(first):
            more.append(f"{times * _replicas(first) / _replicas(run):.0%} for each replica")
    metrics = _metrics(run)
    more += [f"{metrics.name} {metrics.value}"] if metrics is not None else []
    value = f"{in_words('examples_per_second', _speed(run))} examples/s" if _speed(run) else "no speed"
    return Tile(name=run.name, value=value, more=", ".join(filter(None, more)))


def _replicas_in_words(run: RunData) -> str:
    replicas = run.summary.get("replicas")
    if not isinstance(replicas, int):
        return ""
    layers = run.summary.get("sharded_layers")
    sharded = f", {counted(layers, 'layer')} sharded" if isinstance(layers, int) and layers else ""
    parts = [name for name in ("weights", "optimizer_state") if run.summary.get(name) == "sharded"]
    sharded += f", {parts[0].replace('_', ' ')} sharded" if parts else ""  # With weights, optimizer state always is.
    return f"{counted(replicas, 'replica')}, {run.summary.get('strategy')}{sharded}"


def _speed(run: RunData) -> Any:
    speed = run.summary.get("examples_per_second")
    return speed if isinstance(speed, (int, float)) and speed > 0 else 0


def _replicas(run: RunData) -> int:
    replicas = run.summary.get("replicas")
    return replicas if isinstance(replicas, int) and replicas > 0 else 1


def _emulated(run: RunData) -> bool:
    return bool(run.summary.get("emulated"))


# Where summaries of earlier versions have them.
EARLIER_NAMES = {
    "loss": "train_loss",
    "accuracy": "train_accuracy",
    "val_loss": "test_loss",
    "val_accuracy": "test_accuracy",
}
_DIGITS = 4


def value_of(run: RunData, key: str) -> Any:
    """Returns a value of a run's summary; for a run that hasn't ended, a metric of its last epoch."""
    last = run.history[-1].get(key) if run.history and key in run.metrics else None
    return run.summary.get(key, run.summary.get(EARLIER_NAMES.get(key, ""), last))


def in_words(key: str, value: Any) -> str:
    """Formats a value: "" for None, "98.70%" for an accuracy, four digits for another fraction."""
    if value is None or value == []:
        return ""
    try:
        if is_share(key) and isinstance(value, (int, float)):
            return f"{value:.2%}"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            small = isinstance(value, float) and abs(value) < 1000
            return f"{value:,.{_DIGITS}g}" if small else f"{value:,.0f}"
    except (OverflowError, ValueError):  # A number of four hundred digits.
        return "?"
    if isinstance(value, dict):
        value = [f"{name} {each}" for name, each in value.items()]
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)[:16] if key == "weights_sha256" else str(value)


def column(key: str, values: Sequence[Any]) -> list[str]:
    """Formats the values of a column with the same number of decimals: enough for four digits of the largest."""
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if is_share(key) or len(numbers) < len([value for value in values if value is not None]):
        return [in_words(key, value) for value in values]
    if all(float(number).is_integer() for number in numbers):
        return [in_words(key, value if value is None else int(value)) for value in values]
    largest = max(map(abs, numbers))
    if largest < 1e-3:
        return [in_words(key, value) for value in values]
    decimals = max(0, _DIGITS - 1 - math.floor(math.log10(largest)))
    return ["" if value is None else f"{value:,.{decimals}f}" for value in values]
