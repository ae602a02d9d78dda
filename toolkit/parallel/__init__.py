"""Which layers are replicated and which are split.

rows    examples and features between replicas
parts   regularizers and constraints of what is split
layers  ShardedDense and ShardedConv2D
"""

from typing import Any

__all__ = ["ShardedConv2D", "ShardedDense"]


def __getattr__(name: str) -> Any:
    if name in ("ShardedConv2D", "ShardedDense"):
        from toolkit.parallel import layers

        return getattr(layers, name)
    raise AttributeError(name)
