"""The functions of a model, each traced once, and their calls for workers."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from toolkit.strategies.parameter_servers import functions, internals
from toolkit.strategies.parameter_servers.rounds import Rounds
from toolkit.strategies.parameter_servers.sources import Stream
from toolkit.strategies.parameter_servers.totals import Counters
from toolkit.strategies.parameter_servers.variables import Variables

__all__ = ["Calls"]


class Calls:
    """Creates calls for workers: Python functions with all arguments bound."""

    def __init__(self, variables: Variables, counters: Counters) -> None:
        self._variables = variables
        self._counters = counters
        self._lock = threading.Lock()
        self._made: dict[Any, Any] = {}

    def steps(
        self, stream: Stream, items: Sequence[Any], first: int, since: int, *, only: frozenset | None = None
    ) -> Callable[[bool], Any]:
        """Returns a call of some training steps; its argument says whether the worker's process may be another one.

        Args:
            stream: Where their batches come from.
            items: What the stream's reader took for each step.
            first: The first step's number in the ledgers.
            since: How many steps before the first one the chief has last set what counts.
            only: Devices of the ps whose variables are to be updated; None for all.
        """

        def make() -> Any:
            run, assigned, conditional = functions.training(
                self._variables, stream.batch, signature=stream.signature(len(items)), count=len(items), only=only
            )
            self._counters.note(assigned, conditional)
            return run

        run = self._once(("steps", stream.key, len(items), only), make)
        return self._call(run, stream, items, first, since)

    def build_optimizers(self, stream: Stream) -> None:
        """Creates the variables of optimizers that a step is the first to use."""
        with tf.device(None):
            functions.build_optimizers(self._variables, stream.batch, signature=stream.signature(1))

    def batches(self, stream: Stream, items: Sequence[Any]) -> Callable[[bool], Any]:
        """Returns a call that evaluates some batches, as `steps` does."""
        run = self._once(
            ("batches", stream.key),
            lambda: functions.evaluation(self._variables, stream.batch, signature=stream.signature(1)),
        )
        return self._call(run, stream, items, len(items), 0)

    def batch(self, batch: Any) -> Callable[[], Any]:
        """Returns a call that predicts a batch of Keras's."""
        there = [isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(batch)]
        tensors = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor)]

        def whole(given: list) -> Any:
            rest = iter(given)
            return tf.nest.pack_sequence_as(batch, [next(rest) if real else None for real in there])

        signature = [tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in tensors]
        structure = tf.nest.map_structure(lambda _: 0, batch)
        run = self._once(
            ("batch", str(signature), str(structure)),
            lambda: functions.prediction(self._variables, whole, signature=signature),
        )
        zero, counters = tf.constant(0, tf.int64), self._counters_after(0)
        return lambda: run(zero, zero, counters, tensors)

    def round(self, stream: Stream, shares: int) -> tuple[Any, Any, str | None]:
        """Returns the functions of a share and of applying a round, or the reason why steps can't be divided."""

        def make() -> Any:
            rounds = Rounds(self._variables, shares)
            run, assigned = rounds.share(stream)
            if rounds.undivided is not None:
                return None, None, rounds.undivided
            applying, conditional = rounds.applying()
            self._counters.note(assigned, conditional)
            return run, applying, None

        return self._once(("round", stream.key), make)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        with self._lock:
            if key not in self._made:
                with tf.device(None):  # Created in a worker's thread, it serves the others as well.
                    self._made[key] = make()
            return self._made[key]

    def _counters_after(self, steps: int) -> list[tf.Tensor]:
        return [_on_chief(value) for value in self._counters.after(steps)]

    def _call(self, run: Any, stream: Stream, items: Sequence[Any], second: int, since: int) -> Callable[[bool], Any]:
        counters = self._counters_after(since)
        scalars = _on_chief(np.int64(items[0] if stream.kind == "numbered" else 0)), _on_chief(np.int64(second))
        sent = [leaf for item in items for leaf in item] if stream.kind == "sent" else []

        def call(restarted: bool) -> Any:
            # Known when other workers' steps are done.
            for index, value in self._counters.branched_after(since).items():
                counters[index] = _on_chief(value)
            if stream.kind == "per worker":
                return run(*scalars, counters, [stream.iterator(internals.worker_index(), restarted=restarted)])
            return run(*scalars, counters, sent)

        return call


def _on_chief(value: np.generic | np.ndarray) -> tf.Tensor:
    with tf.device(None), tf.device("CPU:0"):  # A worker's thread has that worker's device.
        return tf.constant(value)
