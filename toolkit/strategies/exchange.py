"""How replicas exchange gradients: what a strategy is asked for."""

import dataclasses
from typing import TYPE_CHECKING

from toolkit.errors import StrategyError

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["COMMUNICATIONS", "DTYPES", "GradientExchange", "exchange_of", "set_exchange"]

COMMUNICATIONS = ("auto", "nccl", "ring")  # What processes exchange tensors by.
DTYPES = ("float32", "float16", "bfloat16")
_ATTRIBUTE = "_toolkit_gradient_exchange"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientExchange:
    """How replicas exchange gradients.

    Attributes:
        dtype: The communication dtype: "float32" for the gradients' own, or "float16" or "bfloat16" for half the
            bytes. float16 ends at 65,504, bfloat16 has 8 bits of precision. GPUs also add in it, processes that
            exchange without NCCL in the gradients' own.
        bytes_per_pack: Between processes, gradients are sent in packs of about so many bytes, each while others are
            computed; 0 for all in one, when the last is known; None for 512 KiB, the best size at 1 Gbit/s.

    Raises:
        StrategyError: There is no such dtype, or the size is negative.
    """

    dtype: str = "float32"
    bytes_per_pack: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise StrategyError(
                asked=f"gradients with communication dtype {self.dtype}",
                found="gradients aren't exchanged in that dtype",
                remedy="Choose one of " + ", ".join(DTYPES),
            )
        if self.bytes_per_pack is not None and self.bytes_per_pack < 0:
            raise StrategyError(
                asked=f"gradients in packs of {self.bytes_per_pack} bytes",
                found="a pack can't be smaller than 0",
                remedy="Leave bytes_per_pack out, or give such as 4194304",
            )


def set_exchange(strategy: "tf.distribute.Strategy", exchange: GradientExchange) -> None:
    """Has a strategy's replicas exchange gradients in this way, from the next model that is compiled."""
    setattr(strategy, _ATTRIBUTE, exchange)


def exchange_of(strategy: "tf.distribute.Strategy") -> GradientExchange:
    """Returns how a strategy's replicas exchange gradients."""
    return getattr(strategy, _ATTRIBUTE, GradientExchange())
