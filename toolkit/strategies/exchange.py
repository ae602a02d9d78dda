"""How gradients travel between replicas, as a strategy is told."""

import dataclasses
from typing import TYPE_CHECKING

from toolkit.errors import StrategyError

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["DTYPES", "GradientExchange", "exchange_of", "set_exchange"]

DTYPES = ("float32", "float16", "bfloat16")
_ATTRIBUTE = "_toolkit_gradient_exchange"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientExchange:
    """How gradients travel between replicas.

    Attributes:
        dtype: "float32" as they are, or "float16" or "bfloat16" for half the bytes. They are then added in
            that type too; float16 ends at 65,504, bfloat16 has 8 bits of precision.
        bytes_per_pack: They are joined up to about so many bytes, between processes; 0 for all in one.

    Raises:
        StrategyError: A value is none that it can be.
    """

    dtype: str = "float32"
    bytes_per_pack: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise StrategyError(
                asked=f"gradients travel as {self.dtype}",
                found="that isn't a type they can travel as",
                remedy="Choose one of " + ", ".join(DTYPES),
            )
        if self.bytes_per_pack < 0:
            raise StrategyError(
                asked=f"gradients travel in packs of {self.bytes_per_pack} bytes",
                found="no pack holds less than nothing",
                remedy="Leave bytes_per_pack out, or give such as 4194304",
            )


def set_exchange(strategy: "tf.distribute.Strategy", exchange: GradientExchange) -> None:
    """Has a strategy's replicas exchange gradients so, from the next model that is compiled."""
    setattr(strategy, _ATTRIBUTE, exchange)


def exchange_of(strategy: "tf.distribute.Strategy") -> GradientExchange:
    """Returns how a strategy's replicas exchange gradients."""
    return getattr(strategy, _ATTRIBUTE, GradientExchange())
