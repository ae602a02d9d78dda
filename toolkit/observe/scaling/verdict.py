"""Conclusions from measured sizes: the serial share, what limits the speed, and what to do.

Strong scaling, a fixed global batch: Amdahl's law (1967), speed-up = 1 / (s + (1 - s) / n).
Weak scaling, a fixed batch of each replica: Gustafson's law (1988), speed-up = n - s (n - 1).
"""

import dataclasses
from collections.abc import Iterator, Sequence

__all__ = ["Size", "bound", "serial_share", "share_cores", "speed_ups", "verdict"]

_NOTABLE = 0.2  # A smaller share of a step doesn't limit the speed.
_ADVICE = {
    "communication": "Give each replica more examples (--global_batch_size), send gradients in 16 bits "
    "(--gradient_dtype=float16), or look at `toolkit plan`: sharded FC layers exchange less.",
    "input": "Make batches faster: read from memory or a faster disk, do less work for each example in Python, or "
    "prefetch more; more replicas won't help.",
    "other": "Python between steps takes its time: fewer callbacks that act on every batch, or "
    "compile(steps_per_execution=10).",
    "compute": "More replicas, or faster ones, help; nothing else is in the way.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The measurements at one size: medians over the rounds.

    Attributes:
        replicas: The number of replicas.
        examples_per_second: The rate of all replicas together.
        global_batch: Examples of a step.
        emulated: Whether replicas share the cores of this machine.
        step: Milliseconds of a step and its parts, as the `Breakdown` of a run has them; None if not measured.
    """

    replicas: int
    examples_per_second: float
    global_batch: int
    emulated: bool
    step: dict[str, float] | None

    @property
    def milliseconds(self) -> float:
        """The time of a step."""
        return 1e3 * self.global_batch / self.examples_per_second


def speed_ups(sizes: Sequence[Size]) -> list[float]:
    """Returns each size's examples per second relative to one replica of the first size."""
    one = sizes[0].examples_per_second / sizes[0].replicas
    return [size.examples_per_second / one for size in sizes]


def serial_share(sizes: Sequence[Size], *, weak: bool) -> float | None:
    """Returns the share of one replica's time that more replicas don't shorten, by least squares over all sizes.

    From 0, all of it can be parallelised, to 1, none; beyond that more replicas are slower than one. None for one size.

    Args:
        sizes: The first is what the others are compared with; its own share isn't seen where it has several replicas.
        weak: Whether to take Gustafson's law, and not Amdahl's.
    """
    pairs = [
        (size.replicas / sizes[0].replicas, up / sizes[0].replicas)
        for size, up in zip(sizes, speed_ups(sizes), strict=True)
    ][1:]
    if not pairs:
        return None
    # Gustafson: n - S = s (n - 1). Amdahl: 1/S - 1/n = s (1 - 1/n), for one size Karp and Flatt's measure (1990).
    points = [(n - 1, n - up) if weak else (1 - 1 / n, 1 / up - 1 / n) for n, up in pairs]
    return max(0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points))


def bound(size: Size) -> str | None:
    """Returns what limits a size: "communication", "input", "other" or "compute"; None without a profile."""
    if not size.step or not size.step.get("milliseconds"):
        return None
    shares = {
        part: size.step.get(part, 0.0) / size.step["milliseconds"] for part in ("communication", "input", "other")
    }
    worst = max(shares, key=shares.__getitem__)
    return worst if shares[worst] >= _NOTABLE else "compute"


def share_cores(sizes: Sequence[Size]) -> bool:
    """Returns whether replicas share CPU cores, so that their speed says nothing."""
    return sizes[-1].emulated and sizes[-1].replicas > 1


def verdict(sizes: Sequence[Size], *, weak: bool) -> list[str]:
    """Returns sentences: how well it scales, what limits it, and what to do; or why that can't be judged.

    Args:
        sizes: As measured, smallest first.
        weak: Whether each replica's batch was kept, rather than the global batch.
    """
    if share_cores(sizes):
        sentences = [
            "These replicas share the same CPU cores: the figures show that the recipe runs, but not how it scales. "
            "Measure it with one GPU for each replica, or with one host for each (--kind=workers)."
        ]
    else:
        sentences = [*_speed(sizes, weak=weak), *_bound(sizes[-1])]
    return [*sentences, *([_batch(sizes, weak=weak)] if len(sizes) > 1 else [])]


def _speed(sizes: Sequence[Size], *, weak: bool) -> Iterator[str]:
    last, up = sizes[-1], speed_ups(sizes)[-1]
    share = serial_share(sizes, weak=weak)
    if share is None:
        return
    yield f"{last.replicas} replicas are {up:.2f} times as fast as one: an efficiency of {up / last.replicas:.0%}."
    if share >= 1:
        yield "More replicas don't make it faster."
        return
    yield f"{share:.0%} of one replica's time can't be parallelised ({'Gustafson' if weak else 'Amdahl'}'s law)."
    if share > 0 and not weak:
        yield f"With this batch, no number of replicas is more than {1 / share:.1f} times as fast."


def _bound(size: Size) -> Iterator[str]:
    what = bound(size)
    if what is not None and size.step is not None:
        part = size.step.get(what, 0.0) / size.step["milliseconds"]
        name = "Python" if what == "other" else what
        yield f"With {size.replicas} replicas, {name} limits the speed ({part:.0%} of a step). {_ADVICE[what]}"


def _batch(sizes: Sequence[Size], *, weak: bool) -> str:
    first, last = sizes[0], sizes[-1]
    if weak:
        return (
            f"The global batch grew from {first.global_batch:,} to {last.global_batch:,}: the recipes raise the "
            "learning rate in proportion and warm it up (Goyal et al., arXiv 1706.02677). Check the accuracy too "
            "before you use that batch."
        )
    each = last.global_batch / last.replicas
    return (
        f"The global batch stayed {last.global_batch:,}, so each replica has {each:g} examples, and the learning rate "
        "needs no change. Use --weak to keep each replica's batch instead."
    )
