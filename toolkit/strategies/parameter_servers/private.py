"""What only private parts of TensorFlow 2.21 and Keras 3 allow, in one place.

`tests/strategies/parameter_servers/test_private.py` fails when one of them changes.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.coordinator import coordinator_context
from tensorflow.python.eager import tape

__all__ = ["accessed", "gradients_through", "schedule", "used_with_coordinator", "worker_index"]


def schedule(coordinator: tf.distribute.coordinator.ClusterCoordinator, work: Callable[[], None]) -> None:
    """Has a worker's thread call `work`, again on a worker that lives where one died in it.

    The public `schedule` takes tf.functions only, calls the same one again without a word, and so
    applies a step twice. Here the work itself sees that it is called again.
    """
    coordinator._cluster.schedule(work, args=(), kwargs={})


def worker_index() -> int:
    """Returns which worker the work that calls this was given to."""
    return int(coordinator_context.get_current_dispatch_context().worker_index)


def used_with_coordinator(strategy: tf.distribute.Strategy) -> None:
    """Marks a strategy as one whose steps a coordinator schedules: TensorFlow would warn of each traced function."""
    strategy.extended._allow_run_without_coordinator = True


def accessed(variable: Any) -> None:
    """Has every gradient tape that is open watch what takes the place of a variable.

    Args:
        variable: Anything with `handle`, a tensor, and `trainable`.
    """
    tape.variable_accessed(variable)


@contextlib.contextmanager
def gradients_through(optimizer: Any, function: Callable[[list], list]) -> Iterator[None]:
    """Hands gradients, clipped, to a function before they are applied.

    Args:
        optimizer: A Keras optimizer.
        function: Takes and returns a list of (gradient, `tf.Variable`), in the place of the sum over replicas.
    """
    optimizer._all_reduce_sum_gradients = function
    try:
        yield
    finally:
        del optimizer._all_reduce_sum_gradients
