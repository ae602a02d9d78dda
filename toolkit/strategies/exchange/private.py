"""What only private parts of TensorFlow allow; `tests/strategies/test_exchange_private.py` fails when they change."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from toolkit.strategies.exchange.communication import kind_of
from toolkit.support.wrapping import attach

__all__ = [
    "communication_of",
    "keep_first_replicas",
    "number_by_call",
    "ordering_token",
    "runs_after",
]


def number_by_call(strategy: tf.distribute.Strategy) -> None:
    """Lets a function with collectives be called in a loop under a strategy; called again, it does nothing."""
    ways = (getattr(strategy.extended, name, None) for name in ("_cross_device_ops", "_collective_ops"))
    for launcher in {id(each): each for way in ways for each in getattr(way, "_launchers", ())}.values():
        attach(launcher, "_use_unique_instance_key", _unique_outside_loops)


def communication_of(strategy: tf.distribute.Strategy) -> str:
    """Returns what the processes of a strategy exchange tensors by: "nccl" or "ring"."""
    return kind_of(strategy.extended._communication_options)


def keep_first_replicas(variable: Any) -> None:
    """Has a metric's variable, which each replica keeps for itself, be the first replica's where it is read, not a sum.

    Args:
        variable: A `keras.Variable`.
    """
    held = variable._value
    if isinstance(held, tf.distribute.DistributedValues):
        held._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
        variable._aggregation = "only_first_replica"


def ordering_token(strategy: tf.distribute.Strategy, replica: int) -> tf.Tensor:
    """Returns the resource by which TensorFlow orders its calls of NCCL on one of this process's replicas.

    Other calls on the same device must be ordered by the same one.
    """
    return strategy.extended._cross_device_ops._launchers[replica]._get_ordering_token()


def runs_after(later: tf.Operation, earlier: tf.Operation) -> None:
    """Has one operation of a graph that is being traced wait for another, which was perhaps made after it.

    `tf.control_dependencies` is public, but for operations that are still to be made.
    """
    later._add_control_input(earlier)


def _unique_outside_loops(original: Callable, launcher: Any) -> bool:
    """Numbers the collectives of a function that is called in a branch of a loop when it is traced.

    Else TensorFlow numbers them when it is called, through a placeholder that nothing feeds there:
    `compile(steps_per_execution=2)` then fails on several replicas with "You must feed a value for
    placeholder". All workers trace the same functions in the same order.
    """
    outer = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)
    return not getattr(outer, "is_control_flow_graph", False) and bool(original(launcher))
