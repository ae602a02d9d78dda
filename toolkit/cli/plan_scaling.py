"""The same model on other numbers of replicas, each way to divide it."""

import dataclasses
from collections.abc import Sequence

from toolkit.parallel.plan.choose import Plan, choose
from toolkit.parallel.plan.count import LayerCost
from toolkit.parallel.plan.machine import Machine
from toolkit.parallel.plan.step_cost import Setting

__all__ = ["Point", "powers", "scaling"]

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
