"""The memory that a replica needs for a training step, by how each layer is divided."""

import dataclasses
from collections.abc import Mapping, Sequence

from toolkit.parallel.plan.count import LayerCost
from toolkit.parallel.plan.division import REPLICATED, SUMS, Choice, Setting, bytes_of, updated_bytes

__all__ = ["layer_memory", "memory_of", "recomputed"]

# Temporary values for the largest weights: the optimizer updates two of them at once, in two threads.
_UPDATED_AT_ONCE = 2


def memory_of(layers: Sequence[LayerCost], choices: Mapping[str, Choice], setting: Setting) -> dict[str, float]:
    """Returns the most bytes that a replica holds in a training step, by their purpose.

    "weights", with those that aren't trained; "optimizer": its slots, the sums of micro-steps, and what PowerSGD hasn't
    sent yet; "step": what layers
    keep for the backward pass and compute with, and gradients, where together they are most; "workspace": what updates
    and exchanges of gradients, and libraries, take beside.
    """
    weights = optimizer = kept = most = largest = workspace = 0.0
    gradients = [bytes_of(layer, choices.get(layer.name, REPLICATED), setting) for layer in layers]
    later, again, block = sum(gradients), 0.0, ""
    own = setting.per_replica_batch / setting.micro_steps
    for layer, gradient in zip(layers, gradients, strict=True):
        choice = choices.get(layer.name, REPLICATED)
        weights += gradient + layer.state * layer.weight_bytes
        compressed = setting.gradient_rank is not None and choice.split is None
        sums = gradient * ((setting.micro_steps > 1) + compressed)
        optimizer += setting.slots * updated_bytes(layer, choice, setting) + sums
        stays, inside, works = _activations(layer, choice, setting)
        kept, later = kept + stays, later - gradient
        if layer.block != block:
            block, again = layer.block, 0.0
            if setting.recompute:  # A copy of its input.
                again = own * layer.inputs * layer.activation_bytes
        again += inside
        most = max(most, kept + again + works + later)
        largest = max(largest, gradient)
        workspace = max(workspace, layer.workspace)
    packed = sum(gradients) if setting.replicas > 1 else 0.0
    beside = max(_UPDATED_AT_ONCE * largest, packed)
    return {
        "weights": weights,
        "optimizer": optimizer,
        "step": max(most, sum(gradients)),
        "workspace": workspace + beside,
    }


def recomputed(layers: Sequence[LayerCost], choices: Mapping[str, Choice], setting: Setting) -> frozenset[str]:
    """Returns the names of the recomputed blocks: layers, and layers that contain others."""
    inside = ((each.block, _activations(each, choices.get(each.name, REPLICATED), setting)[1]) for each in layers)
    return frozenset(block for block, size in inside if size)


def layer_memory(layer: LayerCost, choice: Choice, setting: Setting) -> float:
    """Returns the bytes that a replica keeps for a layer: weights, gradients, the optimizer's slots, activations."""
    alone = memory_of([dataclasses.replace(layer, working=0.0)], {layer.name: choice}, setting)
    return alone["weights"] + alone["optimizer"] + alone["step"]


def _activations(layer: LayerCost, choice: Choice, setting: Setting) -> tuple[float, float, float]:
    """Returns the bytes that a layer keeps until the backward pass and in it, and its temporary bytes.

    A sharded layer has a part of the features of everybody's examples, which are as many as all of its own. Gathered
    inputs come to that, and what is exchanged back.
    """
    own = setting.per_replica_batch / setting.micro_steps
    inputs, outputs = (own * size * layer.activation_bytes for size in (layer.inputs, layer.outputs))
    more, working, everybody = 0.0, own * layer.working, setting.group
    if choice.split is not None:
        if not choice.keep_split:
            more += outputs
        if choice.split in ("outputs", "heads"):
            more += everybody * inputs
            working += everybody * inputs  # Their gradients.
        elif choice.split == "inputs" and not choice.comes_split:
            more += inputs
            working += inputs
        if choice.split in SUMS:
            working += 2 * everybody * outputs  # The terms of all replicas' sums, forward or backward.
    if setting.recompute and layer.block:
        return own * layer.passed, own * layer.inside + more, working
    return own * layer.kept + more, 0.0, working
