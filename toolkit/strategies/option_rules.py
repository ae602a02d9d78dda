"""Which options of `create` go together, and which have no effect: sentences before anything is started."""

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from toolkit.errors import StrategyError
from toolkit.strategies.options import Options, has_options, options_of, set_options

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["check", "check_served", "give"]

_LOG = logging.getLogger(__name__)
_ELSEWHERE = "train under mirrored or multi_worker"


def check(options: Options) -> None:
    """Checks that no option for replicas excludes another.

    Raises:
        StrategyError: One does.
    """
    exchange, local = options.gradients, options.local
    if local is None:
        return
    with_what = f"local steps ({local.every} between averages) with"
    none = "replicas that train by themselves exchange nothing in a step"
    _refuse(
        (
            options.shards is not None and options.shards > 1,
            f"{with_what} sharded layers",
            none,
            "Leave one of the two out",
        ),
        (
            options.optimizer_state != "replicated",
            f"{with_what} optimizer_state='sharded'",
            none,
            "Leave one of the two out",
        ),
        (exchange.compression != "none", f"{with_what} compressed gradients", none, "Leave one of the two out"),
        (
            exchange.dtype != "float32" and not local.start_step,
            f"{with_what} gradients in {exchange.dtype}",
            "gradients aren't exchanged",
            f"Give LocalSteps(dtype={exchange.dtype!r}), in which averages are sent",
        ),
    )


def check_served(options: Options) -> None:
    """Checks that parameter servers aren't given options that only replicas with an exchange can have.

    Raises:
        StrategyError: They are.
    """
    exchange, shards, local = options.gradients, options.shards, options.local
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
            options.optimizer_state != "replicated",
            f"optimizer_state={options.optimizer_state!r} with parameter servers",
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


def give(strategy: "tf.distribute.Strategy", options: Options) -> None:
    """Gives a strategy its options, unless it was created before with others.

    Raises:
        StrategyError: It was, or its replicas can't be divided into such groups.
    """
    from toolkit.strategies.exchange import mesh

    if options.shards is not None:
        mesh.check_shards(strategy, options.shards)
    if strategy.num_replicas_in_sync == 1:
        asked = ["PowerSGD"] if options.gradients.compression != "none" else []
        asked += ["LocalSteps"] if options.local is not None else []
        if asked:
            _LOG.warning("One replica trains, and exchanges nothing: %s has no effect", asked[0])
        return
    before = options_of(strategy)
    if has_options(strategy) and before != options:
        names = [each.name for each in dataclasses.fields(Options)]
        name = next(name for name in names if getattr(before, name) != getattr(options, name))
        raise StrategyError(
            asked=f"a second strategy of several workers, with {name}={_short(getattr(options, name))}",
            found=f"a process has one, and it was made with {name}={_short(getattr(before, name))}",
            remedy=f"Give {name} to both calls of create, or to the first one only and use what it has returned",
        )
    set_options(strategy, options)


def _short(value: Any) -> str:
    """Returns how to write a value, without fields that have their defaults."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    given = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
    others = (f"{name}={here!r}" for name, here in given if here != getattr(type(value), name, None))
    return f"{type(value).__name__}({', '.join(others)})"


def _refuse(*rows: tuple[bool, str, str, str]) -> None:
    for there, asked, found, remedy in rows:
        if there:
            raise StrategyError(asked=asked, found=found, remedy=remedy)
