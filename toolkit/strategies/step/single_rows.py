"""Says why a step can't take the rows of a batch apart: their number isn't known when it is traced."""

import contextlib
import re
from collections.abc import Iterator

from toolkit.errors import StrategyError

__all__ = ["rows_stay_together"]

_APART = re.compile("Cannot infer argument `num`|unknown first dimension")


@contextlib.contextmanager
def rows_stay_together() -> Iterator[None]:
    """A context in which a step is traced.

    Raises:
        StrategyError: The step takes rows apart, as `tf.unstack` does.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        if not _APART.search(str(error)):
            raise
        raise StrategyError(
            asked="the step takes a tensor apart along axis 0, such as by tf.unstack",
            found="axis 0 of each component of a batch is the batch, whose size isn't known when the step is traced",
            remedy="Take rows by their number, such as data[0], or give what was stacked there as components of their "
            "own, such as (anchors, positives)",
        ) from error
