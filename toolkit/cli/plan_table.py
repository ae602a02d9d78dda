"""Prints a plan as tables and draws it as a chart; also several plans with their measurements."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.cli.tables import check_chart, save, table

if TYPE_CHECKING:
    from toolkit.cli.plan_scaling import Point
    from toolkit.parallel import Plan
    from toolkit.parallel.plan.step_cost import Step

__all__ = ["Comparison", "draw", "show_comparisons", "show_exchange", "show_plan", "show_scaling"]

_WORDS = {"data": "data parallel", "model": "model parallel", "planned": "as planned"}
# Colours that colour-blind people can tell apart.
_COLOURS = {"data": "#0072b2", "model": "#d55e00", "planned": "#009e73"}


def show_plan(plan: "Plan") -> None:
    """Prints a plan's layers with the choice for each and the reasons."""
    import rich

    from toolkit.parallel.plan.choose import size_in_words

    console = rich.get_console()
    shown = table()
    shown.add_column("layer", overflow="fold", min_width=14)
    for heading in ("Mop", "weights", "activ.", "received", "memory"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("choice", no_wrap=True)
    rest = 0
    for layer, row in zip(plan.layers, plan.as_dict()["layers"], strict=True):
        if not layer.parameters and layer.operations is not None:
            rest += 1
            continue
        shown.add_row(
            layer.name,
            "?" if layer.operations is None else f"{layer.operations / 1e6:,.1f}",
            _count(layer.parameters),
            _count(layer.outputs),
            size_in_words(row["received"]),
            size_in_words(row["memory"]),
            str(plan.choices[layer.name]),
            style=None if plan.choices[layer.name].split is None else "bold green",
        )
    console.print(shown)
    weights, products = (sum(getattr(layer, what) for layer in plan.layers) for what in ("parameters", "multiply_adds"))
    state = sum(layer.state for layer in plan.layers)
    total = f"{weights:,} weights" + (f" and {state:,} that aren't trained" if state else "")
    console.print(f"In all {total}; {_count(products)} multiply-adds forward for one example.", highlight=False)
    words = [
        "Sharded layers are split by outputs (units, filters) or inputs, heads, or a table's rows or columns; "
        "kept: the next layer takes the shards.",
        "Mop: million operations of a training step for one example; activ.: elements of the output for one example;",
        "received: bytes that a replica receives in a step.",
        *([f"Layers without weights, {rest} of them, are left out."] if rest else []),
    ]
    console.print(" ".join(words), style="dim", highlight=False)
    console.print()
    for layer in plan.layers:
        if layer.splits or layer.operations is None:
            _line(console, f"{layer.name}: {plan.choices[layer.name]}: {plan.reasons[layer.name]}.")


def show_exchange(plan: "Plan") -> None:
    """Prints the communication of a step: bytes and time."""
    import rich

    from toolkit.parallel.plan.choose import milliseconds, size_in_words

    step = plan.step
    if step.exchanging:
        _line(
            rich.get_console(),
            f"\nA replica receives {size_in_words(step.received)} in a step. That takes "
            f"{milliseconds(step.exchanging)} ms, or less where it overlaps with the backward pass.",
        )


def show_memory(plan: "Plan", limit: float) -> None:
    """Prints a replica's memory and, if there is a limit, how the plan meets it or by how much it misses it."""
    import rich

    from toolkit.parallel.plan.choose import size_in_words
    from toolkit.parallel.plan.step_cost import memory_of

    console, setting, takes = rich.get_console(), plan.setting, plan.step.memory
    parts = memory_of(plan.layers, plan.choices, setting)
    console.print()
    _line(console, f"Memory of a replica: {size_in_words(takes)}: " + ", ".join(
        f"{name} {size_in_words(size)}" for name, size in parts.items()
    ) + ".")  # fmt: skip
    if plan.unknown:
        _line(console, "That is without what these keep for their gradients: " + ", ".join(plan.unknown) + ".")
    chosen = []
    if 1 < setting.group < setting.replicas and any(choice.split for choice in plan.choices.values()):
        chosen.append(f"--shards={setting.group}")
    if setting.optimizer_state == "sharded":
        chosen.append("--shard_optimizer")
    if setting.micro_steps > 1:
        each = setting.global_batch / setting.micro_steps
        chosen.append(f"gradient_accumulation_steps={setting.micro_steps} and batches of {each:g}")
    if plan.recomputed:
        chosen.append(f"activations of {len(plan.recomputed)} layers computed again (parallelize)")
    ways = f" with {', '.join(chosen)}" if chosen else ""
    if takes > limit:
        words = f"It doesn't fit into {size_in_words(limit)}: {size_in_words(takes - limit)} more are needed{ways}."
        console.print(words, style="yellow", highlight=False, markup=False)
    elif chosen or limit < math.inf:
        _line(console, f"The plan is{ways or ' the same as without a limit'}.")


def show_scaling(points: "Sequence[Point]", setting: Any) -> None:
    """Prints time per step, speed-up, bytes and memory for each way to divide the model."""
    import rich

    from toolkit.parallel.plan.choose import milliseconds, size_in_words

    shown = table()
    shown.add_column("replicas", justify="right")
    shown.add_column("")
    for heading in ("ms/step", "examples/s", "speed-up", "received", "memory"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for point in points:
        for kind, plan in point.plans.items():
            step = plan.step
            if point.replicas == 1 and kind != "data":
                continue
            shown.add_row(
                f"{point.replicas:,}" if kind == "data" else "",
                _WORDS[kind] if point.replicas > 1 else "alone",
                milliseconds(step.seconds),
                f"{point.replicas * setting.per_replica_batch / step.seconds:,.0f}" if step.seconds else "-",
                f"{point.speed_up[kind]:,.2f}",
                size_in_words(step.received),
                size_in_words(step.memory),
                style="bold" if kind == "planned" else None,
            )
        shown.add_section()
    console = rich.get_console()
    console.print(shown)
    alone = points[0].plans["data"].step
    if alone.fixed > alone.seconds / 2:
        _line(
            console,
            f"Limited by overhead: one replica computes for {milliseconds(alone.seconds - alone.fixed)} ms, and to "
            f"start a step takes about {milliseconds(alone.fixed)} ms. Larger batches cost little more.\n",
        )


def draw(points: "Sequence[Point]", path: str, *, title: str) -> None:
    """Draws time per step and speed-up against the number of replicas.

    Args:
        points: As `toolkit.cli.plan_scaling.scaling` makes them.
        path: A .png or .svg file.
        title: The chart's title.

    Raises:
        RequestError: It is neither, or can't be written.
    """
    check_chart(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    figure.suptitle(title)
    times, speeds = figure.subplots(1, 2)
    counts = [point.replicas for point in points]
    for kind, colour in _COLOURS.items():
        style = {"color": colour, "marker": "o", "markersize": 4, "label": _WORDS[kind]}
        times.plot(counts, [point.plans[kind].step.seconds * 1e3 for point in points], **style)
        speeds.plot(counts, [point.speed_up[kind] for point in points], **style)
    speeds.plot(counts, counts, color="grey", linewidth=1, linestyle=":", label="as many times as replicas")
    times.set_ylabel("ms per step")
    speeds.set_ylabel("speed-up over one replica")
    for axes in (times, speeds):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(counts, [f"{count:,}" for count in counts], rotation=45 if len(counts) > 8 else 0)
        axes.set_xlabel("replicas")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    save(figure, path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A way to divide the layers, with the predicted and the measured time of a step.

    Attributes:
        conv: How convolutions were divided: "replicated", "sharded" or "planned".
        fc: How FC layers were.
        predicted: The step of the plan.
        measured_seconds: Seconds of a step; None where none was measured.
        measured_bytes: Bytes that a replica received in a step; None where replicas share a process.
        loss: The last epoch's.
    """

    conv: str
    fc: str
    predicted: "Step"
    measured_seconds: float | None
    measured_bytes: float | None
    loss: float

    def as_dict(self) -> dict[str, Any]:
        """Returns the entry for `summary.json` under "parallelism"."""
        return {
            "conv": self.conv,
            "fc": self.fc,
            "predicted_seconds": self.predicted.seconds,
            "measured_seconds": self.measured_seconds,
            "predicted_bytes": self.predicted.received,
            "measured_bytes": self.measured_bytes,
            "parameters": self.predicted.parameters,
            "loss": self.loss,
        }


def show_comparisons(comparisons: Sequence[Comparison]) -> None:
    """Prints predictions and measurements of several ways to divide a model in one table."""
    import rich
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    shown.add_column("conv", no_wrap=True)
    shown.add_column("FC", no_wrap=True)
    headings = ("ms/step\npredict.", "\nmeasured", "MB recv.\npredict.", "\nmeasured", "weights\nmillion", "\nloss")
    for heading in headings:
        shown.add_column(heading, justify="right", no_wrap=True)
    for each in comparisons:
        shown.add_row(
            each.conv,
            each.fc,
            f"{each.predicted.seconds * 1e3:,.1f}",
            "-" if each.measured_seconds is None else f"{each.measured_seconds * 1e3:,.1f}",
            f"{each.predicted.received / 1e6:,.2f}",
            "-" if each.measured_bytes is None else f"{each.measured_bytes / 1e6:,.2f}",
            f"{each.predicted.parameters / 1e6:,.2f}",
            f"{each.loss:.4f}",
        )
    console = rich.get_console()
    console.print()
    console.print(shown)


def _count(number: int) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)


def _line(console: Any, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)
