"""The time of a training step, by how each layer is divided: computation, update and exchange."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

from toolkit.parallel.plan.comm_model import Exchange, exchanges
from toolkit.parallel.plan.count import LayerCost
from toolkit.parallel.plan.division import REPLICATED, Choice, Setting, parameters_of, shard, updated_bytes
from toolkit.parallel.plan.machine import Machine
from toolkit.parallel.plan.memory import memory_of, recomputed

__all__ = ["Step", "layer_seconds", "step"]

# How often PowerSGD reads or writes a tensor of a gradient's size: adding the error, both products, their result
# and the new error.
_COMPRESSING = 9


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step of each replica.

    Attributes:
        computing: Seconds of layers, forward and backward.
        updating: Seconds of the optimizer.
        exchanging: Seconds of the exchanges. How much of them overlaps with computing isn't predicted.
        fixed: Seconds beside all of that.
        received: Bytes that a replica receives.
        memory: Bytes that a replica holds.
        parameters: Elements of trained weights that a replica holds.
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
        """The time of the whole step."""
        return self.computing + self.updating + self.exchanging + self.fixed


def step(layers: Sequence[LayerCost], choices: Mapping[str, Choice], machine: Machine, setting: Setting) -> Step:
    """Returns the predicted training step.

    Layers whose operations aren't known, and whose time wasn't measured, count with nothing.

    Args:
        layers: As `costs` returns them.
        choices: By layer's name; layers that aren't there are replicated.
        machine: The devices, and the network between them.
        setting: What is trained, and how.
    """
    computing = updating = waiting = received = 0.0
    parameters, gradients = 0, collections.defaultdict[str, list[Exchange]](list)
    again = recomputed(layers, choices, setting)
    for layer in layers:
        choice = choices.get(layer.name, REPLICATED)
        forth, back = _computing(layer, choice, machine, setting)
        twice = layer.block in again
        back += forth if twice else 0.0
        computing += forth + back
        parameters += parameters_of(layer, choice, setting)
        updating += _updating(layer, choice, machine, setting)
        for exchange in exchanges(layer, choice, setting):
            times = 1.5 if twice and exchange.kind == "activations" else 1.0  # Half of them are in the forward pass.
            received += times * exchange.received
            if exchange.kind == "gradients":
                gradients[exchange.among].append(exchange)
            else:
                waiting += times * _waiting(exchange, machine, setting)
    # All gradients go in one pack, so its messages count once.
    packs = [
        Exchange("gradients", sum(e.received for e in each), max(e.rounds for e in each), among)
        for among, each in gradients.items()
    ]
    reducing = sum(_waiting(pack, machine, setting) for pack in packs)
    # PowerSGD exchanges its factors when all gradients are known, in two exchanges.
    if setting.gradient_rank is not None:
        reducing += sum(_waiting(dataclasses.replace(pack, received=0), machine, setting) for pack in packs)
    exchanging = waiting + reducing
    memory = sum(memory_of(layers, choices, setting).values())
    fixed = machine.fixed * setting.micro_steps
    return Step(computing, updating, exchanging, fixed, received, memory, parameters)


def _waiting(exchange: Exchange, machine: Machine, setting: Setting) -> float:
    """Returns the time of an exchange. A group is within a host if it fits."""
    local = math.ceil(setting.replicas / machine.hosts)
    count, received = setting.replicas, exchange.received
    if exchange.among == "group":
        count = setting.group
        machine = dataclasses.replace(machine, hosts=math.ceil(count / local))
    elif exchange.among == "groups":
        count = setting.replicas // setting.group
        if machine.hosts > 1:  # Replicas of one host with different shards share the link between hosts.
            received *= min(setting.group, local)
    takes = machine.all_reduce_seconds if exchange.kind == "gradients" else machine.exchange_seconds
    return takes(received, exchange.rounds, replicas=count)


def layer_seconds(layer: LayerCost, choice: Choice, machine: Machine, setting: Setting) -> float:
    """Returns the cost of a choice for one layer: its computation, update and exchanges."""
    found = exchanges(layer, choice, setting)
    # Gradients share messages with those of other layers.
    alone = [dataclasses.replace(each, rounds=0) if each.kind == "gradients" else each for each in found]
    return (
        sum(_computing(layer, choice, machine, setting))
        + _updating(layer, choice, machine, setting)
        + sum(_waiting(each, machine, setting) for each in alone)
    )


def _computing(layer: LayerCost, choice: Choice, machine: Machine, setting: Setting) -> tuple[float, float]:
    """Seconds forward and backward: a sharded layer computes 1/R of all examples."""
    if layer.name in machine.seconds:
        measured = machine.seconds[layer.name]
        shares = (1 / 3, 2 / 3)
        if layer.operations:
            shares = ((layer.forward or 0) / layer.operations, (layer.backward or 0) / layer.operations)
        forth, back = (measured * share for share in shares)
    else:
        forth, back = (layer.forward or 0) / machine.speed, (layer.backward or 0) / machine.speed
    # If units don't divide evenly, shards are padded.
    padding = 1.0
    if choice.split is not None:
        padding = shard(layer, choice, setting) * setting.group / layer.splits[choice.split]
    return forth * setting.per_replica_batch * padding, back * setting.per_replica_batch * padding


def _updating(layer: LayerCost, choice: Choice, machine: Machine, setting: Setting) -> float:
    """Seconds of the optimizer: it reads gradient, weight and slots, and writes weight and slots."""
    passes = 3 + 2 * setting.slots
    if setting.gradient_rank is not None and choice.split is None:
        passes += _COMPRESSING
    return updated_bytes(layer, choice, setting) * passes / machine.memory
