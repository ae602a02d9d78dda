"""Which layers are replicated and which are split.

activations  examples and features between replicas
regularizers  regularizers and constraints of sharded variables
layers      ShardedDense and ShardedConv2D
operations  what Keras's layers compute
cost        what each layer costs
traffic     what replicas exchange for a layer
machine     how fast devices are, and what joins them
timing      how long a training step takes, and what memory it needs
plan        the choice for each layer, with its reasons
scaling     the same model on one replica and on many
apply       a plan put on a model, and the whole weights as a plain one
measuring   the speed of the devices here, and of what joins them
comparison  what was predicted for a choice, and what was measured
"""

import importlib
from typing import Any

_ROOMS = {
    "Choice": "traffic",
    "Link": "machine",
    "Machine": "machine",
    "Plan": "plan",
    "Row": "comparison",
    "Setting": "timing",
    "ShardedConv2D": "layers",
    "ShardedDense": "layers",
    "choose": "plan",
    "costs": "cost",
    "measure": "measuring",
    "parallelize": "apply",
    "plain": "apply",
}

__all__ = [
    "Choice",
    "Link",
    "Machine",
    "Plan",
    "Row",
    "Setting",
    "ShardedConv2D",
    "ShardedDense",
    "choose",
    "costs",
    "measure",
    "parallelize",
    "plain",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(importlib.import_module(f"toolkit.parallel.{_ROOMS[name]}"), name)
    raise AttributeError(name)
