"""Charts as SVG in the page's colours: dark on white, light on black, and in print.

Lines differ in marker and dash as well as in colour. Colours: Okabe and Ito, "Color Universal Design",
https://jfly.uni-koeln.de/color/.
"""

import functools
import hashlib
import html
import io
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from toolkit.observe.report.reading import RunData, spans_of, tried

_MOST_METRICS = 12
_INK = "#010203"  # Stands for the page's own text colour.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_PARTS = {  # Of a step: their colours and hatches.
    "compute": ("#0072b2", ""),
    "communication": ("#d55e00", "///"),
    "input": ("#e69f00", "..."),
    "between steps": ("#56b4e9", "\\\\"),
    "other": ("#999999", "xx"),
}
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "hatch.color": _INK,
    "hatch.linewidth": 0.4,
    "text.parse_math": False,
}


class Picture(NamedTuple):
    """A chart of the page.

    Attributes:
        title: The heading above the chart.
        svg: An <svg> element.
        words: What the chart shows, for those who don't see it.
    """

    title: str
    svg: str
    words: str


def draw(runs: Sequence[RunData], notes: list[str]) -> list[Picture]:
    """Returns the charts for which the runs have data; a chart that can't be drawn is logged."""
    metrics = list(dict.fromkeys(name.removeprefix("val_") for run in runs for name in run.metrics))
    if len(metrics) > _MOST_METRICS:
        notes.append(f"{_MOST_METRICS} of {len(metrics)} metrics are drawn; the table of epochs has all")
    makers: list[Callable[[Sequence[RunData]], Picture | None]] = [
        *(functools.partial(_curves, title=name, columns=(name, f"val_{name}")) for name in metrics[:_MOST_METRICS]),
        _plan,
        _staleness,
        functools.partial(_curves, title="Examples per second", columns=("examples_per_second",)),
        _steps,
        _timeline,
    ]
    return [picture for make in makers if (picture := tried(notes, None, make, runs)) is not None]


def _picture(title: str, words: str, plot: Callable[[Any], None], *, height: float = 3.0) -> Picture:
    import matplotlib
    from matplotlib.figure import Figure

    # Each chart has its own ids, because one page has several.
    salt = hashlib.sha256(title.encode()).hexdigest()[:8]
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # Characters that its fonts lack; the browser's may have them.
        # Names so long that no room is left for lines.
        warnings.filterwarnings("ignore", "constrained_layout not applied")
        figure = Figure(figsize=(5.4, height), layout="constrained")
        plot(figure.subplots())
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'id="([^"]+)"', rf'id="{salt}-\1"', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{salt}-", svg)
    svg = svg.replace(_INK, "currentColor")
    box = re.search(r'viewBox="([^"]+)"', svg)
    head = f'<svg viewBox="{box[1] if box else "0 0 400 200"}" role="img" aria-label="{html.escape(words)}" '
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    svg = head + spaces + svg[svg.index(">") + 1 :]
    return Picture(title, svg, words)


def _curves(runs: Sequence[RunData], *, title: str, columns: Sequence[str]) -> Picture | None:
    lines = []
    for number, run in enumerate(runs):
        for column in columns:
            points = [(row["epoch"], row[column]) for row in run.history if _are_numbers(row, "epoch", column)]
            if points:
                label = run.name if len(columns) == 1 else f"{run.name} {column}" if len(runs) > 1 else column
                label = f" {label}" if label.startswith("_") else label  # Otherwise matplotlib leaves it out.
                lines.append((number, column.startswith("val_"), label, points))
    if not lines:
        return None

    from matplotlib.ticker import PercentFormatter

    def plot(axes: Any) -> None:
        for number, test, label, points in lines:
            axes.plot(
                *zip(*points, strict=True),
                label=label,
                color=_COLOURS[(2 * number + test if len(runs) == 1 else number) % len(_COLOURS)],
                linestyle=_DASHES[1 if test else 0],
                marker=_MARKERS[(2 * number + test) % len(_MARKERS)],
                markersize=4,
            )
        axes.set_xlabel("epoch")
        axes.set_ylabel(title)
        axes.grid(alpha=0.25, color=_INK)
        if title == "Examples per second":
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        elif is_share(title):
            axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
        if len({point[0] for line in lines for point in line[3]}) < 12:
            axes.set_xticks(sorted({point[0] for line in lines for point in line[3]}))
        if len(lines) > 1:
            axes.legend(fontsize=8)

    last = "; ".join(f"{label}: {points[-1][1]:.4g} after epoch {points[-1][0]:.0f}" for _, _, label, points in lines)
    return _picture(title, f"{title} by epoch. {last}.", plot)


def parts_of(step: Any) -> dict[str, float] | None:
    """Returns the milliseconds of each part of a step, as a summary has it; None where it has no such numbers."""
    if not isinstance(step, dict) or not _are_numbers(
        step, "milliseconds", "compute", "communication", "input", "other"
    ):
        return None
    between = min(step["between"], step["other"]) if _are_numbers(step, "between") else 0.0
    return {part: step.get(part, 0.0) for part in _PARTS} | {"between steps": between, "other": step["other"] - between}


