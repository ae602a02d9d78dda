"""Which rows of a parametrised battery `.ci/run` has: a few, as a rule the hardest; all others are `long`."""

from collections.abc import Iterable
from typing import Any

import pytest


def rows(every: Iterable[Any], in_ci: Any) -> list:
    """Returns a battery's rows, for `pytest.mark.parametrize`.

    Args:
        every: Their names, or tuples of values.
        in_ci: One that `.ci/run` has, or a list of them.
    """
    few = in_ci if isinstance(in_ci, list) else [in_ci]
    every = list(every)
    unknown = [each for each in few if each not in every]
    assert not unknown, f"no rows: {unknown}"
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=() if row in few else pytest.mark.long)
        for row in every
    ]
