"""Metrics whose state isn't a sum, such as a running maximum: the chief can't add up what steps do to them.

Each step is sent the state that the one before has left, and none may be under way beside it. Which metrics these are
shows when a step is traced.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from toolkit.errors import StrategyError
from toolkit.strategies.parameter_servers.variables import Variables
from toolkit.strategies.step.batch_share import WholeShare, entered

__all__ = ["NotSums", "check_in_turn", "whole_batch"]


class NotSums(Exception):
    """Metrics whose state isn't a sum.

    Args:
        by_variable: By the ids of their variables, their names.
    """

    def __init__(self, by_variable: dict[int, str]) -> None:
        super().__init__(by_variable)
        self.by_variable = by_variable


@contextlib.contextmanager
def whole_batch(variables: Variables) -> Iterator[None]:
    """A context in which a step of a whole batch is traced.

    Raises:
        NotSums: At its end, where it has updated metrics whose state is no sum, and which aren't known for it.
    """
    found: list[Any] = []
    with entered(WholeShare(found.append)):
        yield
    new = {id(v): metric.name for metric in found for v in metric.variables if id(v) not in variables.told}
    if new:
        raise NotSums(new)


def check_in_turn(variables: Variables, names: Iterable[str]) -> None:
    """Checks that no two steps are under way at once if there are such metrics.

    Raises:
        StrategyError: There are, and several workers train at the same time.
    """
    first = next(iter(names), None)
    if first is not None and not variables.in_turn:
        raise StrategyError(
            asked=f"the metric {first} beside parameter servers",
            found="its state isn't a sum over examples, and several workers train at the same time",
            remedy="Give ParameterServerOptions(max_staleness=0), or make it of sums",
        )