def _steps(runs: Sequence[RunData]) -> Picture | None:
    found = [(run, parts_of(run.summary.get("step"))) for run in runs]
    seen = [(run.name, run.summary["step"]["milliseconds"], parts) for run, parts in found if parts]
    if not seen:
        return None

    def plot(axes: Any) -> None:
        names = [name for name, *_ in seen]
        starts = [0.0] * len(seen)
        for part, (colour, hatch) in _PARTS.items():
            widths = [parts[part] for *_, parts in seen]
            axes.barh(range(len(seen)), widths, left=starts, color=colour, hatch=hatch, label=part, height=0.6)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        axes.set_yticks(range(len(seen)) if len(seen) > 1 else [], names if len(seen) > 1 else None)
        axes.invert_yaxis()
        axes.set_xlabel("ms of a step")
        axes.figure.legend(loc="outside lower center", ncols=5, fontsize=8)

    words = "; ".join(
        f"{name}: " + ", ".join(f"{part} {parts[part]:.1f}" for part in _PARTS) + f" of {whole:.1f} ms"
        for name, whole, parts in seen
    )
    return _picture("Where a step's time goes", f"{words}.", plot, height=1.5 + 0.45 * len(seen))


_ENDINGS = {
    "done": ("#009e73", ""),
    "ended by the launcher": ("#56b4e9", "..."),
    "running when this was written": ("#999999", "xx"),
    "ended with its launcher": ("#e69f00", "\\\\"),
    "failed": ("#d55e00", "///"),
}


def _timeline(runs: Sequence[RunData]) -> Picture | None:
    spans = [span for run in runs for span in spans_of(run, prefix=f"{run.name} " if len(runs) > 1 else "")]
    if not spans:
        return None
    tasks = list(dict.fromkeys(span.task for span in spans))
    begin = min(span.start for span in spans)

    def plot(axes: Any) -> None:
        for span in spans:
            kind = span.ending if span.ending in _ENDINGS else "failed"
            colour, hatch = _ENDINGS[kind]
            place, length = tasks.index(span.task), span.end - span.start
            axes.barh(
                place,
                length,
                left=span.start - begin,
                height=0.6,
                color=colour,
                hatch=hatch,
                edgecolor=_INK,
                linewidth=0.6,
                label=kind,
            )
            if kind == "failed":
                axes.annotate(span.ending, (span.end - begin, place - 0.3), fontsize=7, ha="right", va="bottom")
        axes.set_yticks(range(len(tasks)), tasks)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel("seconds since the first task was started")
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize=8)

    ends = "; ".join(f"{span.task}: {span.end - span.start:.0f} s, {span.ending}" for span in spans)
    return _picture("Tasks, their ends and restarts", f"{ends}.", plot, height=1.5 + 0.35 * len(tasks))


def _staleness(runs: Sequence[RunData]) -> Picture | None:
    counted = []
    for run in runs:
        facts = run.summary.get("parameter_servers")
        histogram = facts.get("staleness") if isinstance(facts, dict) else None
        if isinstance(histogram, dict) and histogram:
            counted.append((run.name, {int(updates): int(count) for updates, count in histogram.items()}))
    if not counted:
        return None

    def plot(axes: Any) -> None:
        width = 0.8 / len(counted)
        for number, (name, histogram) in enumerate(counted):
            at = [updates + (number - (len(counted) - 1) / 2) * width for updates in histogram]
            axes.bar(
                at,
                list(histogram.values()),
                width,
                color=_COLOURS[number % len(_COLOURS)],
                hatch=["", "///", "...", "xx"][number % 4],
                label=name,
            )
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("updates between reading weights and applying the gradient")
        axes.set_ylabel("gradients")
        if len(counted) > 1:
            axes.legend(fontsize=8)

    words = "; ".join(
        f"{name}: " + ", ".join(f"{n} of {updates} updates" for updates, n in sorted(h.items())) for name, h in counted
    )
    return _picture("Staleness of gradients", f"{words}.", plot)


def _plan(runs: Sequence[RunData]) -> Picture | None:
    rows = [row for run in runs for row in run.summary.get("parallelism") or () if isinstance(row, dict)]
    rows = [row for row in rows if _are_numbers(row, "predicted_seconds", "measured_seconds")]
    if not rows:
        return None
    labels = ["as planned" if row["conv"] == "planned" else f"conv {row['conv']}\nFC {row['fc']}" for row in rows]

    def plot(axes: Any) -> None:
        for number, (name, hatch) in enumerate((("predicted", ""), ("measured", "///"))):
            at = [index + (number - 0.5) * 0.4 for index in range(len(rows))]
            axes.barh(
                at,
                [row[f"{name}_seconds"] * 1e3 for row in rows],
                0.4,
                color=_COLOURS[number % len(_COLOURS)],
                hatch=hatch,
                label=name,
            )
        axes.set_yticks(range(len(rows)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("ms per step")
        axes.figure.legend(loc="outside lower center", ncols=2, fontsize=8)

    words = "; ".join(
        f"{label.replace(chr(10), ', ')}: predicted {row['predicted_seconds'] * 1e3:.0f} ms, "
        f"measured {row['measured_seconds'] * 1e3:.0f} ms"
        for label, row in zip(labels, rows, strict=True)
    )
    return _picture(
        "Ways to divide the layers, predicted and measured", f"{words}.", plot, height=1.0 + 0.5 * len(rows)
    )


def _are_numbers(row: dict[str, Any], *names: str) -> bool:
    return all(isinstance(row.get(name), (int, float)) for name in names)


def is_share(key: str) -> bool:
    """Whether a metric is shown in per cent."""
    return key.endswith("accuracy")
