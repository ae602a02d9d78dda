"""Which layers of a model to replicate and which to shard over replicas, with predicted times, bytes and memory.

    toolkit plan alexnet --replicas=4 --device=V100
    toolkit plan train:build_model --replicas=8 --device=A100 --hosts=2 --bandwidth=10Gbit --chart=plan.png
    toolkit plan model.keras --replicas=2 --measure
    toolkit plan keras.applications:MobileNetV2 --replicas=2 --device=A100

MODEL is {models} (each for pictures of 32 x 32), a function that returns a model
(module:function, or file.py:function), or a .keras file, which is opened in safe mode. Functions that take `weights`
are called with weights=None, so that nothing is downloaded. Nothing is trained, but for what a module does outside of
its functions, since it is imported. The devices' speed comes from --device or --measure.

Exit codes: 0; 2 if no plan fits into --memory.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import rich

from toolkit import devices, models, strategies
from toolkit.cli.console import check_chart, echo, save, table
from toolkit.cli.parser import check_least
from toolkit.cli.plan_scaling import Point, powers, scaling, verdict
from toolkit.cli.program import quieten
from toolkit.devices.inventory import take
from toolkit.errors import RequestError
from toolkit.models import NAMES
from toolkit.parallel import Link, Machine, Plan, Setting, choose_within, costs, slots_of
from toolkit.parallel.plan.choose import milliseconds, size_in_words
from toolkit.parallel.plan.step_cost import DEVICES, LEAST_STEP, bandwidth, device, memory_of
from toolkit.strategies.options import BATCH_STATISTICS, DTYPES
from toolkit.strategies.upstream.attributes import layers_within

__doc__ = __doc__.replace("{models}", ", ".join(NAMES))

_INSIDE = "12GB"  # PCIe 3.0 with 16 lanes, minus its overhead.
_LATENCY = 50.0  # Microseconds for a small message by TCP inside a data centre.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defines the command line."""
    parser.add_argument("model", metavar="MODEL", help="name, module:function or .keras file")
    where = parser.add_argument_group("where it will train")
    where.add_argument("--replicas", type=int, default=2, metavar="N", help="replicas in all [2]")
    where.add_argument("--hosts", type=int, default=1, metavar="H", help="hosts that they are on [1]")
    where.add_argument(
        "--bandwidth",
        metavar="RATE",
        help="network bandwidth between hosts in each direction, such as 1Gbit; needed with --hosts",
    )
    where.add_argument(
        "--inside", default=None, metavar="RATE", help=f"bytes a second between replicas of one host [{_INSIDE}]"
    )
    where.add_argument(
        "--latency",
        type=float,
        default=_LATENCY,
        metavar="US",
        help=f"latency of one message, in microseconds [{_LATENCY:g}]",
    )
    speed = parser.add_argument_group("how fast a device is")
    speed.add_argument(
        "--device",
        metavar="NAME|GFLOPS",
        help="the GFLOPS that a device reaches, or one of "
        + ", ".join(DEVICES)
        + " (half of the maker's float32 figure without tensor cores)",
    )
    speed.add_argument(
        "--measure", action="store_true", help="measure devices, and the network between them, on this machine"
    )
    what = parser.add_argument_group("training settings")
    what.add_argument("--length", type=int, metavar="L", help="length of sequences, for models that accept any length")
    what.add_argument(
        "--global_batch_size", type=int, metavar="B", help="examples per step, over all replicas [64 for each]"
    )
    what.add_argument(
        "--gradient_dtype", choices=DTYPES, default="float32", help="communication dtype of gradients [float32]"
    )
    what.add_argument(
        "--gradient_rank", type=int, metavar="R", help="predict for PowerSGD with this rank [whole gradients]"
    )
    what.add_argument(
        "--activation_dtype", choices=DTYPES, default="float32", help="communication dtype of activations [float32]"
    )
    what.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of each replica, such as 8GB; the plan is the fastest that fits into it",
    )
    what.add_argument(
        "--shards",
        type=int,
        metavar="N",
        help="replicas that together hold one copy of the sharded layers [the fastest]",
    )
    what.add_argument(
        "--shard_optimizer", action="store_true", help="split the optimizer's state (its slots) over replicas"
    )
    what.add_argument(
        "--shard_weights", action="store_true", help="keep weights, gradients and slots in shards (FSDP, ZeRO 3)"
    )
    what.add_argument(
        "--batch_statistics",
        choices=BATCH_STATISTICS,
        default="batch",
        help="what BatchNormalization normalises: the whole batch, or each replica its own share [batch]",
    )
    what.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help="what the optimizer keeps for each weight: momentum 1, Adam 2 [as the model is compiled, or 1]",
    )
    shown = parser.add_argument_group("what is shown")
    shown.add_argument(
        "--most", type=int, metavar="N", help="also predict for up to N replicas [the value of --replicas]"
    )
    shown.add_argument("--save", metavar="FILE", help="write the plan as JSON, for toolkit.parallel.Plan.load")
    shown.add_argument("--chart", metavar="FILE", help="draw time and speed-up against replicas: .png or .svg")
    shown.add_argument("--json", action="store_true", help="print the plan as JSON instead")


