"""A function for a worker, traced on the chief."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from toolkit.strategies.parameter_servers.variables import Variables

__all__ = ["Traced", "alone", "flat", "numbers", "trace"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """A function for a worker.

    Attributes:
        run: Takes (first, place, counting, data), as it was made for.
        assigned: How often a step assigns each of `Variables.counting`.
    """

    run: Any
    assigned: Sequence[int]


def trace(variables: Variables, replica: Callable, signature: Sequence[Any], assigned: Sequence[int] = ()) -> Traced:
    """Traces what a worker runs.

    Args:
        variables: Of the model.
        replica: Takes (first, place, counting, data): two int64, the values of `variables.counting`, and
            what `signature` describes.
        signature: Of the data.
        assigned: A list that tracing fills.
    """
    strategy = variables.model.distribute_strategy
    scalar = tf.TensorSpec([], tf.int64)
    counting = [tf.TensorSpec(v.shape, v.dtype) for v in variables.counting]

    @tf.function(input_signature=[scalar, scalar, counting, list(signature)])
    @tf.autograph.experimental.do_not_convert
    def run(first: tf.Tensor, place: tf.Tensor, counting: list, data: list) -> Any:
        with alone(strategy):
            return replica(first, place, counting, data)

    return Traced(run=run.get_concrete_function(), assigned=assigned)


@contextlib.contextmanager
def alone(strategy: Any) -> Iterator[None]:
    """While entered, a function is traced as the one replica of a step.

    `strategy.run` would give the replica a thread of its own, and apply updates in another than the
    one in which Keras knows of the step's copies.
    """
    with strategy.scope(), _Alone(strategy, replica_id_in_sync_group=0):
        yield


class _Alone(tf.distribute.ReplicaContext):
    """Of the one replica that a step has: what is reduced over all of them is its own."""

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:  # noqa: ARG002
        return value

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:  # noqa: ARG002
        return value


def flat(values: Sequence[Any]) -> tf.Tensor:
    """One tensor to fetch instead of many."""
    if not values:
        return tf.zeros([0], tf.float64)
    return tf.concat([tf.reshape(tf.cast(value, tf.float64), [-1]) for value in values], 0)


def numbers(logs: Any) -> dict[str, tf.Tensor]:
    """Returns those of a step's logs that are numbers."""
    return {
        name: tf.cast(value, tf.float64)
        for name, value in (logs.items() if isinstance(logs, dict) else ())
        if getattr(value, "shape", None) is not None and value.shape.rank == 0
    }
