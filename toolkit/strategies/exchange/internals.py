"""Uses private parts of TensorFlow; `tests/strategies/test_exchange_internals.py` fails if they change."""

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
    """Allows functions with collectives in loops under a strategy. Later calls do nothing."""
    ways = (getattr(strategy.extended, name, None) for name in ("_cross_device_ops", "_collective_ops"))
    for launcher in {id(each): each for way in ways for each in getattr(way, "_launchers", ())}.values():
        attach(launcher, "_use_unique_instance_key", _unique_outside_loops)


def communication_of(strategy: tf.distribute.Strategy) -> str:
    """Returns how the processes of a strategy exchange tensors: "nccl" or "ring"."""
    return kind_of(strategy.extended._communication_options)


def keep_first_replicas(variable: Any) -> None:
    """Makes a metric's variable, of which each replica has its own, read as the first replica's value and not as a sum.

    Args:
        variable: A `keras.Variable`.
    """
    held = variable._value
    if isinstance(held, tf.distribute.DistributedValues):
        held._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
        variable._aggregation = "only_first_replica"


def ordering_token(strategy: tf.distribute.Strategy, replica: int) -> tf.Tensor:
    """Returns the resource with which TensorFlow orders its calls of NCCL on one of this process's replicas.

    Other calls on the same device must be ordered by the same one.
    """
    return strategy.extended._cross_device_ops._launchers[replica]._get_ordering_token()


def runs_after(later: tf.Operation, earlier: tf.Operation) -> None:
    """Makes an operation of the graph being traced wait for another, which may have been created after it.

    `tf.control_dependencies` is public, but for operations that are still to be made.
    """
    later._add_control_input(earlier)


def _unique_outside_loops(original: Callable, launcher: Any) -> bool:
    """Numbers the collectives of a function that is traced in a branch or a loop.

    Else TensorFlow numbers them when it is called, through a placeholder that nothing feeds there:
    `compile(steps_per_execution=2)` then fails on several replicas with "You must feed a value for
    placeholder". All workers trace the same functions in the same order.
    """
    outer = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)
    return not getattr(outer, "is_control_flow_graph", False) and bool(original(launcher))