def run(arguments: argparse.Namespace) -> int:
    """Plans, and prints the plan. Returns the exit code: 2 if it doesn't fit into the memory."""
    if sys.stderr is sys.__stderr__:
        quieten()
    _check(arguments)
    inside, between = (
        Link(bandwidth=bandwidth(text), latency=arguments.latency / 1e6) if text else None
        for text in (arguments.inside or _INSIDE, arguments.bandwidth)
    )
    limit = bandwidth(arguments.memory, what="memory") if arguments.memory else math.inf
    name, speed, memory = device(arguments.device) if arguments.device else ("", 0.0, 0.0)
    strategy = _strategy(arguments) if arguments.measure else None

    from toolkit.training import Run

    model = models.open_model(arguments.model, stop_at=[(Run, "__init__")])
    _check_length(model, arguments.length)
    layers = costs(model, length=arguments.length)
    setting = Setting(
        replicas=arguments.replicas,
        global_batch=arguments.global_batch_size or 64 * arguments.replicas,
        gradient_dtype=arguments.gradient_dtype,
        gradient_rank=arguments.gradient_rank,
        activation_dtype=arguments.activation_dtype,
        slots=slots_of(model) if arguments.slots is None else arguments.slots,
        shards=arguments.shards,
        optimizer_state="sharded" if arguments.shard_optimizer else "replicated",
        weights="sharded" if arguments.shard_weights else "replicated",
        batch_statistics=arguments.batch_statistics,
    )
    if strategy is None:
        machine = Machine(name=name, speed=speed, memory=memory, inside=inside, fixed=LEAST_STEP)
    else:
        keep = arguments.inside is not None
        machine = _measured(model, strategy, setting, inside=inside, keep_inside=keep, length=arguments.length)
    machine = dataclasses.replace(machine, between=between, hosts=arguments.hosts)
    plan = choose_within(layers, machine, setting, memory=limit)
    counts = powers(arguments.most or arguments.replicas)
    points = scaling(layers, machine, setting, counts, memory=limit, plan=plan)
    if arguments.chart:
        _draw(
            points,
            arguments.chart,
            title=f"{model.name}, {setting.per_replica_batch:g} examples a replica, {machine.name}",
        )
    if arguments.save:
        plan.save(arguments.save)
    if arguments.json:
        scaled = [
            {
                "replicas": point.replicas,
                "hosts": point.hosts,
                "milliseconds": {kind: found.step.seconds * 1e3 for kind, found in point.plans.items()},
                "speed_up": point.speed_up,
            }
            for point in points
        ]
        print(json.dumps({"model": model.name, **plan.as_dict(), "scaling": scaled}, indent=2))
    else:
        _print(model.name, plan, setting, points, limit, arguments, _note_on_dtype(model, arguments))
    return 2 if plan.step.memory > limit else 0


