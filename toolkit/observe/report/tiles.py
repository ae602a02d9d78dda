"""The first screen of the page: one run's outcome, metrics, speed and step, or a comparison of several runs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from toolkit.observe.report.figures import in_words, value_of
from toolkit.observe.report.reading import RunData
from toolkit.observe.report.timeline import Span, spans_of
from toolkit.support.words import counted

__all__ = ["Tile", "tiles"]

_MOST = 3  # The most failures that are named.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
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
    more = [", ".join([*failed[:_MOST], *(["..."] if failed[_MOST:] else [])])] if failed else []
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
    return Tile(name="examples per second", value=speed, more=_replicas_in_words(run)) if speed else None


def _model(run: RunData) -> Tile | None:
    parameters = in_words("parameters", run.summary.get("parameters"))
    return (
        Tile(name="parameters", value=parameters, more=str(run.summary.get("hardware") or "")) if parameters else None
    )


def _step(run: RunData) -> Tile | None:
    step = run.summary.get("step")
    if not isinstance(step, dict) or not step.get("milliseconds"):
        return None
    whole = step["milliseconds"]
    shares = {part: round(100 * step.get(part, 0) / whole) for part in ("compute", "communication", "input")}
    between = "between steps (callbacks, starting a step)"
    shares[between] = round(100 * min(step.get("between", 0), step.get("other", 0)) / whole)
    shares["other"] = max(0, 100 - sum(shares.values()))
    shares = {part: share for part, share in shares.items() if share or part != between}
    more = ", ".join(f"{share}% {part}" for part, share in shares.items())
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
    return f"{counted(replicas, 'replica')}, {run.summary.get('strategy')}{sharded}"


def _speed(run: RunData) -> Any:
    speed = run.summary.get("examples_per_second")
    return speed if isinstance(speed, (int, float)) and speed > 0 else 0


def _replicas(run: RunData) -> int:
    replicas = run.summary.get("replicas")
    return replicas if isinstance(replicas, int) and replicas > 0 else 1


def _emulated(run: RunData) -> bool:
    return bool(run.summary.get("emulated"))
