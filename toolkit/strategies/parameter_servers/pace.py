"""How many steps a worker is sent at once."""

import logging

from toolkit.strategies.parameter_servers.options import ParameterServerOptions

__all__ = ["Pace"]

_LOG = logging.getLogger(__name__)
_DISPATCH_SECONDS = 0.2  # A dispatch that takes so long costs little beside what it does.
_MOST_STEPS = 16  # In a dispatch: its function holds each of them.
_WORTH_IT = 32  # Dispatches that must be left for a longer one to be worth its tracing.


class Pace:
    """Lengthens dispatches where a single step is too short for one.

    Args:
        options: What was asked.
        workers: How many there are.

    Attributes:
        steps: To be sent at once.
    """

    def __init__(self, options: ParameterServerOptions, workers: int) -> None:
        self.steps = options.steps_per_dispatch or 1
        self._settled = options.steps_per_dispatch is not None or options.synchronous
        self._workers = workers
        self._most = _MOST_STEPS
        if options.max_staleness is not None and workers > 1:
            # Two dispatches of each other worker may come between the first step of one and its last.
            self._most = max(1, min(_MOST_STEPS, options.max_staleness // (2 * (workers - 1))))
        self._shortest = float("inf")  # The first ones take longer: their function is made on the worker.
        self._count = 0

    def note(self, seconds: float) -> None:
        """Takes how long a single step has taken a worker."""
        self._shortest = min(self._shortest, seconds)
        self._count += 1

    def adapt(self, left: int | None) -> None:
        """Looks whether several steps would be better.

        Args:
            left: Steps still to come, None where nobody knows.
        """
        if self._settled or self._most == 1 or self._count < 4 * self._workers:
            return
        wanted = min(self._most, int(_DISPATCH_SECONDS / max(1e-4, self._shortest)))
        wanted = 1 << max(0, wanted.bit_length() - 1)
        while left is not None and wanted > 1 and left <= _WORTH_IT * wanted:
            wanted //= 2
        if wanted > 1:
            self._settled = True
            self.steps = wanted
            _LOG.info("A step takes a worker %.0f ms: %d are sent at once", 1000 * self._shortest, wanted)
