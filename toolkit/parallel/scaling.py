"""The same model on one replica and on many: time per step and speed-up, for each way to divide it."""

import dataclasses
from collections.abc import Sequence

from toolkit.parallel.cost import LayerCost
from toolkit.parallel.machine import Machine
from toolkit.parallel.plan import Plan, choose
from toolkit.parallel.timing import Setting

__all__ = ["KINDS", "Point", "powers", "scaling"]

KINDS = {"data": "replicated", "model": "sharded", "planned": "planned"}


@dataclasses.dataclass(frozen=True)
class Point:
    """One number of replicas.

    Attributes:
        replicas: How many.
        hosts: That they are on.
        plans: By kind: "data" (all replicated), "model" (all sharded that can be), "planned".
        speed_up: By kind: examples a second, over one replica's.
    """

    replicas: int
    hosts: int
    plans: dict[str, Plan]
    speed_up: dict[str, float]


def scaling(layers: Sequence[LayerCost], machine: Machine, setting: Setting, counts: Sequence[int]) -> list[Point]:
    """Simulates numbers of replicas, each with the same batch of its own, and as many to a host as in the setting.

    Args:
        layers: As `costs` returns them.
        machine: Where it runs; its hosts are for the setting's replicas.
        setting: What runs.
        counts: Numbers of replicas.
    """
    local = -(-setting.replicas // machine.hosts)

    def plans(count: int) -> dict[str, Plan]:
        there = dataclasses.replace(machine, hosts=-(-count // local))
        many = dataclasses.replace(setting, replicas=count)
        return {kind: choose(layers, there, many, conv=way, fc=way) for kind, way in KINDS.items()}

    one = plans(1)["data"].step.seconds
    points = []
    for count in counts:
        found = plans(count)
        faster = {kind: count * one / plan.step.seconds if plan.step.seconds else 1.0 for kind, plan in found.items()}
        points.append(Point(count, -(-count // local), found, faster))
    return points


def powers(most: int) -> list[int]:
    """Returns 1, 2, 4 ... up to a number, and that number."""
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]
