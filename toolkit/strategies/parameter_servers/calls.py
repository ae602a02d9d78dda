"""The functions of a model, each traced once, and what they are called with."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from toolkit.strategies.parameter_servers import functions, private
from toolkit.strategies.parameter_servers.counting import Counting
from toolkit.strategies.parameter_servers.rounds import Rounds
from toolkit.strategies.parameter_servers.sources import Stream
from toolkit.strategies.parameter_servers.variables import Variables

__all__ = ["Calls"]


class Calls:
    """Makes calls for workers: Python functions without arguments.

    Args:
        variables: Of the model.
        counting: Where what counts stands.
    """

    def __init__(self, variables: Variables, counting: Counting) -> None:
        self._variables = variables
        self._counting = counting
        self._lock = threading.Lock()
        self._made: dict[Any, Any] = {}

    def steps(
        self, stream: Stream, items: Sequence[Any], place: int, since: int, *, only: frozenset | None = None
    ) -> Callable[[bool], Any]:
        """Returns a call of some steps of training.

        Args:
            stream: Where their batches come from.
            items: What its reader took for each.
            place: The ledgers' number of the first step.
            since: Steps between the last settling and the first one.
            only: Devices of ps whose variables are to be updated; None for all.

        Returns:
            Takes whether the worker may be another process than before.
        """

        def make() -> Any:
            made = functions.training(
                self._variables, stream.batch, signature=stream.signature(len(items)), count=len(items), only=only
            )
            self._counting.note(made)
            return made.run

        run = self._once(("steps", stream.key, len(items), only), make)
        return self._call(run, stream, items, place, since)

    def batches(self, stream: Stream, items: Sequence[Any]) -> Callable[[bool], Any]:
        """Returns a call that evaluates some batches; as `steps`."""

        def make() -> Any:
            return functions.evaluation(self._variables, stream.batch, signature=stream.signature(1)).run

        return self._call(self._once(("batches", stream.key), make), stream, items, len(items), 0)

    def batch(self, batch: Any) -> Callable[[], Any]:
        """Returns a call that predicts a batch of Keras's."""
        tensors = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor)]
        there = [isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(batch)]

        def whole(given: list) -> Any:
            rest = iter(given)
            return tf.nest.pack_sequence_as(batch, [next(rest) if real else None for real in there])

        def make() -> Any:
            signature = [tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in tensors]
            return functions.prediction(self._variables, whole, signature=signature).run

        spec = [(leaf.shape[1:], leaf.dtype) for leaf in tensors]
        structure = tf.nest.map_structure(lambda _: 0, batch)
        run = self._once(("batch", str(spec), str(structure)), make)
        zero, values = tf.constant(0, tf.int64), self._values(0)
        return lambda: run(zero, zero, values, tensors)

    def round(self, stream: Stream, shares: int) -> tuple[Any, Any]:
        """Returns the function of a share of a batch, and the one that applies a round."""

        def make() -> Any:
            rounds = Rounds(self._variables, shares)
            made = rounds.share(
                lambda number, share, sent: stream.batch(0, number, sent, share=share, shares=shares),
                signature=stream.signature(1),
            )
            self._counting.note(made)
            return made.run, rounds.applying()

        return self._once(("round", stream.key), make)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        with self._lock:
            if key not in self._made:
                with tf.device(None):  # Made in a worker's thread, it is for the others, too.
                    self._made[key] = make()
            return self._made[key]

    def _values(self, since: int) -> list[tf.Tensor]:
        with tf.device("CPU:0"):
            return [tf.constant(value) for value in self._counting.at(since)]

    def _call(self, run: Any, stream: Stream, items: Sequence[Any], place: int, since: int) -> Callable[[bool], Any]:
        first = items[0] if stream.kind == "numbered" else 0
        values = self._values(since)
        with tf.device("CPU:0"):
            numbers = tf.constant(first, tf.int64), tf.constant(place, tf.int64)
        sent = [leaf for item in items for leaf in item] if stream.kind == "handed out" else []

        def call(anew: bool) -> Any:
            own = [stream.iterator(private.worker_index(), anew=anew)] if stream.kind == "per worker" else sent
            return run(*numbers, values, own)

        return call
