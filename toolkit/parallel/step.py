"""A training step by how each layer is divided: what a replica holds, computes and exchanges, and how long that takes.

Bytes are those that a replica receives; over all replicas as many are sent. In an all-reduce each element arrives 2
(R-1)/R times, in a ring as well as by halving and doubling, which needs 2 log2 R messages one after another (Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, section 4.5). In the other
exchanges each replica's shard goes to each other replica once, all at the same time.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from toolkit.parallel.cost import LayerCost
from toolkit.parallel.machine import Machine

__all__ = ["REPLICATED", "Choice", "Exchange", "Setting", "Step", "exchanges", "layer_memory", "layer_seconds", "step"]

_SUMS = ("inputs", "heads", "rows")  # Each replica has a term of the outputs.
_SHORT = {"float16": 2, "bfloat16": 2}  # Bytes; in float32 activations and gradients keep the dtype that they have.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """How a layer is divided.

    Attributes:
        split: One of the names in `LayerCost.splits`, such as "outputs"; None where each replica has all of it.
        keep_split: Its output stays sharded by features.
        comes_split: Its input is sharded by features already.
    """

    split: str | None = None
    keep_split: bool = False
    comes_split: bool = False

    def __str__(self) -> str:
        if self.split is None:
            return "replicated"
        return f"by {self.split}" + (", kept" if self.keep_split else "")


REPLICATED = Choice()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and how.

    Attributes:
        replicas: How many replicas train.
        batch: Examples of each replica in a step.
        gradient_dtype: The communication dtype of gradients; "float32" for the dtype that they have.
        activation_dtype: The communication dtype of activations of sharded layers; "float32" as above.
        slots: Elements that the optimizer keeps for each element of a weight: 1 for momentum, 2 for Adam.
    """

    replicas: int
    batch: float
    gradient_dtype: str = "float32"
    activation_dtype: str = "float32"
    slots: int = 1


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Something that replicas send one another.

    Attributes:
        kind: "gradients", which may be sent while others are computed; "activations", for which replicas wait.
        received: Bytes that a replica receives.
        rounds: Messages that wait for one another.
    """

    kind: str
    received: float
    rounds: int


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
        """How long the step takes in all."""
        return self.computing + self.updating + self.exchanging + self.fixed


def step(layers: Sequence[LayerCost], choices: Mapping[str, Choice], machine: Machine, setting: Setting) -> Step:
    """Returns what a training step takes.

    Layers whose operations aren't known, and whose time wasn't measured, count with nothing.

    Args:
        layers: As `costs` returns them.
        choices: By layer's name; layers that aren't there are replicated.
        machine: The devices, and what joins them.
        setting: What is trained, and how.
    """
    computing = backward = updating = waiting = received = memory = 0.0
    parameters, gradients = 0, []
    for layer in layers:
        choice = choices.get(layer.name, REPLICATED)
        forth, back = _computing(layer, choice, machine, setting)
        computing += forth + back
        backward += back
        held = _parameters(layer, choice, setting)
        parameters += held
        updating += _updating(held * layer.weight_bytes, machine, setting)
        memory += layer_memory(layer, choice, setting)
        for exchange in exchanges(layer, choice, setting):
            received += exchange.received
            if exchange.kind == "gradients":
                gradients.append(exchange)
            else:
                waiting += machine.exchange_seconds(exchange.received, exchange.rounds, replicas=setting.replicas)
    # All gradients go in one pack, so that their messages count once.
    size, rounds = sum(each.received for each in gradients), max((each.rounds for each in gradients), default=0)
    reducing = machine.all_reduce_seconds(size, rounds, replicas=setting.replicas)
    exchanging = waiting + max(0.0, reducing - machine.overlap * backward)
    return Step(computing, updating, exchanging, machine.fixed, received, memory, parameters)


def layer_seconds(layer: LayerCost, choice: Choice, machine: Machine, setting: Setting) -> float:
    """Returns what a choice costs for one layer: its computing, update and exchanges, none of it hidden."""
    found = exchanges(layer, choice, setting)
    waiting = [
        machine.exchange_seconds(each.received, each.rounds, replicas=setting.replicas)
        for each in found
        if each.kind != "gradients"
    ]
    gradients = sum(each.received for each in found if each.kind == "gradients")
    return (
        sum(_computing(layer, choice, machine, setting))
        + _updating(_parameters(layer, choice, setting) * layer.weight_bytes, machine, setting)
        + sum(waiting)
        + machine.all_reduce_seconds(gradients, 0, replicas=setting.replicas)
    )


def layer_memory(layer: LayerCost, choice: Choice, setting: Setting) -> float:
    """Returns the bytes that a replica holds for a layer: weights, gradients, the optimizer's slots, activations.

    Activations are the outputs, which the backward pass needs; those for everybody's examples where the layer is
    sharded, and its gathered inputs.
    """
    weights = (_parameters(layer, choice, setting) * (2 + setting.slots) + layer.state) * layer.weight_bytes
    everybody = setting.replicas * setting.batch * layer.activation_bytes
    own = setting.batch * layer.outputs * layer.activation_bytes
    shard = everybody * layer.outputs / setting.replicas
    if choice.split is None:
        return weights + own
    if choice.split == "columns":
        return weights + shard + own
    if choice.split == "rows":
        return weights + everybody * layer.outputs + own
    if choice.split == "heads":
        return weights + everybody * (layer.inputs + layer.outputs) + own
    if choice.split == "inputs":
        gathered = 0 if choice.comes_split else everybody * layer.inputs / setting.replicas
        return weights + gathered + everybody * layer.outputs + own
    return weights + everybody * layer.inputs + shard + (0 if choice.keep_split else own)


def exchanges(layer: LayerCost, choice: Choice, setting: Setting) -> list[Exchange]:
    """Returns what a replica exchanges for a layer in a training step."""
    replicas, batch = setting.replicas, setting.batch
    others = replicas - 1
    if not others:
        return []
    found = []
    size = _SHORT.get(setting.gradient_dtype) or layer.weight_bytes
    if choice.split is None and "rows" in layer.splits:
        # Of a table, the rows that were looked up, beside one another, and their numbers.
        found.append(Exchange("gradients", others * batch * (layer.outputs * size + layer.inputs * 4), 1))
    elif reduced := layer.parameters if choice.split is None else layer.whole if choice.split in _SUMS else 0:
        found.append(_all_reduce("gradients", reduced * size, replicas))
    if layer.statistics:
        # Elements that are summed forward, and those of their gradients backward.
        found += [_all_reduce("activations", layer.statistics * layer.activation_bytes, replicas)] * 2
    if choice.split is None:
        return found
    if not choice.comes_split:
        found.append(Exchange("activations", 4 * others, 1))  # How many examples each replica has.
    size = _SHORT.get(setting.activation_dtype) or layer.activation_bytes
    inputs_both_ways = 2 if layer.passes_gradient else 1
    if choice.split in ("columns", "rows"):
        found.append(Exchange("activations", others * batch * layer.inputs * 4, 1))  # Numbers of rows.
    elif choice.split in ("outputs", "heads"):
        found += [Exchange("activations", others * batch * layer.inputs * size, 1)] * inputs_both_ways
    elif not choice.comes_split:
        shard = _shard(layer, choice, replicas) * (layer.inputs // layer.splits["inputs"])
        found += [Exchange("activations", others * batch * shard * size, 1)] * inputs_both_ways
    if choice.split in _SUMS:
        return [*found, *[Exchange("activations", others * batch * layer.outputs * size, 1)] * 2]
    if not choice.keep_split:
        shard = _shard(layer, choice, replicas) * (layer.outputs // layer.splits[str(choice.split)])
        found += [Exchange("activations", others * batch * shard * size, 1)] * 2
    return found


def _shard(layer: LayerCost, choice: Choice, replicas: int) -> int:
    """Returns how much a replica has of what is divided: the largest part, to which others are padded."""
    return -(-layer.splits[str(choice.split)] // replicas)


def _all_reduce(kind: str, size: float, replicas: int) -> Exchange:
    return Exchange(kind, 2 * (replicas - 1) / replicas * size, 2 * (replicas - 1).bit_length())


def _parameters(layer: LayerCost, choice: Choice, setting: Setting) -> int:
    """How many elements of a layer's trained weights a replica holds."""
    if choice.split is None:
        return layer.parameters
    whole = layer.whole if choice.split in _SUMS else 0
    size = layer.splits[choice.split]
    return (layer.parameters - whole) // size * _shard(layer, choice, setting.replicas) + whole


def _computing(layer: LayerCost, choice: Choice, machine: Machine, setting: Setting) -> tuple[float, float]:
    """Seconds forward and backward: a sharded layer computes 1/R of everybody's examples."""
    if layer.name in machine.seconds:
        measured = machine.seconds[layer.name]
        shares = (1 / 3, 2 / 3)
        if layer.operations:
            shares = ((layer.forward or 0) / layer.operations, (layer.backward or 0) / layer.operations)
        forth, back = (measured * share for share in shares)
    else:
        forth, back = (layer.forward or 0) / machine.speed, (layer.backward or 0) / machine.speed
    # Shards of what doesn't divide evenly are padded.
    padding = 1.0
    if choice.split is not None:
        padding = _shard(layer, choice, setting.replicas) * setting.replicas / layer.splits[choice.split]
    return forth * setting.batch * padding, back * setting.batch * padding


def _updating(weights: float, machine: Machine, setting: Setting) -> float:
    """Seconds of the optimizer: it reads gradient, weight and slots, and writes weight and slots."""
    return weights * (3 + 2 * setting.slots) / machine.memory
