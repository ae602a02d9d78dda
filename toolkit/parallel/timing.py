"""How long a training step takes on a machine, and what memory it needs, by how each layer is divided."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from toolkit.parallel.cost import LayerCost
from toolkit.parallel.machine import Link, Machine
from toolkit.parallel.traffic import REPLICATED, Choice, Exchange, exchanges, held

__all__ = ["Setting", "Step", "exchanged", "layer_memory", "layer_seconds", "step"]

_SHORT = {"float16": 2, "bfloat16": 2}  # Bytes; other numbers travel as they are.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and how.

    Attributes:
        replicas: How many.
        batch: Examples of each replica.
        gradient_dtype: What gradients travel as; "float32" for as they are.
        activation_dtype: What activations of sharded layers travel as; "float32" for as they are.
        slots: Numbers that the optimizer keeps for each weight: 1 for momentum, 2 for Adam.
    """

    replicas: int
    batch: float
    gradient_dtype: str = "float32"
    activation_dtype: str = "float32"
    slots: int = 1


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step of each replica.

    Attributes:
        computing: Seconds of layers, forward and backward.
        updating: Seconds of the optimizer.
        exchanging: Seconds in which it waits for what others send.
        fixed: Seconds beside all of that.
        received: Bytes that a replica receives.
        memory: Bytes that a replica holds.
        parameters: Trained numbers that a replica holds.
    """

    computing: float
    updating: float
    exchanging: float
    fixed: float
    received: float
    memory: float
    parameters: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.computing + self.updating + self.exchanging + self.fixed


def step(layers: Sequence[LayerCost], choices: Mapping[str, Choice], machine: Machine, setting: Setting) -> Step:
    """Returns what a training step takes.

    Layers whose operations aren't known, and whose time wasn't measured, count with nothing.

    Args:
        layers: As `costs` returns them.
        choices: By layer's name; layers that aren't there are replicated.
        machine: Where it runs.
        setting: What runs.
    """
    computing = backward = updating = waiting = received = memory = 0.0
    parameters, gradients = 0, []
    for layer in layers:
        choice = choices.get(layer.name, REPLICATED)
        forth, back = _computing(layer, choice, machine, setting)
        computing += forth + back
        backward += back
        mine, _ = held(layer, choice, replicas=setting.replicas)
        parameters += mine
        updating += _updating(mine * layer.weight_bytes, machine, setting)
        memory += layer_memory(layer, choice, setting)
        for exchange in exchanged(layer, choice, setting):
            received += exchange.received
            if exchange.kind == "gradients":
                gradients.append(exchange)
            else:
                waiting += _seconds(exchange, machine, setting)
    travelling = _reducing(gradients, machine, setting)
    exchanging = waiting + max(0.0, travelling - machine.overlap * backward)
    return Step(computing, updating, exchanging, machine.fixed, received, memory, parameters)


def layer_seconds(layer: LayerCost, choice: Choice, machine: Machine, setting: Setting) -> float:
    """Returns what a choice costs for one layer: its computing, update and exchanges, none of it hidden."""
    mine, _ = held(layer, choice, replicas=setting.replicas)
    found = exchanged(layer, choice, setting)
    gradients = [exchange for exchange in found if exchange.kind == "gradients"]
    return (
        sum(_computing(layer, choice, machine, setting))
        + _updating(mine * layer.weight_bytes, machine, setting)
        + sum(_seconds(exchange, machine, setting) for exchange in found if exchange.kind != "gradients")
        + _reducing(gradients, machine, setting, alone=False)
    )


def layer_memory(layer: LayerCost, choice: Choice, setting: Setting) -> float:
    """Returns the bytes that a replica holds for a layer: weights, gradients, the optimizer's numbers, activations.

    Activations are the outputs, which the backward pass needs; those of everybody's examples where the layer is
    sharded, and its gathered inputs.
    """
    mine, other = held(layer, choice, replicas=setting.replicas)
    weights = (mine * (2 + setting.slots) + other) * layer.weight_bytes
    everybody = setting.replicas * setting.batch * layer.number_bytes
    own = setting.batch * layer.outputs * layer.number_bytes
    if choice.split == "outputs":
        parts = everybody * layer.outputs / setting.replicas
        return weights + everybody * layer.inputs + parts + (0 if choice.keep_split else own)
    if choice.split == "inputs":
        gathered = 0 if choice.comes_split else everybody * layer.inputs / setting.replicas
        return weights + gathered + everybody * layer.outputs + own
    return weights + own


def exchanged(layer: LayerCost, choice: Choice, setting: Setting) -> list[Exchange]:
    """Returns what a replica exchanges for a layer in a training step."""
    return exchanges(
        layer,
        choice,
        replicas=setting.replicas,
        batch=setting.batch,
        gradient_bytes=_SHORT.get(setting.gradient_dtype),
        activation_bytes=_SHORT.get(setting.activation_dtype),
    )


def _computing(layer: LayerCost, choice: Choice, machine: Machine, setting: Setting) -> tuple[float, float]:
    """Seconds forward and backward: a sharded layer computes 1/R of everybody's examples."""
    if layer.name in machine.seconds:
        whole = machine.seconds[layer.name]
        shares = (1 / 3, 2 / 3)
        if layer.operations:
            shares = ((layer.forward or 0) / layer.operations, (layer.backward or 0) / layer.operations)
        forth, back = (whole * share for share in shares)
    else:
        forth, back = (layer.forward or 0) / machine.speed, (layer.backward or 0) / machine.speed
    # Parts of what doesn't divide evenly are padded.
    padding = 1.0
    if choice.split is not None:
        size = layer.units if choice.split == "outputs" else layer.features
        padding = -(-size // setting.replicas) * setting.replicas / size
    return forth * setting.batch * padding, back * setting.batch * padding


def _updating(weights: float, machine: Machine, setting: Setting) -> float:
    """Reads gradient, weight and slots, and writes weight and slots."""
    return weights * (3 + 2 * setting.slots) / machine.memory


def _seconds(exchange: Exchange, machine: Machine, setting: Setting) -> float:
    """Seconds of an exchange: on its slowest way, inside a host or between hosts."""
    return max(
        share * exchange.received / link.bandwidth + exchange.rounds * link.latency
        for link, share in _ways(machine, setting, ring=False)
    )


def _reducing(gradients: Sequence[Exchange], machine: Machine, setting: Setting, *, alone: bool = True) -> float:
    """Seconds of all gradients' all-reduce: in one pack, so that its messages count once."""
    if not gradients:
        return 0.0
    size, rounds = sum(exchange.received for exchange in gradients), max(exchange.rounds for exchange in gradients)
    return max(
        size / (link.reducing or link.bandwidth) + (max(rounds * link.latency, link.smallest) if alone else 0.0)
        for link, _ in _ways(machine, setting, ring=True)
    )


def _ways(machine: Machine, setting: Setting, *, ring: bool) -> list[tuple[Link, float]]:
    """The links of a replica's exchange, each with the bytes through it for each byte that a replica receives.

    A ring passes from host to host once, whatever the number of replicas there. What everybody sends to
    everybody comes, for each of a host's replicas, from all replicas elsewhere.
    """
    hosts = min(machine.hosts, setting.replicas)
    if hosts <= 1:
        return [(machine.inside, 1.0)]
    local = math.ceil(setting.replicas / hosts)
    outside = 1.0 if ring else local * (setting.replicas - local) / (setting.replicas - 1)
    ways = [(machine.between or machine.inside, outside)]
    if local > 1:
        ways.append((machine.inside, 1.0 if ring else (local - 1) / (setting.replicas - 1)))
    return ways
