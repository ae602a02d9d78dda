"""Whether more devices pay: the same model on other numbers of replicas, and what a user could change, in sentences."""

import dataclasses
from collections.abc import Sequence

from toolkit.parallel.plan.choose import Plan, choose
from toolkit.parallel.plan.count import LayerCost
from toolkit.parallel.plan.step_cost import Link, Machine, Setting

# A scaling chart's ways to divide a model: arguments conv and fc of `choose`.
KINDS = {"data": "replicated", "model": "sharded", "planned": "planned"}


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


def scaling(layers: Sequence[LayerCost], machine: Machine, setting: Setting, counts: Sequence[int]) -> list[Point]:
    """Simulates numbers of replicas, each with the same batch, and with as many on a host as given.

    Args:
        layers: As `costs` returns them.
        machine: The devices, and the network between them; its hosts are those of the setting's replicas.
        setting: What is trained, and how; its replicas say how many there are to a host. Where its shards don't divide
            a number of replicas, all of these are one group.
        counts: Numbers of replicas to simulate.
    """
    local = -(-setting.replicas // machine.hosts)

    def plans(count: int) -> dict[str, Plan]:
        there = dataclasses.replace(machine, hosts=-(-count // local))
        shards = setting.shards if setting.shards and count % setting.shards == 0 else None
        many = dataclasses.replace(
            setting, replicas=count, shards=shards, global_batch=setting.per_replica_batch * count
        )
        return {kind: choose(layers, there, many, conv=way, fc=way) for kind, way in KINDS.items()}

    one = plans(1)["data"].step.seconds
    points = []
    for count in counts:
        found = plans(count)
        faster = {kind: count * one / plan.step.seconds if plan.step.seconds else 1.0 for kind, plan in found.items()}
        points.append(Point(count, -(-count // local), found, faster))
    return points


def powers(most: int) -> list[int]:
    """Returns 1, 2, 4 ... up to a number, and the number itself."""
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


_NETWORKS = (1, 10, 25, 100, 200, 400)  # Usual network speeds in Gbit/s.
_WORTH = 1.1  # A smaller gain isn't worth a change.


def verdict(plan: Plan, layers: Sequence[LayerCost], *, bandwidth: str | None) -> list[str]:
    """Returns recommendations as sentences. The first says whether to use all replicas.

    Args:
        plan: The chosen one, which has a total.
        layers: As `costs` returns them.
        bandwidth: Between hosts, as the user has given it; None where there is one host.
    """
    machine, setting = plan.machine, plan.setting
    if setting.replicas == 1:
        return []
    whole = _speed_up(layers, machine, setting)
    local = -(-setting.replicas // machine.hosts)
    stay = 1.0
    if machine.hosts > 1:
        alone = dataclasses.replace(machine, hosts=1, between=None)
        inside = dataclasses.replace(
            setting, replicas=local, shards=None, global_batch=setting.per_replica_batch * local
        )
        stay = _speed_up(layers, alone, inside) if local > 1 else 1.0
        devices = f"{local} devices" if local > 1 else "one device"
        over = f"{whole:.2f}x with {setting.replicas} devices on {machine.hosts} hosts"
        if max(whole, stay) < _WORTH:
            there = f"{stay:.2f}x with {devices} on one host" if local > 1 else "1.00x with one device"
            sentences = [f"Train on one device: it is the fastest at {bandwidth}. Predicted: {over}, {there}."]
            stay = 1.0
        elif whole < _WORTH * stay:
            sentences = [f"At {bandwidth} stay on one host: {stay:.2f}x with {devices} there, {over}."]
            sentences += [f"The plan for one host: --replicas={local} --hosts=1."] if local > 1 else []
        else:
            sentences = [
                f"At {bandwidth}, {machine.hosts} hosts are worth it: {over}, {stay:.2f}x with {devices} on one host."
            ]
    elif whole < _WORTH:
        sentences = [f"Train on one device: {setting.replicas} of them come to {whole:.2f}x its speed."]
    else:
        sentences = [f"{setting.replicas} devices come to {whole:.2f}x the speed of one."]
    sentences += _changes(layers, machine, setting, whole, stay)
    if whole >= _WORTH and any(choice.split is not None for choice in plan.choices.values()):
        sentences.append("Apply the plan with toolkit.parallel.parallelize(model, plan); a recipe does so by itself.")
    return sentences


def _changes(layers: Sequence[LayerCost], machine: Machine, setting: Setting, whole: float, stay: float) -> list[str]:
    sentences = []
    halved = dataclasses.replace(setting, gradient_dtype="bfloat16", activation_dtype="bfloat16")
    half = _speed_up(layers, machine, halved)
    if half >= _WORTH * whole and half >= stay:
        sentences.append(
            f"Exchanging in 16 bits: {half:.2f}x, with --gradient_dtype=bfloat16 --activation_dtype=bfloat16, or "
            'create(gradients=GradientExchange(dtype="bfloat16")). Losses then agree to 1e-2.'
        )
    compressed = _speed_up(layers, machine, dataclasses.replace(setting, gradient_rank=4))
    if (
        machine.hosts > 1
        and setting.gradient_rank is None
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
            faster = dataclasses.replace(machine, between=between)
            found = _speed_up(layers, faster, setting)
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


def _speed_up(layers: Sequence[LayerCost], machine: Machine, setting: Setting) -> float:
    (point,) = scaling(layers, machine, setting, [setting.replicas])
    return point.speed_up["planned"]
