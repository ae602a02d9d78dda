"""Which options of `create` go together, and which ask for nothing: sentences before anything is started."""

import logging
from typing import TYPE_CHECKING, Any

from toolkit.errors import StrategyError
from toolkit.strategies.options import GradientExchange, LocalSteps

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["check", "check_served", "note_one_replica"]

_LOG = logging.getLogger(__name__)
_ELSEWHERE = "train under mirrored or multi_worker"


def check(gradients: Any, shards: int | None, optimizer_state: str, local: Any) -> None:
    """Makes sure that options for replicas are of their kinds, and that no one of them excludes another.

    Raises:
        StrategyError: They aren't, or one does.
    """
    for name, value, kind, such in (
        ("gradients", gradients, GradientExchange, 'GradientExchange(compression="powersgd")'),
        ("local", local, LocalSteps, "LocalSteps(every=16)"),
    ):
        if value is not None and not isinstance(value, kind):
            raise StrategyError(
                asked=f"{name}={value!r}",
                found=f"it must be a {kind.__name__}",
                remedy=f"Give {name}=toolkit.strategies.{such}",
            )
    if local is None:
        return
    exchange = gradients or GradientExchange()
    with_what = f"local steps ({local.every} between averages) with"
    none = "replicas that train by themselves exchange nothing in a step"
    _refuse(
        (shards is not None and shards > 1, f"{with_what} sharded layers", none, "Leave one of the two out"),
        (optimizer_state != "replicated", f"{with_what} optimizer_state='sharded'", none, "Leave one of the two out"),
        (exchange.compression != "none", f"{with_what} compressed gradients", none, "Leave one of the two out"),
        (
            exchange.dtype != "float32" and not local.start_step,
            f"{with_what} gradients in {exchange.dtype}",
            "gradients aren't exchanged",
            f"Give LocalSteps(dtype={exchange.dtype!r}), in which averages are sent",
        ),
    )


def check_served(gradients: Any, shards: int | None, optimizer_state: str, local: Any) -> None:
    """Makes sure that parameter servers aren't asked for what only replicas that exchange with one another can do.

    Raises:
        StrategyError: They are.
    """
    exchange = gradients or GradientExchange()
    _refuse(
        (
            exchange.compression != "none",
            f"gradients compressed by {exchange.compression} with parameter servers",
            "parameter servers are sent whole gradients",
            f"Leave compression out, or {_ELSEWHERE}",
        ),
        (
            exchange.dtype != "float32",
            f"gradients with communication dtype {exchange.dtype}",
            "parameter servers exchange gradients in their own dtype",
            f"Leave gradients out, or {_ELSEWHERE}",
        ),
        (
            shards is not None,
            f"shards={shards!r} with parameter servers",
            "workers of parameter servers exchange no activations",
            "Leave shards out (ParameterServerOptions(variables='sharded') shards variables over the ps), or "
            f"{_ELSEWHERE}",
        ),
        (
            optimizer_state != "replicated",
            f"optimizer_state={optimizer_state!r} with parameter servers",
            "there the ps tasks hold an optimizer's state beside its variables",
            "Leave it out, or give ParameterServerOptions(variables='sharded')",
        ),
        (
            local is not None,
            f"local steps ({getattr(local, 'every', '')} between averages) with parameter servers",
            "there workers push each gradient to the ps tasks, and keep no weights",
            f"Leave local out, or {_ELSEWHERE}",
        ),
    )


def note_one_replica(strategy: "tf.distribute.Strategy", gradients: Any, local: Any) -> None:
    """Says what has no effect where one replica trains."""
    asked = ["PowerSGD"] if gradients is not None and gradients.compression != "none" else []
    asked += ["LocalSteps"] if local is not None else []
    if asked and strategy.num_replicas_in_sync == 1:
        _LOG.warning("One replica trains, and exchanges nothing: %s has no effect", asked[0])


def _refuse(*rows: tuple[bool, str, str, str]) -> None:
    for there, asked, found, remedy in rows:
        if there:
            raise StrategyError(asked=asked, found=found, remedy=remedy)
