"""How layers are divided in a training step, and which part of a layer a replica then has."""

import dataclasses

from toolkit.parallel.plan.count import LayerCost

__all__ = ["REPLICATED", "SUMS", "Choice", "Setting", "bytes_of", "parameters_of", "shard", "updated_bytes"]

SUMS = ("inputs", "heads", "rows")  # Splits with which each replica has a term of the outputs' sum.


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
        global_batch: Examples of all replicas together in a step.
        gradient_dtype: The communication dtype of gradients; "float32" for the dtype that they have.
        gradient_rank: Columns of the factors that PowerSGD sends in the place of gradients; None for whole gradients.
        activation_dtype: The communication dtype of activations of sharded layers; "float32" as above.
        slots: Elements that the optimizer keeps for each element of a weight: 1 for momentum, 2 for Adam.
        shards: Replicas that hold a sharded layer between them, a group; None for all replicas.
        optimizer_state: "replicated", or "sharded" where each replica keeps the slots of its part.
        micro_steps: How many parts a replica's batch is computed in, whose gradients are added up.
        recompute: Whether what only a block reads is computed again in the backward pass, instead of kept until then.
    """

    replicas: int
    global_batch: float
    gradient_dtype: str = "float32"
    gradient_rank: int | None = None
    activation_dtype: str = "float32"
    slots: int = 1
    shards: int | None = None
    optimizer_state: str = "replicated"
    micro_steps: int = 1
    recompute: bool = False

    @property
    def per_replica_batch(self) -> float:
        """Examples of each replica in a step."""
        return self.global_batch / self.replicas

    @property
    def group(self) -> int:
        """How many replicas a group has."""
        return self.shards or self.replicas


def shard(layer: LayerCost, choice: Choice, setting: Setting) -> int:
    """Returns a replica's number of units or heads: the largest shard, to which others are padded."""
    return -(-layer.splits[str(choice.split)] // setting.group)


def parameters_of(layer: LayerCost, choice: Choice, setting: Setting) -> int:
    """Returns the number of elements of a layer's trained weights that a replica holds."""
    if choice.split is None:
        return layer.parameters
    whole = layer.whole if choice.split in SUMS else 0
    size = layer.splits[choice.split]
    return (layer.parameters - whole) // size * shard(layer, choice, setting) + whole


def bytes_of(layer: LayerCost, choice: Choice, setting: Setting) -> float:
    """Returns the bytes of a layer's trained weights that a replica holds, and of their gradients."""
    return parameters_of(layer, choice, setting) * layer.weight_bytes


def updated_bytes(layer: LayerCost, choice: Choice, setting: Setting) -> float:
    """Returns the bytes of a layer's trained weights that a replica updates, and for which it has slots."""
    held = bytes_of(layer, choice, setting)
    return held / setting.replicas if setting.optimizer_state == "sharded" and choice.split is None else held
