"""Whether all workers hold the same weights: training goes on without a word if they don't."""

import zlib
from typing import Any

import keras
import numpy as np

from toolkit.errors import StrategyError
from toolkit.strategies.agreement import extremes
from toolkit.strategies.sharded import ShardedVariable

__all__ = ["check_equal", "variables_of"]


def variables_of(model: Any) -> list:
    """Returns the variables of a model and of its optimizer, if it has one."""
    return [*model.weights, *(model.optimizer.variables if model.optimizer else [])]


def check_equal(model: Any) -> None:
    """Compares weights, optimizer and the epoch to begin with, bit for bit. It is a collective.

    Of a sharded variable each worker holds parts of its own, which nothing can be compared with.

    Args:
        model: A built `keras.Model` whose strategy has several processes.

    Raises:
        StrategyError: On every worker, where any two differ.
    """
    variables = [variable for variable in variables_of(model) if not isinstance(variable, ShardedVariable)]
    marks = [zlib.crc32(np.ascontiguousarray(keras.ops.convert_to_numpy(v)).tobytes()) for v in variables]
    # BackupAndRestore leaves the epoch here.
    marks.append(getattr(model, "_initial_epoch", None) or 0)
    lowest, highest = extremes(model.distribute_strategy, np.array(marks, np.int64))
    differ = np.flatnonzero(lowest != highest)
    if len(differ):
        names = ["the epoch to begin with" if n == len(variables) else variables[n].path for n in differ[:3]]
        raise StrategyError(
            asked="all workers train the same model",
            found=f"their weights differ ({', '.join(names)}{' and others' if len(differ) > 3 else ''})",
            remedy="Load or set weights on every worker alike, from a file that all of them see",
        )
