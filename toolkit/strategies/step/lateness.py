"""Measures how long this process waits in each step for the slowest one: the time around a step's first exchange.

That exchange is of the replicas' numbers of examples, which are known as soon as a replica has its input: who comes
to it last keeps the others waiting, by its input or by what it does between steps, such as in callbacks. Two readings
of a clock and an addition, in the graph.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from toolkit.strategies.context import here
from toolkit.strategies.exchange.mesh import mesh_of
from toolkit.strategies.processes.agreement import process_index, processes

__all__ = ["timed", "waited"]

_handle: Any = None  # The sum of waited seconds, for the whole process.


def timed(exchange: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """Returns a step's first exchange of a tensor; with several processes, it measures the exchange's time.

    Args:
        exchange: A collective.
        x: Known as soon as this replica has its input.
    """
    strategy = tf.distribute.get_strategy()
    if processes(strategy) == 1 or here.step.replica != _first_here(strategy):
        return exchange(x)
    with tf.device("CPU:0"):
        with tf.control_dependencies([x]):
            before = tf.timestamp()
        with tf.control_dependencies([before]):
            x = tf.identity(x)
    found = exchange(x)
    with tf.device("CPU:0"), tf.control_dependencies([found]):
        tf.raw_ops.AssignAddVariableOp(resource=_counter(), value=tf.timestamp() - before)
    return found


def waited() -> float:
    """Returns how many seconds this process has waited for others at the beginning of steps."""
    if _handle is None:
        return 0.0
    return float(tf.raw_ops.ReadVariableOp(resource=_handle, dtype=tf.float64).numpy())


def _first_here(strategy: Any) -> int:
    """Returns the id of this process's first replica."""
    mesh = mesh_of()
    return process_index(strategy) * (mesh.shards * mesh.groups // processes(strategy))


def _counter() -> Any:
    global _handle
    if _handle is None:
        # Not with tf.Variable, of which a strategy would create one for all replicas.
        with tf.init_scope(), tf.device("CPU:0"):
            _handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=[], shared_name="toolkit_waited")
            tf.raw_ops.AssignVariableOp(resource=_handle, value=tf.zeros([], tf.float64))
    return _handle
