"""What a replica sends and receives in a training step for each layer, by how the layer is divided.

Bytes are those a replica receives; over all replicas as many are sent. In an all-reduce each number arrives 2 (R-1)/R
times, in a ring as well as by halving and doubling, which needs 2 log2 R messages one after another (Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, section 4.5). In the other
exchanges everybody's part goes to everybody else once, all at the same time.
"""

import dataclasses

from toolkit.parallel.cost import LayerCost

__all__ = ["REPLICATED", "Choice", "Exchange", "exchanges", "held"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """How a layer is divided.

    Attributes:
        split: "outputs", "inputs", or None where each replica has all of it.
        keep_split: Its output stays split by features.
        comes_split: Its input is split by features already.
    """

    split: str | None = None
    keep_split: bool = False
    comes_split: bool = False

    def __str__(self) -> str:
        if self.split is None:
            return "replicated"
        return f"by {self.split}" + (", kept" if self.keep_split else "")


REPLICATED = Choice()


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Something that replicas send one another.

    Attributes:
        kind: "gradients", which may travel while others are computed; "activations", which are waited for.
        received: Bytes that a replica receives.
        rounds: Messages that wait for one another.
    """

    kind: str
    received: float
    rounds: int


def exchanges(
    layer: LayerCost,
    choice: Choice,
    *,
    replicas: int,
    batch: float,
    gradient_bytes: int | None = None,
    activation_bytes: int | None = None,
) -> list[Exchange]:
    """Returns what a replica exchanges for a layer in a training step.

    Args:
        layer: Its costs.
        choice: How it is divided.
        replicas: How many there are, at least 1.
        batch: Examples of each replica.
        gradient_bytes: Of a number of a gradient on its way; None for as its weight is.
        activation_bytes: Of a number of an activation on its way; None for as it is.
    """
    others = replicas - 1
    if not others:
        return []
    reduced = layer.parameters if choice.split is None else layer.bias if choice.split == "inputs" else 0
    found = []
    if reduced:
        found.append(_all_reduce("gradients", reduced * (gradient_bytes or layer.weight_bytes), replicas))
    if layer.statistics:
        # Numbers that are summed forward, and those of their gradients backward.
        found += [_all_reduce("activations", layer.statistics * layer.number_bytes, replicas)] * 2
    if choice.split is None:
        return found
    number = activation_bytes or layer.number_bytes
    both = 2 if layer.passes_gradient else 1
    if not choice.comes_split:
        found.append(Exchange("activations", 4 * others, 1))  # How many rows each has.
    if choice.split == "outputs":
        found += [Exchange("activations", others * batch * layer.inputs * number, 1)] * both
        if not choice.keep_split:
            columns = -(-layer.units // replicas) * (layer.outputs // layer.units)
            found += [Exchange("activations", others * batch * columns * number, 1)] * 2
        return found
    if not choice.comes_split:
        found += [Exchange("activations", others * batch * -(-layer.features // replicas) * number, 1)] * both
    return [*found, *[Exchange("activations", others * batch * layer.outputs * number, 1)] * 2]


def _all_reduce(kind: str, size: float, replicas: int) -> Exchange:
    return Exchange(kind, 2 * (replicas - 1) / replicas * size, 2 * (replicas - 1).bit_length())


def held(layer: LayerCost, choice: Choice, *, replicas: int) -> tuple[int, int]:
    """Returns how many trained numbers a replica holds of a layer, and how many others."""
    if choice.split is None:
        return layer.parameters, layer.state
    if choice.split == "outputs":
        part = -(-layer.units // replicas)
        return layer.parameters // layer.units * part, layer.state
    part = -(-layer.features // replicas)
    return (layer.parameters - layer.bias) // layer.features * part + layer.bias, layer.state
