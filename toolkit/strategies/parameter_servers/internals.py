"""Uses private parts of TensorFlow 2.21 and Keras 3, all in one place.

`tests/strategies/parameter_servers/test_internals.py` fails when one of them changes.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.upstream import private


def schedule(coordinator: tf.distribute.coordinator.ClusterCoordinator, work: Callable[[], None]) -> None:
    """Makes a worker's thread call `work`, again on a live worker if one died in it.

    The public `schedule` takes tf.functions only, calls the same one again without a word, and so
    applies a step twice. Here the work itself sees that it is called again.
    """
    coordinator._cluster.schedule(work, args=(), kwargs={})


def worker_index() -> int:
    """Returns which worker the calling work was given to."""
    return int(private.get_current_dispatch_context().worker_index)


def used_with_coordinator(strategy: tf.distribute.Strategy) -> None:
    """Marks a strategy as one with a coordinator; otherwise TensorFlow would warn of each traced function."""
    strategy.extended._allow_run_without_coordinator = True


def accessed(variable: Any) -> None:
    """Makes every open gradient tape watch the stand-in of a variable.

    Args:
        variable: Anything with `handle`, a tensor, and `trainable`.
    """
    private.variable_accessed(variable)


def computed_from(source: tf.Tensor, value: tf.Tensor, gradient: Callable[[Any], Any]) -> tf.Tensor:
    """Returns a value that gradient tapes take as computed from `source`, with this function as its gradient.

    `tf.custom_gradient` takes no `tf.IndexedSlices` for a gradient.

    Args:
        source: A tensor of any shape.
        value: What isn't seen to depend on it.
        gradient: Takes the gradient of `value`, and returns that of `source`.
    """
    with private.stop_recording():
        result = tf.identity(value)
    private.record_operation("ComputedFrom", [result], [source], lambda upstream: [gradient(upstream)])
    return result


def apply_if_finite(
    optimizer: keras.optimizers.LossScaleOptimizer, grads: list, variables: list, skip: Callable
) -> None:
    """Does what a LossScaleOptimizer does on one device, and calls `skip` if a gradient has overflowed."""

    def overflowed() -> None:
        skip()
        optimizer._stateful_handle_non_finite_grads()

    keras.ops.cond(
        optimizer.check_finite(grads), lambda: optimizer._stateful_handle_finite_grads(grads, variables), overflowed
    )


def held(variable: Any) -> Any:
    """Returns the value of a `keras.Variable`, whatever scope is entered."""
    return variable._value


@contextlib.contextmanager
def gradients_through(optimizer: Any, function: Callable[[list], list]) -> Iterator[None]:
    """Passes gradients, clipped, to a function before they are applied.

    Args:
        optimizer: A Keras optimizer.
        function: Takes and returns a list of (gradient, `tf.Variable`), in the place of the sum over replicas.
    """
    optimizer._all_reduce_sum_gradients = function
    try:
        yield
    finally:
        del optimizer._all_reduce_sum_gradients
