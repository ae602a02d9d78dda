"""The choice for each layer, with its reasons."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from toolkit.errors import StrategyError
from toolkit.parallel.cost import LayerCost
from toolkit.parallel.machine import Machine
from toolkit.parallel.timing import Setting, Step, exchanged, layer_memory, layer_seconds, step
from toolkit.parallel.traffic import REPLICATED, Choice

__all__ = ["WAYS", "Plan", "choose", "megabytes"]

WAYS = ("planned", "replicated", "sharded")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The choice for each layer.

    Attributes:
        layers: Their costs, in order.
        choices: One for each, by name.
        reasons: A sentence for each, by name.
        machine: What it is for.
        setting: What it is for.
        step: The training step that it predicts.
    """

    layers: tuple[LayerCost, ...]
    choices: dict[str, Choice]
    reasons: dict[str, str]
    machine: Machine
    setting: Setting
    step: Step

    @property
    def unknown(self) -> tuple[str, ...]:
        """Layers whose operations count with nothing, because they aren't known."""
        return tuple(c.name for c in self.layers if c.operations is None and c.name not in self.machine.seconds)

    def as_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it: seconds, bytes, operations."""
        return {
            "machine": self.machine.name,
            "replicas": self.setting.replicas,
            "hosts": self.machine.hosts,
            "per_replica_batch": self.setting.batch,
            "step": {**dataclasses.asdict(self.step), "seconds": self.step.seconds},
            "unknown": list(self.unknown),
            "layers": [
                {
                    **dataclasses.asdict(layer),
                    "choice": str(self.choices[layer.name]),
                    "received": self.received(layer),
                    "memory": layer_memory(layer, self.choices[layer.name], self.setting),
                    "reason": self.reasons[layer.name],
                }
                for layer in self.layers
            ],
        }

    def received(self, layer: LayerCost) -> float:
        """Returns the bytes that a replica receives in a step for a layer."""
        return sum(e.received for e in exchanged(layer, self.choices[layer.name], self.setting))


def choose(
    layers: Sequence[LayerCost],
    machine: Machine,
    setting: Setting,
    *,
    conv: str = "planned",
    fc: str = "planned",
) -> Plan:
    """Chooses for each layer what makes the training step shortest.

    A sharded `Dense` that feeds another through elementwise layers only may leave its output split for that one.

    Args:
        layers: As `costs` returns them.
        machine: Where the model is to train.
        setting: On how many replicas, with which batch.
        conv: "planned", or "replicated" or "sharded" for all convolutions that can be.
        fc: The same for `Dense` layers.

    Raises:
        StrategyError: conv or fc is none that it can be.
    """
    for name, way in (("conv", conv), ("fc", fc)):
        if way not in WAYS:
            raise StrategyError(
                asked=f"{name}={way!r}",
                found="layers can't be divided so",
                remedy="Choose one of " + ", ".join(WAYS),
            )
    choices: dict[str, Choice] = {}
    for chain in _chains(layers):
        choices.update(_cheapest(chain, machine, setting, conv=conv, fc=fc))
    total = step(layers, choices, machine, setting)
    alone = {name: choice for name, choice in choices.items() if _way(name, layers, conv, fc) != "planned"}
    if alone != choices:
        # With gradients that travel behind other computing, replicas of all may yet be faster.
        other = {**dict.fromkeys(choices, REPLICATED), **alone}
        if (instead := step(layers, other, machine, setting)).seconds < total.seconds:
            choices, total = other, instead
    reasons = {layer.name: _reason(layer, choices[layer.name], machine, setting) for layer in layers}
    return Plan(layers=tuple(layers), choices=choices, reasons=reasons, machine=machine, setting=setting, step=total)


def _way(name: str, layers: Sequence[LayerCost], conv: str, fc: str) -> str:
    layer = next(layer for layer in layers if layer.name == name)
    return fc if layer.features else conv if layer.units else "replicated"


def _chains(layers: Sequence[LayerCost]) -> Iterator[list[LayerCost]]:
    """Yields lists of layers of which each can take the split output of the one before; most are alone."""
    after = {layer.takes_split_from: layer for layer in layers if layer.takes_split_from}
    for layer in layers:
        if layer.takes_split_from is None:
            chain = [layer]
            while chain[-1].name in after:
                chain.append(after[chain[-1].name])
            yield chain


def _cheapest(
    chain: Sequence[LayerCost], machine: Machine, setting: Setting, *, conv: str, fc: str
) -> dict[str, Choice]:
    # By whether the output so far is split: the seconds, and the choices that lead there.
    best: dict[bool, tuple[float, dict[str, Choice]]] = {False: (0.0, {})}
    for number, layer in enumerate(chain):
        way = fc if layer.features else conv
        found: dict[bool, tuple[float, dict[str, Choice]]] = {}
        for choice in _possible(layer, setting.replicas, way, last=number == len(chain) - 1):
            if choice.comes_split not in best:
                continue
            before, choices = best[choice.comes_split]
            seconds = before + layer_seconds(layer, choice, machine, setting)
            if choice.keep_split not in found or seconds < found[choice.keep_split][0]:
                found[choice.keep_split] = seconds, {**choices, layer.name: choice}
        best = found
    return best[False][1]


def _possible(layer: LayerCost, replicas: int, way: str, *, last: bool) -> list[Choice]:
    sharded = []
    if 1 < replicas <= layer.units:
        sharded.append(Choice(split="outputs"))
        if layer.features and layer.elementwise and not last:
            sharded.append(Choice(split="outputs", keep_split=True))
    if 1 < replicas <= layer.features:
        sharded.append(Choice(split="inputs"))
    if way == "replicated":
        return [REPLICATED]
    found = sharded if way == "sharded" and sharded else [REPLICATED, *sharded]
    # Where an output was left split the next layer has to take it so.
    return [*found, Choice(split="inputs", comes_split=True)] if layer.takes_split_from else found


def _reason(layer: LayerCost, choice: Choice, machine: Machine, setting: Setting) -> str:
    counted = layer.operations is not None or layer.name in machine.seconds
    unknown = "" if counted else f"{layer.note}: counted as no time; " if layer.note else ""
    gradients = sum(e.received for e in exchanged(layer, REPLICATED, setting))
    if choice.split is not None:
        mine = sum(e.received for e in exchanged(layer, choice, setting))
        return f"{unknown}{megabytes(mine)} of activations travel instead of {megabytes(gradients)} of gradients"
    if not layer.parameters:
        return unknown.rstrip("; ") or "nothing to exchange"
    if setting.replicas == 1:
        return f"{unknown}there is one replica"
    if not layer.units:
        return unknown.rstrip("; ") or layer.note
    possible = [c for c in _possible(layer, setting.replicas, "sharded", last=True) if not c.comes_split]
    if possible in ([REPLICATED], []):
        return f"{unknown}{setting.replicas:,} replicas outnumber its {layer.units:,} units"
    least = min(sum(e.received for e in exchanged(layer, other, setting)) for other in possible)
    words = f"{megabytes(gradients)} of gradients travel, sharded it would be {megabytes(least)} of activations"
    quicker = layer_seconds(layer, choice, machine, setting) <= min(
        layer_seconds(layer, other, machine, setting) for other in possible
    )
    return unknown + words + (", in more rounds" if quicker and least < gradients else "")


def megabytes(size: float) -> str:
    """Returns a number of bytes in words."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"