def _note_on_dtype(model: Any, arguments: argparse.Namespace) -> str:
    """Returns a sentence where a model computes in 16 bits, and the plan has the device's speed in float32."""
    halves = sorted({each.compute_dtype for each in layers_within(model)} & {"bfloat16", "float16"})
    if not halves or arguments.measure or arguments.device.lower() not in map(str.lower, DEVICES):
        return ""
    return (
        f"Layers of it compute in {' and '.join(halves)}, and are counted at this device's speed in float32. Its "
        "tensor cores may be several times as fast: give their speed, such as --device=100TFLOPS, or --measure."
    )


def _check_length(model: Any, length: int | None) -> None:
    shapes = [tuple(tensor.shape) for tensor in getattr(model, "inputs", None) or []]
    open_ones = [shape for shape in shapes if None in shape[1:]]
    if open_ones and length is None:
        raise RequestError(
            asked=f"a plan of {model.name}",
            found=f"it takes inputs of any length, {open_ones[0]}, and its arithmetic depends on their length",
            remedy="Give their length, such as --length=128",
        )


def _check(arguments: argparse.Namespace) -> None:
    ones = dict.fromkeys(("replicas", "hosts", "shards", "gradient_rank", "most", "global_batch_size", "length"), 1)
    check_least(arguments, **ones, slots=0)
    if arguments.hosts > arguments.replicas:
        raise RequestError(
            asked=f"--hosts={arguments.hosts}",
            found=f"there are {arguments.replicas} replicas",
            remedy="Give at most as many hosts as replicas",
        )
    if arguments.latency < 0:
        raise RequestError(
            asked=f"--latency={arguments.latency:g}",
            found="a message takes at least 0 microseconds",
            remedy="Give such a number, or leave --latency out",
        )
    if arguments.hosts > 1 and not arguments.bandwidth:
        raise RequestError(
            asked=f"--hosts={arguments.hosts}",
            found="nothing gives the speed of the network between them",
            remedy="Give the network's speed, such as --bandwidth=1Gbit",
        )
    if bool(arguments.device) == arguments.measure:
        raise RequestError(
            asked="a plan needs the speed of the devices",
            found="both --device and --measure are given" if arguments.device else "nothing says how fast they are",
            remedy="Give --device=V100, --device=500 (GFLOPS), or --measure for those of this machine",
        )


