"""Options of strategies: how gradients are exchanged, where variables live, how asynchronous training is.

`check_together` and `check_served` refuse, before anything is started, options that exclude one another.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from toolkit.errors import StrategyError
from toolkit.strategies.compression import Compression

if TYPE_CHECKING:
    import tensorflow as tf


COMMUNICATIONS = ("auto", "nccl", "ring")  # How processes exchange tensors.
DTYPES = ("float32", "float16", "bfloat16")
COMPRESSIONS = ("none", "powersgd")
WEIGHTS = ("replicated", "sharded")  # Whether each replica has all weights at rest.
OPTIMIZER_STATES = ("replicated", "sharded")  # Whether each replica has all of an optimizer's slots.
CHECKS = ("none", "first_step")  # When a step is compared with one device's.
BATCH_STATISTICS = ("batch", "replica")  # By which BatchNormalization normalises in a step of `fit`.
PLACEMENTS = ("round_robin", "balanced", "sharded")  # Of variables on parameter servers.
_ATTRIBUTE = "_toolkit_options"


def _check(name: str, value: Any, *, least: int, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _wrong(name, value, f"it must be a whole number of at least {least}", f"{least} or more")


def _wrong(name: str, value: Any, found: str, give: str) -> StrategyError:
    return StrategyError(asked=f"{name}={value!r}", found=found, remedy=f"Give {give}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientExchange:
    """How replicas exchange gradients.

    Attributes:
        dtype: The communication dtype: "float32" for the gradients' own, or "float16" or "bfloat16" for half the
            bytes. float16 ends at 65,504, bfloat16 has 8 bits of precision. GPUs also add in it, processes that
            exchange without NCCL in the gradients' own.
        bytes_per_pack: Between processes, gradients are sent in packs of about so many bytes, each while others are
            computed; 0 for all in one, when the last is known; None for 512 KiB, the best size at 1 Gbit/s.

        compression: "none", or "powersgd" (arXiv 1905.13727): of each matrix's gradient two thin factors are sent, and
            what they leave out is added to the next step's; or your own `toolkit.strategies.Compression`. Other
            numbers than one device's: it is taken by name only.
        rank: Columns of the factors of powersgd, which for a matrix [n, m] have rank * (n + m) elements.
        start_step: In `fit`, steps of the whole training before compression begins. Early gradients are the largest.

    Raises:
        StrategyError: There is no such dtype or compression, a size is negative, or the rank less than 1.
    """

    dtype: str = "float32"
    bytes_per_pack: int | None = None
    compression: str | Compression = "none"
    rank: int = 4
    start_step: int = 0

    def __post_init__(self) -> None:
        StrategyError.check_choice(
            self.dtype,
            DTYPES,
            asked=f"gradients with communication dtype {self.dtype}",
            found="gradients aren't exchanged in that dtype",
        )
        if not isinstance(self.compression, Compression):
            asked = f"gradient compression {self.compression!r}"
            StrategyError.check_choice(self.compression, COMPRESSIONS, asked=asked)
        _check("rank", self.rank, least=1)
        _check("start_step", self.start_step, least=0)
        for name, default in (("rank", 4), ("start_step", 0)):
            if self.compression == "none" and (value := getattr(self, name)) != default:
                raise _wrong(name, value, "gradients aren't compressed", 'compression="powersgd" too')
        if isinstance(self.compression, Compression) and self.rank != 4:
            raise _wrong("rank", self.rank, f"{self.compression} has no such option", 'it with compression="powersgd"')
        if self.bytes_per_pack is not None and self.bytes_per_pack < 0:
            raise StrategyError(
                asked=f"gradients in packs of {self.bytes_per_pack} bytes",
                found="a pack can't be smaller than 0",
                remedy="Leave bytes_per_pack out, or give such as 4194304",
            )

    @property
    def compressed_by(self) -> str:
        """How gradients are compressed, in words: "powersgd, rank 4"."""
        return f"{self.compression}, rank {self.rank}" if isinstance(self.compression, str) else str(self.compression)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """Local steps: replicas train alone and average their weights every so many steps (local SGD, arXiv 1805.09767).

    Other numbers than one device's: it is taken by name only. Of the optimizer's own variables, such as momentum, each
    replica has its own; they are averaged at an epoch's end, where all agree.

    Attributes:
        every: Steps between two averages, or as many more as `steps_per_execution` makes at once. An epoch ends with
            an average too.
        start_step: In `fit`, steps of the whole training before it begins; until then gradients are exchanged
            (post-local SGD, arXiv 1808.07217).
        quadratic: With a falling learning rate, (quadratic / rate) ** 2 steps where these are more than `every` (arXiv
            2310.14423); None for `every`.
        outer_rate: What the average has changed is taken times this (0.7 in DiLoCo, arXiv 2311.08105).
        outer_momentum: Nesterov's, of those changes (0.9 in DiLoCo).
        dtype: In which changes are sent: "float32", "float16" or "bfloat16".

    Raises:
        StrategyError: A value is out of its range.
    """

    every: int = 16
    start_step: int = 0
    quadratic: float | None = None
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _check("every", self.every, least=1)
        _check("start_step", self.start_step, least=0)
        StrategyError.check_choice(self.dtype, DTYPES, asked=f"local steps with communication dtype {self.dtype}")
        if self.quadratic is not None and not self.quadratic > 0:
            raise _wrong("quadratic", self.quadratic, "it must be above 0", "such as 0.2")
        if not self.outer_rate > 0:
            raise _wrong("outer_rate", self.outer_rate, "it must be above 0", "such as 0.7")
        if not 0 <= self.outer_momentum < 1:
            raise _wrong("outer_momentum", self.outer_momentum, "it must be in [0, 1)", "such as 0.9")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a strategy of replicas.

    Attributes:
        gradients: How replicas exchange gradients.
        local: How they train by themselves; None where they don't.
        optimizer_state: "replicated", or "sharded": each replica keeps its part of an optimizer's state.
        shards: How many replicas hold one copy of sharded layers, or of sharded weights; None for all.
        weights: "replicated", or "sharded": each replica keeps its part of the weights, and of their slots.
        batch_statistics: "batch": BatchNormalization normalises the whole batch in a step of `fit`, and replicas
            exchange sums for it; "replica": each replica normalises its own share.
        check: "first_step": the first step of each function of a model is also computed on one device and compared;
            "none": it isn't.

    Raises:
        StrategyError: A value is of another kind, or out of its range.
    """

    gradients: GradientExchange = dataclasses.field(default_factory=GradientExchange)
    local: LocalSteps | None = None
    optimizer_state: str = "replicated"
    shards: int | None = None
    weights: str = "replicated"
    batch_statistics: str = "batch"
    check: str = "none"

    def __post_init__(self) -> None:
        for name, kind, such in (
            ("gradients", GradientExchange, 'GradientExchange(compression="powersgd")'),
            ("local", LocalSteps, "LocalSteps(every=16)"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind) and (name, value) != ("local", None):
                raise _wrong(name, value, f"it must be a {kind.__name__}", f"{name}=toolkit.strategies.{such}")
        state = self.optimizer_state
        StrategyError.check_choice(state, OPTIMIZER_STATES, asked=f"optimizer_state={state!r}")
        StrategyError.check_choice(self.weights, WEIGHTS, asked=f"weights={self.weights!r}")
        statistics = self.batch_statistics
        StrategyError.check_choice(statistics, BATCH_STATISTICS, asked=f"batch_statistics={statistics!r}")
        StrategyError.check_choice(self.check, CHECKS, asked=f"check={self.check!r}")


def set_options(strategy: "tf.distribute.Strategy", options: Options) -> None:
    """Sets the options for models that are compiled under a strategy from now on."""
    setattr(strategy, _ATTRIBUTE, options)


def options_of(strategy: "tf.distribute.Strategy") -> Options:
    """Returns a strategy's options; the defaults if it has none."""
    return getattr(strategy, _ATTRIBUTE, _DEFAULT)


def has_options(strategy: "tf.distribute.Strategy") -> bool:
    """Returns whether a strategy has options."""
    return hasattr(strategy, _ATTRIBUTE)


_DEFAULT = Options()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterServerOptions:
    """How parameter servers are used.

    Attributes:
        variables: "round_robin", each next variable on the next ps, as TensorFlow does it; "balanced",
            each on the ps that holds the fewest bytes; "sharded", balanced, and the rows of large ones
            sharded over several ps.
        shards: The number of shards of each sharded variable; None for one on each ps.
        min_shard_bytes: No shard is smaller; so smaller variables stay whole.
        synchronous: Rounds: the workers share each batch, and their gradients are applied together.
        max_staleness: How many updates may be applied between the reading of parameters and the update by the
            gradient that was computed from them; None for no limit. One is a lot for SGD with momentum 0.9, or Adam
            at a high rate: even one device that applies each gradient one step late learns as badly as two workers
            without a limit.
        steps_per_dispatch: How many steps a worker is sent at once; None for what suits their length.
        min_lazy_bytes: Tables of this size or more, such as an Embedding's, are updated lazily: optimizers with moving
            averages, such as Adam, update a row only in steps that look it up. Smaller tables are updated as on one
            device. SGD without momentum and Adagrad update tables of any size as on one device.

    Raises:
        StrategyError: A value is out of its range, or two exclude each other.
    """

    variables: str = "round_robin"
    shards: int | None = None
    min_shard_bytes: int = 256 << 10
    synchronous: bool = False
    max_staleness: int | None = None
    steps_per_dispatch: int | None = None
    min_lazy_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.variables not in PLACEMENTS:
            raise _wrong("variables", self.variables, "there is no such placement", "one of " + ", ".join(PLACEMENTS))
        _check("shards", self.shards, least=1, optional=True)
        _check("min_shard_bytes", self.min_shard_bytes, least=1)
        _check("min_lazy_bytes", self.min_lazy_bytes, least=1)
        _check("max_staleness", self.max_staleness, least=0, optional=True)
        _check("steps_per_dispatch", self.steps_per_dispatch, least=1, optional=True)
        if self.shards is not None and self.variables != "sharded":
            raise _wrong(
                "shards", self.shards, f"variables={self.variables!r} keeps variables whole", "variables='sharded' too"
            )
        if self.synchronous and (self.max_staleness or (self.steps_per_dispatch or 1) > 1):
            raise StrategyError(
                asked="synchronous rounds with "
                + ("max_staleness" if self.max_staleness else "several steps per dispatch"),
                found="a round computes all gradients from the same parameters, one step at a time",
                remedy="Leave one of the two out",
            )


_ELSEWHERE = "train under mirrored or multi_worker"


def check_together(options: Options) -> None:
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
        (options.weights != "replicated", f"{with_what} weights='sharded'", none, "Leave one of the two out"),
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
            options.weights != "replicated",
            f"weights={options.weights!r} with parameter servers",
            "there the ps tasks hold the weights",
            "Leave it out, or give ParameterServerOptions(variables='sharded')",
        ),
        (
            local is not None,
            f"local steps ({getattr(local, 'every', '')} between averages) with parameter servers",
            "there workers push each gradient to the ps tasks, and keep no weights",
            f"Leave local out, or {_ELSEWHERE}",
        ),
    )


def _refuse(*rows: tuple[bool, str, str, str]) -> None:
    for there, asked, found, remedy in rows:
        if there:
            raise StrategyError(asked=asked, found=found, remedy=remedy)
