"""Whether more devices pay: the same model on other numbers of replicas, and what a user could change, in sentences."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from toolkit.parallel.plan.choose import Plan, choose, choose_within, size_in_words
from toolkit.parallel.plan.count import LayerCost
from toolkit.parallel.plan.step_cost import Link, Machine, Setting, gathered_of

# A scaling chart's ways to divide a model: arguments conv and fc of `choose`; and the fastest that fits.
KINDS = {"data": "replicated", "model": "sharded"}
PLANNED = "planned"


@dataclasses.dataclass(frozen=True)
class Point:
    """The same model on one number of replicas.

    Attributes:
        replicas: The number of replicas.
        hosts: The number of hosts that they are on.
        plans: By kind: "data" (all replicated), "model" (all sharded that can be), "planned".
        speed_up: By kind: examples a second, divided by one replica's.
    """

    replicas: int
    hosts: int
    plans: dict[str, Plan]
    speed_up: dict[str, float]


def scaling(
    layers: Sequence[LayerCost],
    machine: Machine,
    asked: Setting,
    counts: Sequence[int],
    *,
    memory: float = math.inf,
    plan: Plan | None = None,
) -> list[Point]:
    """Simulates numbers of replicas, each with the same batch, and with as many on a host as given.

    Args:
        layers: As `costs` returns them.
        machine: The devices, and the network between them; its hosts are those of the setting's replicas.
        asked: What is trained, and how, before a plan has chosen what saves memory; its replicas say how many there
            are to a host. Where its shards don't divide a number of replicas, all of these are one group.
        counts: Numbers of replicas to simulate.
        memory: Bytes of each replica, for what is planned.
        plan: What was chosen for the setting's own number of replicas; None to choose it here.
    """
    local = -(-asked.replicas // machine.hosts)

    def plans(count: int) -> dict[str, Plan]:
        there, many = _for_replicas(machine, count, hosts=-(-count // local)), _with_replicas(asked, count)
        chosen = plan if plan is not None and count == plan.setting.replicas else None
        chosen = chosen or choose_within(layers, there, many, memory=memory)
        return {**{kind: choose(layers, there, many, conv=way, fc=way) for kind, way in KINDS.items()}, PLANNED: chosen}

    one = plans(1)["data"].step.seconds
    points = []
    for count in counts:
        found = plans(count)
        faster = {kind: count * one / plan.step.seconds if plan.step.seconds else 1.0 for kind, plan in found.items()}
        points.append(Point(count, -(-count // local), found, faster))
    return points


def _for_replicas(machine: Machine, count: int, *, hosts: int) -> Machine:
    """Returns the machine with so many replicas: devices that share cores compute faster if there are fewer."""
    there = dataclasses.replace(machine, hosts=hosts, between=machine.between if hosts > 1 else None)
    if machine.sharing == 1:
        return there
    slower = -(-count // hosts) / machine.sharing
    seconds = {name: each * slower for name, each in machine.seconds.items()}
    return dataclasses.replace(there, speed=machine.speed / slower, memory=machine.memory / slower, seconds=seconds)


def _with_replicas(asked: Setting, count: int) -> Setting:
    shards = asked.shards if asked.shards and count % asked.shards == 0 else None
    return dataclasses.replace(asked, replicas=count, shards=shards, global_batch=asked.per_replica_batch * count)


def powers(most: int) -> list[int]:
    """Returns 1, 2, 4 ... up to a number, and the number itself."""
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


_NETWORKS = (1, 10, 25, 100, 200, 400)  # Usual network speeds in Gbit/s.
_HOPELESS = 0.75  # Of a step's time: then no overlap makes a step shorter than three times its arithmetic.
_WORTH = 1.1  # A smaller gain isn't worth a change.


def verdict(plan: Plan, asked: Setting, *, bandwidth: str | None, memory: float = math.inf) -> list[str]:
    """Returns recommendations as sentences. The first says whether to use all replicas.

    Each figure of the plan is that of `plan`, and whatever else is recommended fits into a replica's memory.

    Args:
        plan: The chosen one, which has a total.
        asked: The setting from which it was chosen.
        bandwidth: Between hosts, as the user has given it; None where there is one host.
        memory: Bytes of each replica.
    """
    machine, layers = plan.machine, plan.layers
    if asked.replicas == 1 or plan.step.memory > memory:
        return []

    def speed_up(machine: Machine, asked: Setting, replicas: int, plan: Plan | None = None) -> float:
        """Returns the speed-up of what is planned; 0 if it doesn't fit."""
        (point,) = scaling(layers, machine, asked, [replicas], memory=memory, plan=plan)
        return point.speed_up[PLANNED] if point.plans[PLANNED].step.memory <= memory else 0.0

    whole = speed_up(machine, asked, asked.replicas, plan)
    local = -(-asked.replicas // machine.hosts)
    alone = scaling(layers, machine, asked, [1])[0].plans["data"].step.memory
    stay = speed_up(machine, asked, 1)  # On fewer devices; 0 if none of that fits.
    too_large = "" if alone <= memory else f" One device would need {size_in_words(alone)}."
    if machine.hosts > 1:
        stay = speed_up(machine, asked, local) if local > 1 else stay
        devices = f"{local} devices" if local > 1 else "one device"
        over = f"{whole:.2f}x with {asked.replicas} devices on {machine.hosts} hosts"
        there = f"{stay:.2f}x with {devices}" if stay else f"with {devices} it doesn't fit"
        if max(whole, stay) < _WORTH and alone <= memory:
            beside = f"{there} on one host" if local > 1 else there
            sentences = [f"Train on one device: it is the fastest at {bandwidth}. Predicted: {over}, {beside}."]
            stay = 1.0
        elif whole < _WORTH * stay:
            sentences = [f"At {bandwidth} stay on one host: {there} there, {over}."]
            sentences += [f"The plan for one host: --replicas={local} --hosts=1."] if local > 1 else []
        elif whole < _WORTH:
            sentences = [f"{over[0].upper()}{over[1:]} at {bandwidth}: not faster than one, but on one host {there}."]
        else:
            sentences = [f"At {bandwidth}, {machine.hosts} hosts are worth it: {over}, {there} on one host."]
    elif whole < _WORTH and alone <= memory:
        sentences = [f"Train on one device: {asked.replicas} of them come to {whole:.2f}x its speed."]
    else:
        sentences = [f"{asked.replicas} devices come to {whole:.2f}x the speed of one.{too_large}"]
    sentences += _of_weights(plan)
    if machine.sharing > 1:
        sentences.append(f"These devices share the cores of one machine, on which {machine.sharing} were measured.")
    sentences += _changes(machine, asked, whole, stay, speed_up)
    recommended = "Train on one" not in sentences[0] and "stay on one" not in sentences[0]
    if recommended and any(choice.split is not None for choice in plan.choices.values()):
        sentences.append("Apply the plan with toolkit.parallel.parallelize(model, plan); a recipe does so by itself.")
    return sentences


def _of_weights(plan: Plan) -> list[str]:
    """Returns what weights in shards cost on this network, where replicas keep them so."""
    step = plan.step
    if plan.setting.weights != "sharded" or not step.exchanging:
        return []
    if not any(gathered_of(layer, plan.choices[layer.name], plan.setting) for layer in plan.layers):
        return ["Weights in shards change nothing: this plan shards the layers whose weights are large."]
    share = step.exchanging / step.seconds
    received = f"Weights in shards: a replica receives {size_in_words(step.received)} in a step"
    if share < _HOPELESS:
        return [f"{received}; exchanges take {share:.0%} of it."]
    return [
        f"{received}, and exchanges take {share:.0%} of it: on this network that is hopeless. Keep the replicas of a "
        "host one group, with --shards, or shard the optimizer's state alone, with --shard_optimizer."
    ]


def _changes(
    machine: Machine, asked: Setting, whole: float, stay: float, speed_up: Callable[[Machine, Setting, int], float]
) -> list[str]:
    sentences = []
    halved = dataclasses.replace(asked, gradient_dtype="bfloat16", activation_dtype="bfloat16")
    half = speed_up(machine, halved, asked.replicas)
    if half >= _WORTH * whole and half >= stay:
        sentences.append(
            f"Exchanging in 16 bits: {half:.2f}x, with --gradient_dtype=bfloat16 --activation_dtype=bfloat16, or "
            'create(gradients=GradientExchange(dtype="bfloat16")). Losses then agree to 1e-2.'
        )
    compressed = speed_up(machine, dataclasses.replace(asked, gradient_rank=4), asked.replicas)
    if (
        machine.hosts > 1
        and asked.gradient_rank is None
        and compressed >= _WORTH * max(whole, half)
        and compressed >= stay
    ):
        sentences.append(
            f"Sending PowerSGD's factors in the place of gradients: {compressed:.2f}x, with --gradient_rank=4, or "
            'create(gradients=GradientExchange(compression="powersgd", rank=4)). It trains with other numbers than one '
            "device's."
        )
    if machine.hosts > 1 and whole < _WORTH * stay:
        for gigabits in _NETWORKS:
            between = Link(bandwidth=gigabits * 1e9 / 8, latency=(machine.between or machine.inside).latency)
            found = speed_up(dataclasses.replace(machine, between=between), asked, asked.replicas)
            if machine.between and between.bandwidth > machine.between.bandwidth and found >= _WORTH * stay:
                sentences.append(
                    f"From {gigabits} Gbit/s between them on, {machine.hosts} hosts are faster: {found:.2f}x."
                )
                break
        else:
            sentences.append(
                "Even 400 Gbit/s doesn't make more hosts faster with this batch. Try a larger --global_batch_size."
            )
    return sentences
