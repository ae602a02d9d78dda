"""`Model.export` under several replicas: whole weights, and one process that writes.

A SavedModel has one variable where a strategy has one on each device: of a sharded weight, the first shard.
"""

import contextlib
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from toolkit.strategies.processes.agreement import extremes, is_chief, processes
from toolkit.strategies.variables.sharded_variable import ReplicaShardedVariable

__all__ = ["export"]


def export(original: Callable, model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """Exports the same files as on one device."""
    strategy = model.distribute_strategy
    together = processes(strategy) > 1
    with contextlib.ExitStack() as stack:
        for variable in model.variables:
            if isinstance(variable, ReplicaShardedVariable):
                stack.enter_context(variable.in_one_place())
        if together and not is_chief(strategy):  # The directory is shared; for tracing, all processes use the same.
            filepath = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toolkit-")), "exported")
        result = original(model, filepath, *args, **kwargs)
    if together:  # The other processes may load it next.
        extremes(strategy, np.array([0], np.int64))
    return result
