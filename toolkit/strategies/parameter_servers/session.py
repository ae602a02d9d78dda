"""What `fit`, `evaluate` and `predict` of a model call instead of Keras's own step functions."""

import collections
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.strategies.options import ParameterServerOptions
from toolkit.strategies.parameter_servers.calls import Calls
from toolkit.strategies.parameter_servers.dispatch import Dispatcher, DispatchSize, Work
from toolkit.strategies.parameter_servers.functions import fetched
from toolkit.strategies.parameter_servers.ledger import CAPACITY, INTERRUPTED, NOTHING, Ledger, collect
from toolkit.strategies.parameter_servers.rounds import run_shares
from toolkit.strategies.parameter_servers.sources import Reader, Stream, reader_of
from toolkit.strategies.parameter_servers.totals import Counters, MetricTotals
from toolkit.strategies.parameter_servers.variables import Variables
from toolkit.strategies.parameter_servers.whole_metrics import NotSums, check_in_turn
from toolkit.strategies.step.step_count import count_dispatched
from toolkit.strategies.variables.model_optimizers import optimizers_of

__all__ = ["Session"]

_LOG = logging.getLogger(__name__)
_EVALUATED = 8  # Batches with numbers that are evaluated in one dispatch.


class Session:
    """Training and evaluation of one compiled model.

    Args:
        model: A model that was built and compiled under the strategy's scope.
        dispatcher: The strategy's.
        ledgers: The ledger on each ps device.
        options: How asynchronous training is.

    Attributes:
        staleness: By staleness in updates, how many gradients were applied with it.
        applied: How many steps were applied, in this process.
        recovered: Steps of killed workers that had been applied, wholly or on some ps, before they were run again.
        interrupted: Those of them that were killed in the midst of being applied.
    """

    def __init__(
        self, model: Any, dispatcher: Dispatcher, ledgers: dict[str, Ledger], options: ParameterServerOptions
    ) -> None:
        self.model = model
        self.dispatcher = dispatcher
        self.options = options
        self.staleness: collections.Counter = collections.Counter()
        self.applied = self.recovered = self.interrupted = 0
        self._all_ledgers = ledgers
        self._staleness = options.max_staleness
        self._in_rounds = options.synchronous
        self._not_sums: dict[int, str] = {}  # The metric's name, by the id of its variable.
        self._take_variables()
        self._size = DispatchSize(options, dispatcher.workers)
        self._lock = threading.Lock()
        self._pending: list[tuple[int, Any]] = []  # A step's number in the ledgers, and its batch.
        self._stream: Stream | None = None
        self._sent = 0  # Steps since `wait_for_steps` was last called.
        self._first = 0  # The number of the first of them in the ledgers.
        self._dispatched = 0
        self._left_in_epoch: int | None = None  # Steps, None if `fit` doesn't know them.
        self._left: int | None = None  # In all epochs.

    def _take_variables(self) -> None:
        in_turn = self._in_rounds or self._staleness == 0 or self.dispatcher.workers == 1
        lazy = self.options.min_lazy_bytes
        of = self.model, self._all_ledgers
        self._variables = Variables(*of, min_lazy_bytes=lazy, in_turn=in_turn, not_sums=self._not_sums)
        self._counters = Counters(self._variables)
        self._totals = MetricTotals(self._variables)
        self._calls = Calls(self._variables, self._counters)

    def begin_epoch(self, steps: int | None, epochs: int) -> None:
        """Begins an epoch of this many steps (None: unknown), with this many epochs left, itself included."""
        self._left_in_epoch = steps
        self._left = None if steps is None else steps * epochs

    # Keras calls this.

    def train(self, given: Any) -> dict[str, float]:
        """Sends the next steps of `fit`; returns the logs of the steps whose results have arrived."""
        reader = reader_of(given)
        for item in self._next(reader):
            count_dispatched(self.model, 1)
            if self._stream is not reader.stream:
                self._flush()
                self._stream = reader.stream
                if not all(optimizer.built for optimizer in optimizers_of(self.model)):
                    self._calls.build_optimizers(self._stream)
                    self._take_variables()
            if not (self._in_rounds and self._round(reader.stream, item)):
                self._pending.append((self._first + self._sent, item))
                self._sent += 1
            if len(self._pending) >= self._size.steps:
                self._flush()
            if self._left_in_epoch is not None and self._left is not None:
                self._left_in_epoch -= 1
                self._left -= 1
        if self._left_in_epoch == 0:  # So that its time counts for the epoch.
            self._flush()
            self.dispatcher.wait_for_all()
        logs = self._logs()
        if self._sent >= CAPACITY // 2:
            self.wait_for_steps()
        return logs

    def test(self, given: Any) -> dict[str, float]:
        """Sends the next batches of `evaluate`."""
        reader = reader_of(given)
        for item in self._next(reader):
            self._stream = reader.stream
            self._pending.append((-1, item))
            if len(self._pending) >= (_EVALUATED if reader.stream.kind == "numbered" else 1):
                self._flush()
        return self._logs()

    def predict(self, data: Sequence[Any]) -> Any:
        """Predicts some batches; returns tensors, as Keras's own function does."""
        # predict_on_batch passes arrays.
        given = keras.tree.map_structure(lambda leaf: tf.constant(leaf) if isinstance(leaf, np.ndarray) else leaf, data)
        results = [self._predicted(batch) for batch in given]
        return tf.nest.map_structure(lambda *parts: tf.constant(np.concatenate(parts)), *results)

    def results(self, original: Any) -> Any:
        """Replaces `Model.get_metrics_result`: the result is exact, so it waits for all steps under way."""
        if tf.inside_function():
            return original()
        self.wait_for_steps()
        # A user's step may report other values than its metrics: Keras takes those with the names of the step's logs.
        found, ended = original(), self._totals.ended
        return ended if ended and set(ended) != set(found) else found

    def reset(self, original: Any) -> None:
        """Replaces `Model.reset_metrics`: steps under way still count for the earlier results."""
        self.wait_for_steps()
        self._totals.ended = {}
        original()

    def wait_for_steps(self) -> None:
        """Waits for all steps, and sets what they count: the optimizer's steps, seeds, metrics.

        Raises:
            TaskLost: A ps is gone, or all workers are.
        """
        self._flush()
        self.dispatcher.wait_for_all()
        self._counters.set_after(self._sent)
        self._totals.finish()
        if self._sent:
            staleness, missing = collect(self._ledgers.values(), self._first, self._sent)
            self.staleness.update(staleness)
            self.applied += self._sent
            if missing > self.interrupted:
                _LOG.warning("%d of %d steps are missing on some ps", missing, self._sent)
            self._first += self._sent
            self._sent = 0

    # A function that does this.

    def _traced(self, make: Callable[[], Any]) -> Any:
        """Returns the result of a function that traces a step; calls it again if metrics turn out not to be sums."""
        try:
            return make()
        except NotSums as found:
            self._not_sums |= found.by_variable
            self._take_variables()
            self._totals.start()
            return make()

    @property
    def _ledgers(self) -> dict[str, Ledger]:
        return {device: self._variables.ledgers[device] for device in self._variables.applied_on}

    def _next(self, reader: Reader) -> Iterator[Any]:
        """Iterates over an execution's batches; without any, raises tf.errors.OutOfRangeError for Keras."""
        items = []
        for _ in range(self.model.steps_per_execution):
            try:
                items.append(reader.take())
            except (StopIteration, tf.errors.OutOfRangeError):
                break
        if not items:
            raise tf.errors.OutOfRangeError(None, None, "the data is at its end")
        return iter(items)

    def _logs(self) -> dict[str, float]:
        if not self._totals.arrived:  # Keras needs logs after an epoch's first step.
            self._flush()
            self.dispatcher.wait(lambda: self._totals.arrived)
        return self._totals.logs()

    def _flush(self) -> None:
        """Sends pending steps."""
        pending, self._pending = self._pending, []
        if not pending or self._stream is None:
            return
        self._totals.start()
        self._dispatched += 1
        if pending[0][0] < 0:
            stream, order = self._stream, self._dispatched
            call = self._traced(lambda: self._calls.batches(stream, [item for _, item in pending]))

            def done(result: list) -> None:
                self._totals.add(result, kind="test", order=order)
                self._counters.take(result[0][0][self._totals.size :], 0)

            work = Work(len(pending), lambda attempt: fetched([call(attempt > 1)]), done)
            self.dispatcher.send(work, staleness=0 if self._not_sums else None)
        elif len(pending) == self._size.steps:
            self._send(self._stream, pending)
        else:  # The function is one of a single step, or of as many as are sent at once.
            for one in pending:
                self._send(self._stream, [one])
        self._size.adapt(self._left)

    def _send(self, stream: Stream, pending: list[tuple[int, Any]]) -> None:
        first, items = pending[0][0], [item for _, item in pending]
        call = self._traced(lambda: self._calls.steps(stream, items, first, first - self._first))
        check_in_turn(self._variables, self._not_sums.values())

        def run(attempt: int) -> list:
            return fetched([call(False)]) if attempt == 1 else self._run_again(stream, pending)

        def done(result: list) -> None:
            self._totals.add(result, order=first)
            for counted, _ in result:  # One function of all steps, or one for each step.
                self._counters.take(counted[self._totals.size :], len(pending) // len(result))
            if len(pending) == 1:
                self._size.note(work.seconds)

        work = Work(len(pending), run, done, trains=True)
        self.dispatcher.send(work, staleness=self._staleness)

    def _run_again(self, stream: Stream, pending: list[tuple[int, Any]]) -> list:
        """Runs the steps of a worker that died one by one, without those that were applied before."""
        numbers = [number for number, _ in pending]
        seen = {device: ledger.entries(numbers) for device, ledger in self._ledgers.items()}
        outputs = []
        for index, (number, item) in enumerate(pending):
            entries = {device: int(found[index]) for device, found in seen.items()}
            missing = frozenset(device for device, entry in entries.items() if entry == NOTHING)
            only = None
            if len(missing) < len(entries):
                only = missing
                with self._lock:
                    self.recovered += 1
                    self.interrupted += INTERRUPTED in entries.values()
            call = self._calls.steps(stream, [item], number, number - self._first, only=only)
            outputs.append(call(index == 0))
        return fetched(outputs)

    def _round(self, stream: Stream, item: Any) -> bool:
        """Runs a synchronous round: every worker computes a share of the batch, then the chief applies the step.

        Returns whether it did: False, from then on, for a step that can't be divided.
        """
        function, applying, undivided = self._calls.round(stream, self.dispatcher.workers)
        if undivided is not None:
            self._train_in_turn(undivided)
            return False
        self._totals.start()
        counters = [tf.constant(value) for value in self._counters.after(self._sent)]
        number = tf.constant(stream.number(item), tf.int64)
        run = lambda share, data: function(number, share, counters, data)  # noqa: E731
        results, weights = run_shares(self.dispatcher, stream, item, run)
        self._totals.add(results, order=self._sent)
        try:
            branched = applying(weights, tf.constant(self._first + self._sent, tf.int64), counters)
        except tf.errors.OpError:
            self.dispatcher.look()
            raise
        self._counters.take(branched.numpy(), 1)
        self._sent += 1
        return True

    def _train_in_turn(self, undivided: str) -> None:
        """Makes one worker compute each whole batch, one after another, from now on."""
        step = f"{type(self.model).__name__}.train_step"
        _LOG.warning("%s can't be divided among workers: %s. One worker computes each batch", step, undivided)
        self.wait_for_steps()
        self._in_rounds, self._staleness = False, 0
        self._take_variables()

    def _predicted(self, batch: Any) -> Any:
        call = self._calls.batch(batch)
        results: list = []
        work = Work(1, lambda _: tf.nest.map_structure(lambda tensor: tensor.numpy(), call()), results.append)
        self.dispatcher.send(work, staleness=None)
        self.dispatcher.wait(lambda: bool(results))
        return results[0]
