"""The share that can't be parallelised.

Strong scaling, a fixed global batch: Amdahl's law (1967), speed-up = 1 / (s + (1 - s) / n).
Weak scaling, a fixed batch of each replica: Gustafson's law (1988), speed-up = n - s (n - 1).
"""

import dataclasses
from collections.abc import Sequence

__all__ = ["Size", "serial_share", "speed_ups"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """What was measured at one size: medians over the rounds.

    Attributes:
        replicas: How many.
        images_per_second: All replicas together.
        global_batch: Examples of a step.
        emulated: Whether replicas share the cores of this machine.
        step: Milliseconds of a step and its parts, as `toolkit.training.breakdown` has them; None where not measured.
    """

    replicas: int
    images_per_second: float
    global_batch: int
    emulated: bool
    step: dict[str, float] | None

    @property
    def milliseconds(self) -> float:
        """Of a step."""
        return 1e3 * self.global_batch / self.images_per_second


def speed_ups(sizes: Sequence[Size]) -> list[float]:
    """Returns each size's images per second over what one replica of the first size does."""
    one = sizes[0].images_per_second / sizes[0].replicas
    return [size.images_per_second / one for size in sizes]


def serial_share(sizes: Sequence[Size], *, weak: bool) -> float | None:
    """Returns the share of one replica's time that more replicas don't shorten, by least squares over all sizes.

    From 0, all of it can be parallelised, to 1, none; beyond that more replicas are slower than one. None for one size.

    Args:
        sizes: The first is what the others are compared with; its own share isn't seen where it has several replicas.
        weak: Which of the two laws.
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
