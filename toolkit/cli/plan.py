"""Which layers of a model to replicate and which to shard over replicas, with predicted times, bytes and memory.

    toolkit plan alexnet --replicas=4 --device=V100
    toolkit plan train:build_model --replicas=8 --hosts=2 --bandwidth=10Gbit --chart=plan.png
    toolkit plan model.keras --replicas=2 --measure
    toolkit plan keras.applications:MobileNetV2 --replicas=2 --device=A100

MODEL is {models} (each for pictures of 32 x 32), a function that returns a model
(module:function, or file.py:function), or a .keras file, which is opened in safe mode. Functions that take `weights`
are called with weights=None, so that nothing is downloaded. Nothing is trained.
"""

import argparse
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from toolkit.cli.parser import check_least
from toolkit.errors import RequestError
from toolkit.models import NAMES
from toolkit.parallel.plan.machine import DEVICES
from toolkit.strategies.options import DTYPES

if TYPE_CHECKING:
    from toolkit.parallel import Machine, Plan, Setting

__all__ = ["add_arguments", "run"]

__doc__ = __doc__.replace("{models}", ", ".join(NAMES))

IMPORTS_TENSORFLOW = True
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


def run(arguments: argparse.Namespace) -> None:
    """Plans, and prints the plan."""
    _check(arguments)
    from toolkit.parallel import Link, Machine
    from toolkit.parallel.plan.machine import LEAST_STEP, bandwidth, device

    inside, between = (
        Link(bandwidth=bandwidth(text), latency=arguments.latency / 1e6) if text else None
        for text in (arguments.inside or _INSIDE, arguments.bandwidth)
    )
    limit = bandwidth(arguments.memory, what="memory") if arguments.memory else math.inf
    name, speed, memory = device(arguments.device) if arguments.device else ("", 0.0, 0.0)
    strategy = _strategy(arguments) if arguments.measure else None

    from toolkit import models
    from toolkit.cli.plan_scaling import powers, scaling
    from toolkit.parallel import Setting, choose_within, costs, slots_of
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
    )
    if strategy is None:
        machine = Machine(name=name, speed=speed, memory=memory, inside=inside, fixed=LEAST_STEP)
    else:
        keep = arguments.inside is not None
        machine = _measured(model, strategy, setting, inside=inside, keep_inside=keep, length=arguments.length)
    machine = dataclasses.replace(machine, between=between, hosts=arguments.hosts)
    plan = choose_within(layers, machine, setting, memory=limit)
    points = scaling(layers, machine, plan.setting, powers(arguments.most or arguments.replicas))
    if arguments.chart:
        from toolkit.cli.plan_table import draw

        draw(
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
        return
    _print(model.name, plan, layers, points, limit, arguments)


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
    from toolkit import devices, strategies
    from toolkit.devices.inventory import take

    there = take()
    local = -(-arguments.replicas // arguments.hosts)
    setup = devices.configure(gpus=max(1, min(local, len(there.gpus) or there.cores)))
    return strategies.create(devices=setup.logical_devices)


def _measured(
    model: Any, strategy: Any, setting: "Setting", *, inside: Any, keep_inside: bool, length: int | None
) -> "Machine":
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


def _print(name: str, plan: "Plan", layers: Any, points: Any, limit: float, arguments: argparse.Namespace) -> None:
    import rich

    from toolkit.cli.plan_table import show_exchange, show_memory, show_plan, show_scaling
    from toolkit.cli.plan_verdict import verdict

    console = rich.get_console()
    machine, setting = plan.machine, plan.setting
    hosts = f" on {machine.hosts} hosts at {arguments.bandwidth}" if machine.hosts > 1 else ""
    replicas = f"{setting.replicas:,} replica{'s' * (setting.replicas > 1)}"
    console.print(
        f"{name} on {replicas}{hosts}, {setting.per_replica_batch:g} examples each; {machine.name}.",
        highlight=False,
        markup=False,
    )
    show_plan(plan)
    show_memory(plan, limit)
    if not plan.unknown:
        show_exchange(plan)
    if not plan.unknown:
        show_scaling(points, setting)
        for sentence in verdict(plan, layers, bandwidth=arguments.bandwidth):
            console.print(sentence, style="bold", highlight=False, markup=False, soft_wrap=not console.is_terminal)
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
