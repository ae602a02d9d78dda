"""What a replica exchanges in a training step, in bytes and messages.

Bytes are those that a replica receives; over all replicas as many are sent. In an all-reduce each element arrives 2
(R-1)/R times, in a ring as well as by halving and doubling, which needs 2 log2 R messages one after another (Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, section 4.5). In the other
exchanges each replica's shard goes to each other replica once, all at the same time.
"""

import dataclasses
import math

from toolkit.parallel.plan.count import LayerCost
from toolkit.parallel.plan.division import SUMS, Choice, Setting, parameters_of, shard

__all__ = ["Exchange", "all_reduce", "exchanges"]

# Bytes per element in float32; activations and gradients otherwise keep their dtype.
_SHORT = {"float16": 2, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One exchange between replicas.

    Attributes:
        kind: "gradients", which may be sent while others are computed; "activations", for which replicas wait.
        received: Bytes that a replica receives.
        rounds: Messages that wait for one another.
        among: "all" replicas, those of a "group", or those with the same part of each of the "groups".
    """

    kind: str
    received: float
    rounds: int
    among: str = "all"


def exchanges(layer: LayerCost, choice: Choice, setting: Setting) -> list[Exchange]:
    """Returns a replica's exchanges for a layer in a training step."""
    replicas, group, batch = setting.replicas, setting.group, setting.per_replica_batch
    found = []
    size = _SHORT.get(setting.gradient_dtype) or layer.weight_bytes
    whole = _sent(layer, setting) if choice.split is None else layer.whole if choice.split in SUMS else 0
    if choice.split is None and "rows" in layer.splits:
        # For a table: the rows that were looked up, and their indices.
        found.append(Exchange("gradients", (replicas - 1) * batch * (layer.outputs * size + layer.inputs * 4), 1))
    else:
        found.append(all_reduce("gradients", setting.micro_steps * whole * size, replicas))
    if choice.split is not None:
        parts = parameters_of(layer, choice, setting) - whole
        parts_alike = all_reduce("gradients", setting.micro_steps * parts * size, replicas // group)
        found.append(dataclasses.replace(parts_alike, among="groups"))
    # Elements that are summed in the forward pass, and elements of gradients that are summed in the backward pass.
    found += [all_reduce("activations", layer.statistics * layer.activation_bytes, replicas)] * 2
    if choice.split is not None:
        found += [dataclasses.replace(each, among="group") for each in _within_group(layer, choice, setting)]
    return [each for each in found if each.received]


def _sent(layer: LayerCost, setting: Setting) -> int:
    """Returns the number of elements that the gradients of a replicated layer have."""
    rank = setting.gradient_rank
    if rank is None:
        return layer.parameters
    from toolkit.strategies.exchange.powersgd import matrix_shape, shrinks

    return sum(rank * sum(matrix_shape(each)) if shrinks(each, rank) else math.prod(each) for each in layer.shapes)


def _within_group(layer: LayerCost, choice: Choice, setting: Setting) -> list[Exchange]:
    """Returns the exchanges of a sharded layer: its activations, and their gradients."""
    others, batch, found = setting.group - 1, setting.per_replica_batch, []
    if not choice.comes_split:
        found.append(Exchange("activations", 4 * others, 1))  # The number of examples of each replica.
    size = _SHORT.get(setting.activation_dtype) or layer.activation_bytes
    inputs_both_ways = 2 if layer.passes_gradient else 1
    if choice.split in ("columns", "rows"):
        found.append(Exchange("activations", others * batch * layer.inputs * 4, 1))  # Indices of rows.
    elif choice.split in ("outputs", "heads"):
        found += [Exchange("activations", others * batch * layer.inputs * size, 1)] * inputs_both_ways
    elif not choice.comes_split:
        size_of_part = shard(layer, choice, setting) * (layer.inputs // layer.splits["inputs"])
        found += [Exchange("activations", others * batch * size_of_part * size, 1)] * inputs_both_ways
    if choice.split in SUMS:
        return [*found, *[Exchange("activations", others * batch * layer.outputs * size, 1)] * 2]
    if not choice.keep_split:
        size_of_part = shard(layer, choice, setting) * (layer.outputs // layer.splits[str(choice.split)])
        found += [Exchange("activations", others * batch * size_of_part * size, 1)] * 2
    return found


def all_reduce(kind: str, size: float, replicas: int) -> Exchange:
    """Returns an all-reduce of this many bytes."""
    return Exchange(kind, 2 * (replicas - 1) / replicas * size, 2 * (replicas - 1).bit_length())