def _strategy(arguments: argparse.Namespace) -> Any:
    """The number of replicas: as asked for, or one for each device here."""
    there = take()
    local = -(-arguments.replicas // arguments.hosts)
    setup = devices.configure(gpus=max(1, min(local, len(there.gpus) or there.cores)))
    return strategies.create(devices=setup.logical_devices)


def _measured(
    model: Any, strategy: Any, setting: Setting, *, inside: Any, keep_inside: bool, length: int | None
) -> Machine:
    """Returns the measured devices here, with the link between them unless it was given or there is one device."""
    from toolkit.parallel import measure

    machine = measure(
        model,
        strategy,
        global_batch=max(1, round(setting.per_replica_batch)) * strategy.num_replicas_in_sync,
        slots=setting.slots,
        length=length,
    )
    count = strategy.num_replicas_in_sync
    return dataclasses.replace(
        machine,
        name=f"{count} device{'s' * (count > 1)} of this machine, measured",
        inside=inside if keep_inside or count == 1 else machine.inside,
    )


def _print(
    name: str, plan: Plan, asked: Setting, points: Any, limit: float, arguments: argparse.Namespace, note: str
) -> None:
    console = rich.get_console()
    machine, setting = plan.machine, plan.setting
    hosts = f" on {machine.hosts} hosts at {arguments.bandwidth}" if machine.hosts > 1 else ""
    replicas = f"{setting.replicas:,} replica{'s' * (setting.replicas > 1)}"
    console.print(
        f"{name} on {replicas}{hosts}, {setting.per_replica_batch:g} examples each; {machine.name}.",
        highlight=False,
        markup=False,
    )
    if note:
        echo(note, style="yellow")
    _show_plan(plan)
    _show_memory(plan, limit)
    if not plan.unknown:
        if plan.step.exchanging:
            echo(
                f"\nA replica receives {size_in_words(plan.step.received)} in a step. That takes "
                f"{milliseconds(plan.step.exchanging)} ms, or less where it overlaps with the backward pass."
            )
        _show_scaling(points, setting, limit)
        for sentence in verdict(plan, asked, bandwidth=arguments.bandwidth, memory=limit):
            echo(sentence, style="bold")
    else:
        console.print(
            f"The plan can't count what {len(plan.unknown)} of the layers compute, so it has no total: "
            + ", ".join(plan.unknown)
            + ". Use --measure to time them on this machine.",
            style="yellow",
            highlight=False,
            markup=False,
        )
    if arguments.chart:
        console.print(f"The chart is in {arguments.chart}", highlight=False, markup=False, soft_wrap=True)


_WORDS = {"data": "data parallel", "model": "model parallel", "planned": "as planned"}
# Colours that colour-blind people can tell apart.
_COLOURS = {"data": "#0072b2", "model": "#d55e00", "planned": "#009e73"}


def _show_plan(plan: Plan) -> None:
    """Prints a plan's layers with the choice for each and the reasons."""
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
        "How a sharded layer is split: by its outputs (units, filters), its inputs, its heads, or a table's rows or "
        "columns. Kept: its output stays split, because the next layer takes it so.",
        "Mop: million operations of a training step for one example; activ.: elements of the output for one example;",
        "received: bytes that a replica receives in a step.",
        *([f"Layers without weights, {rest} of them, are left out."] if rest else []),
    ]
    console.print(" ".join(words), style="dim", highlight=False)
    console.print()
    for layer in plan.layers:
        if layer.splits or layer.operations is None:
            echo(f"{layer.name}: {plan.choices[layer.name]}: {plan.reasons[layer.name]}.")


def _show_memory(plan: Plan, limit: float) -> None:
    """Prints a replica's memory and, if there is a limit, how the plan meets it or by how much it misses it."""
    console, setting, takes = rich.get_console(), plan.setting, plan.step.memory
    parts = memory_of(plan.layers, plan.choices, setting)
    console.print()
    echo(f"Memory of a replica: {size_in_words(takes)}: " + ", ".join(
        f"{name} {size_in_words(size)}" for name, size in parts.items()
    ) + ".")  # fmt: skip
    if plan.unknown:
        echo("That is without what these keep for their gradients: " + ", ".join(plan.unknown) + ".")
    chosen = []
    if 1 < setting.group < setting.replicas and any(choice.split for choice in plan.choices.values()):
        chosen.append(f"--shards={setting.group}")
    if setting.optimizer_state == "sharded":
        chosen.append("--shard_optimizer")
    if setting.weights == "sharded":
        chosen.append('--shard_weights, in a script create(weights="sharded")')
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
        echo(f"The plan is{ways or ' the same as without a limit'}.")


def _show_scaling(points: Sequence[Point], setting: Any, limit: float) -> None:
    """Prints time per step, speed-up, bytes and memory for each way to divide the model."""
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
                size_in_words(step.memory) + " !" * (step.memory > limit),
                style="bold" if kind == "planned" else None,
            )
        shown.add_section()
    console = rich.get_console()
    console.print(shown)
    if any(plan.step.memory > limit for point in points for plan in point.plans.values()):
        echo(f"!: more than {size_in_words(limit)}.")
    alone = points[0].plans["data"].step
    if alone.fixed > alone.seconds / 2:
        echo(
            f"Limited by overhead: one replica computes for {milliseconds(alone.seconds - alone.fixed)} ms, and to "
            f"start a step takes about {milliseconds(alone.fixed)} ms. Larger batches cost little more.\n"
        )


def _draw(points: Sequence[Point], path: str, *, title: str) -> None:
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


def _count(number: int) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)
