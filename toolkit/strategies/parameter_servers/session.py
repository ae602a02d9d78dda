"""What `fit`, `evaluate` and `predict` of a model call instead of Keras's own step functions.

A `Session` sends a model's steps to workers, with functions that are each traced once (`TracedFunctions`). While steps
are under way the chief keeps counters and totals of the metrics.
"""

import collections
import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.strategies.options import ParameterServerOptions
from toolkit.strategies.parameter_servers import functions, internals
from toolkit.strategies.parameter_servers.dispatch import Dispatch, Dispatcher, DispatchSize
from toolkit.strategies.parameter_servers.ledger import CAPACITY, INTERRUPTED, NOTHING, Ledger, collect
from toolkit.strategies.parameter_servers.rounds import Rounds, run_shares
from toolkit.strategies.parameter_servers.sources import Reader, Stream, reader_of
from toolkit.strategies.parameter_servers.variables import Variables
from toolkit.strategies.step.train_step import count_dispatched
from toolkit.strategies.variables import optimizers_of

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
        tables: The paths of variables of which a round has looked up rows.
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
        self.tables: list[str] = []
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
        self._functions = TracedFunctions(self._variables, self._counters)

    def begin_epoch(self, steps: int | None, epochs: int) -> None:
        """Begins an epoch of this many steps (None: unknown), with this many epochs left, itself included."""
        self._left_in_epoch = steps
        self._left = None if steps is None else steps * epochs

    @property
    def in_turn(self) -> bool:
        """Whether no two steps are under way at once."""
        return self._variables.in_turn

    @property
    def shares(self) -> int:
        """Into how many shares a batch is divided, as far as is known."""
        return self.dispatcher.workers if self._in_rounds else 1

    @property
    def lazy(self) -> list[str]:
        """The paths of tables whose rows an optimizer updates only when they are looked up."""
        return self._variables.lazy

    def take(self, stream: Stream) -> None:
        """Takes a stream for the steps that follow, and makes what they are the first to use."""
        if self._stream is stream:
            return
        self._flush()
        self._stream = stream
        if not all(optimizer.built for optimizer in optimizers_of(self.model)):
            self._functions.build_optimizers(stream)
            self._take_variables()

    # Keras calls this.

    def train(self, given: Any) -> dict[str, float]:
        """Sends the next steps of `fit`; returns the logs of the steps whose results have arrived."""
        reader = reader_of(given)
        for item in self._next(reader):
            count_dispatched(self.model, 1)
            self.take(reader.stream)
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
        if self._counters.moved and not self._sent:  # By dropout that stays on in predictions.
            self.wait_for_steps()
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
        except functions.NotSums as found:
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
            call = self._traced(lambda: self._functions.batches(stream, [item for _, item in pending]))

            def done(result: list) -> None:
                self._totals.add(result, kind="test", order=order)
                self._counters.take(result[0][0][self._totals.size :], 0)

            work = Dispatch(len(pending), lambda attempt: functions.fetched([call(attempt > 1)]), done)
            self.dispatcher.send(work, staleness=0 if self._not_sums else None)
        elif len(pending) == self._size.steps:
            self._send(self._stream, pending)
        else:  # The function is one of a single step, or of as many as are sent at once.
            for one in pending:
                self._send(self._stream, [one])
        self._size.adapt(self._left)

    def _send(self, stream: Stream, pending: list[tuple[int, Any]]) -> None:
        first, items = pending[0][0], [item for _, item in pending]
        call = self._traced(lambda: self._functions.steps(stream, items, first, first - self._first))
        functions.check_in_turn(self._variables, self._not_sums.values())

        def run(attempt: int) -> list:
            return functions.fetched([call(False)]) if attempt == 1 else self._run_again(stream, pending)

        def done(result: list) -> None:
            self._totals.add(result, order=first)
            for counted, _ in result:  # One function of all steps, or one for each step.
                self._counters.take(counted[self._totals.size :], len(pending) // len(result))
            if len(pending) == 1:
                self._size.note(work.seconds)

        work = Dispatch(len(pending), run, done, trains=True)
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
            call = self._functions.steps(stream, [item], number, number - self._first, only=only)
            outputs.append(call(index == 0))
        return functions.fetched(outputs)

    def _round(self, stream: Stream, item: Any) -> bool:
        """Runs a synchronous round: every worker computes a share of the batch, then the chief applies the step.

        Returns whether it did: False, from then on, for a step that can't be divided.
        """
        rounds, function, applying = self._functions.round(stream, self.dispatcher.workers)
        if rounds.undivided is not None:
            self._train_in_turn(rounds.undivided)
            return False
        if rounds.tables and not self.tables:
            self._say_what_squares(rounds.tables[0])
        self.tables = rounds.tables
        self._totals.start()
        counters = [tf.constant(value) for value in self._counters.after(self._sent)]
        number = tf.constant(stream.number(item), tf.int64)
        run = lambda share, data: function(number, share, counters, data)  # noqa: E731
        results, weights = run_shares(self.dispatcher, stream, item, run, rounds.kinds)
        self._totals.add(results, order=self._sent)
        try:
            branched = applying(weights, tf.constant(self._first + self._sent, tf.int64), counters)
        except tf.errors.OpError:
            self.dispatcher.look()
            raise
        self._counters.take(branched.numpy(), 1)
        self._sent += 1
        return True

    def _say_what_squares(self, table: str) -> None:
        """Warns once where an optimizer squares a row's summed gradients, and on one device each of them by itself."""
        optimizer = getattr(self.model, "optimizer", None)
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        if not isinstance(optimizer, keras.optimizers.SGD):
            _LOG.warning(
                "In a round the gradients of a row of %s are added before %s squares them; one device squares each of "
                "them. Losses may be some per cent apart. With max_staleness=0 they are one device's",
                *(table, type(optimizer).__name__),
            )

    def _train_in_turn(self, undivided: str) -> None:
        """Makes one worker compute each whole batch, one after another, from now on."""
        step = f"{type(self.model).__name__}.train_step"
        _LOG.warning("%s can't be divided among workers: %s. One worker computes each batch", step, undivided)
        self.wait_for_steps()
        self._in_rounds, self._staleness = False, 0
        self._take_variables()

    def _predicted(self, batch: Any) -> Any:
        call = self._functions.batch(batch)
        results: list = []
        work = Dispatch(1, lambda _: tf.nest.map_structure(lambda tensor: tensor.numpy(), call()), results.append)
        self.dispatcher.send(work, staleness=None)
        self.dispatcher.wait(lambda: bool(results))
        return results[0]


class TracedFunctions:
    """A model's functions, each traced once, and their calls for workers: Python functions with all arguments bound."""

    def __init__(self, variables: Variables, counters: "Counters") -> None:
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
        run, assigned = self._once(
            ("batches", stream.key),
            lambda: functions.evaluation(self._variables, stream.batch, signature=stream.signature(1)),
        )
        call = self._call(run, stream, items, len(items), 0)
        self._counters.move(assigned, len(items))
        return call

    def batch(self, batch: Any) -> Callable[[], Any]:
        """Returns a call that predicts a batch of Keras's."""
        there = [isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(batch)]
        tensors = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor)]

        def whole(given: list) -> Any:
            rest = iter(given)
            return tf.nest.pack_sequence_as(batch, [next(rest) if real else None for real in there])

        signature = [tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in tensors]
        structure = tf.nest.map_structure(lambda _: 0, batch)
        run, assigned = self._once(
            ("batch", str(signature), str(structure)),
            lambda: functions.prediction(self._variables, whole, signature=signature),
        )
        zero, counters = tf.constant(0, tf.int64), self._counters_after(0)
        self._counters.move(assigned, 1)
        return lambda: run(zero, zero, counters, tensors)

    def round(self, stream: Stream, shares: int) -> tuple[Rounds, Any, Any]:
        """Returns rounds with their functions, of a share and of applying one; of steps that can't be divided, None."""

        def make() -> Any:
            rounds = Rounds(self._variables, shares)
            run, assigned = rounds.share(stream)
            if rounds.undivided is not None:
                return rounds, None, None
            applying, conditional = rounds.applying()
            self._counters.note(assigned, conditional)
            return rounds, run, applying

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


class Counters:
    """The values of counters at each step: an optimizer's steps, seeds, a learning rate that was set.

    A worker that counted would read a count that others change: workers are sent where it stands, and
    the chief sets it when all is done.
    """

    def __init__(self, variables: Variables) -> None:
        self._variables = variables.counters
        self._start: list[np.ndarray] = []  # Their values when no step was under way last.
        self._increments: list[np.ndarray] = []
        self._conditional: list[int] = []  # Which ones a step assigns in a branch; the worker reports those.
        self._corrections: dict[int, np.ndarray] = {}  # How much those differ from their values without the branch.
        self._moved: list[np.ndarray] = []  # By how much batches that are no steps have.
        self._seeds = variables.seeds
        self._drawn: list[np.ndarray] = []  # What that generator holds after each draw since no step was under way.
        self._scales = _scales(variables)
        self._told = [index for index, v in enumerate(self._variables) if id(v) in variables.told]
        self._lock = threading.Lock()

    def note(self, assigned: Sequence[int], conditional: Sequence[int]) -> None:
        """Records how often a step assigns each: it increases a seed generator's second element by that, or a count.

        Args:
            assigned: For each, how often.
            conditional: The indices of those that it assigns in a branch.
        """
        pairs = zip(self._variables, assigned, strict=True)
        self._increments = [_increment(v, times) for v, times in pairs]
        for index in [scale.finite for scale in self._scales] + self._told:
            self._increments[index] = np.array(0)
        self._conditional = list(conditional)

    @property
    def moved(self) -> bool:
        """Whether batches that are no steps have moved some since no step was under way."""
        return any(np.any(each) for each in self._moved)

    def move(self, assigned: Sequence[int], batches: int) -> None:
        """Records that batches which are no steps are sent: seeds that they draw by go on from there.

        Args:
            assigned: How often each batch assigns each counter.
            batches: How many.
        """
        more = [_increment(v, times * batches) for v, times in zip(self._variables, assigned, strict=True)]
        for index in self._told:
            more[index] = np.array(0)
        with self._lock:
            self._moved = [one + other for one, other in zip(self._moved, more, strict=True)] if self._moved else more

    def take(self, branched: np.ndarray, steps: int) -> None:
        """Records what this many steps did to counters in branches: their values before and after, in one array.

        It is called in a worker's thread. Batches that were evaluated are no steps, and tell of `Variables.told` alone.
        """
        told = self._conditional if steps else self._told
        like = [self._variables[index] for index in told] * 2
        ends = np.cumsum([math.prod(v.shape) for v in like], dtype=int)
        values = [part.reshape(v.shape) for v, part in zip(like, np.split(branched, ends)[:-1], strict=True)]
        before = dict(zip(told, values[: len(values) // 2], strict=True))
        after = dict(zip(told, values[len(values) // 2 :], strict=True))
        with self._lock:
            for scale in self._scales:
                if scale.value in after:
                    self._take_scale(scale, before, after)
            for index, value in after.items():
                if any(index in (scale.value, scale.finite) for scale in self._scales):
                    continue
                if self._variables[index] is self._seeds.state:  # Each draw counts, also in a branch that isn't taken.
                    continue
                if _is_whole(self._start[index]):
                    more = value - before[index] - (self._increments[index] * steps if steps else 0)
                    self._corrections[index] = self._corrections.get(index, 0) + more
                elif not np.array_equal(value, before[index]):  # Otherwise a callback's value would be set back.
                    self._variables[index].assign(value)

    def _take_scale(self, of: "_Scale", before: dict[int, np.ndarray], after: dict[int, np.ndarray]) -> None:
        """Takes a worker's loss scale: always if it is smaller, otherwise if it began with the current one."""
        now = float(self._variables[of.value].numpy())
        finite = self._start[of.finite] + self._corrections.get(of.finite, 0)
        sent, found = float(before[of.value]), float(after[of.value])
        if found < min(sent, now) or found > sent == now:
            now, finite = found, after[of.finite]
        elif found == sent == now:
            finite = np.maximum(0, finite + after[of.finite] - before[of.finite])
        self._variables[of.value].assign(now)
        # A worker doubles the scale at exactly this count.
        self._corrections[of.finite] = np.minimum(finite, of.growth - 1) - self._start[of.finite]

    def after(self, steps: int) -> list[np.ndarray]:
        """Returns the values this many steps after no step was under way."""
        if not self._start:
            self._start = [np.array(v.numpy()) for v in self._variables]
        values = []
        with self._lock:
            for index, (variable, start) in enumerate(zip(self._variables, self._start, strict=True)):
                if not _is_whole(start):
                    values.append(np.array(variable.numpy()))  # Such as a learning rate that a callback sets.
                else:
                    moved = (self._increments[index] * steps if steps else 0) + self._corrections.get(index, 0)
                    moved = moved + (self._moved[index] if self._moved else 0)
                    of_seeds = variable is self._seeds.state
                    values.append(self._after_draws(moved) if of_seeds else (start + moved).astype(start.dtype))
        return values

    def _after_draws(self, moved: Any) -> np.ndarray:
        """Returns what the generator for calls without a seed holds after some draws; it doesn't count by ones."""
        state, times = self._seeds.state, int(np.max(moved))
        self._drawn = self._drawn or [np.array(state.numpy())]
        while len(self._drawn) <= times:
            with keras.StatelessScope(state_mapping=[(state, tf.constant(self._drawn[-1]))]) as scope:
                self._seeds.next(ordered=False)
            self._drawn.append(scope.get_current_value(state).numpy())
        return self._drawn[times]

    def branched_after(self, steps: int) -> dict[int, np.ndarray]:
        """Returns those that are assigned in branches, by index, as far as results have arrived; others as `after`."""
        told = {*self._conditional, *self._told}
        if not told:
            return {}
        values = self.after(steps)
        return {index: values[index] for index in told}

    def set_after(self, steps: int) -> None:
        """Sets them when this many steps are done and none is under way."""
        if steps or self._corrections or self.moved:
            for variable, value in zip(self._variables, self.after(steps), strict=True):
                if _is_whole(value):
                    variable.assign(value)
        self._start, self._moved, self._drawn = [], [], []
        self._corrections = {}


class MetricTotals:
    """Running metrics, as far as results have arrived: each dispatch counts from zero, and the chief adds.

    Attributes:
        changed: Whether results have come since `logs` was last called.
        ended: The last step's logs, when nothing was under way.
    """

    def __init__(self, variables: Variables) -> None:
        self.changed = False
        self._model = variables.model
        self._variables = variables.metrics
        self._of = variables
        self._lock = threading.Lock()
        self._sums: list[np.ndarray] | None = None
        self.ended: dict[str, Any] = {}
        self._last: dict[str, Any] = {}  # The logs of the last step whose results have arrived.
        self._kind, self._order = "train", -1  # Of that step.
        self._logs: dict[str, Any] = {}

    @property
    def arrived(self) -> bool:
        """Whether a step's results have arrived since nothing was under way."""
        return self._order >= 0

    @property
    def size(self) -> int:
        """The number of elements of all metrics' sums."""
        return sum(math.prod(v.shape) for v in self._variables)

    def start(self) -> None:
        """Begins with the metrics' current values, unless it has begun."""
        if self._sums is None:
            self._sums = [np.array(v.numpy()) for v in self._variables]

    def add(self, results: Sequence[tuple[np.ndarray, dict[str, Any]]], *, kind: str = "train", order: int) -> None:
        """Adds the counts of dispatches: the sums of all metrics in one array, and the last step's logs.

        Their kind is "train" or "test". They may come in another order than they were sent in, which is `order`.

        It is called in a worker's thread.
        """
        with self._lock:
            for counted, logs in results:
                place = 0
                for index, total in enumerate(self._sums or []):
                    added = counted[place : place + total.size].reshape(total.shape)
                    self._sums[index] = (total.astype(np.float64) + added).astype(total.dtype)  # type: ignore[index]
                    place += total.size
                if order >= self._order:
                    self._last, self._kind, self._order = logs, kind, order
            self.changed = True

    def logs(self) -> dict[str, Any]:
        """Sets the metrics as far as results have arrived, and returns them as logs; {} before the first."""
        if self.changed:
            with self._lock:
                self.changed = False
                sums, last, kind = list(self._sums or []), dict(self._last), self._kind
            self._set(sums)
            results = [keras.tree.flatten(type(metric).result(metric)) for metric in self._model.metrics]
            reported = self._of.reported.get(kind, {})
            self._logs = {**last, **{name: _plain(results[at][place]) for name, (at, place) in reported.items()}}
        return dict(self._logs)

    def finish(self) -> None:
        """Sets the metrics when nothing is under way."""
        self.logs()
        if self._sums is not None:
            self._set(self._sums)
        self._sums = None
        self.ended = self._logs or self.ended  # Also where they are asked for twice.
        self._last, self._logs, self._order = {}, {}, -1
        self.changed = False

    def _set(self, sums: Sequence[np.ndarray]) -> None:
        for variable, value in zip(self._variables, sums, strict=True):
            variable.assign(value)


@dataclasses.dataclass(frozen=True)
class _Scale:
    """A loss scale: the indices of its value and of its count of finite steps, and the count's limit."""

    value: int
    finite: int
    growth: int


def _scales(variables: Variables) -> list[_Scale]:
    places = {id(v): index for index, v in enumerate(variables.counters)}
    return [
        _Scale(places[id(each.dynamic_scale)], places[id(each.step_counter)], each.dynamic_growth_steps)
        for each in optimizers_of(variables.model)
        if isinstance(each, keras.optimizers.LossScaleOptimizer) and each.built
    ]


def _plain(value: Any) -> Any:
    """Returns a metric's result in the form of Keras's logs: a float, or an array."""
    value = np.asarray(keras.ops.convert_to_numpy(value))
    return value if value.ndim else float(value)


def _increment(variable: Any, times: int) -> np.ndarray:
    """By how much a counter is more when assigned so often: a seed generator counts by its second element."""
    return np.array([0, times] if tuple(variable.shape) == (2,) else times)


def _is_whole(value: np.ndarray) -> bool:
    return value.dtype.kind in "iu"
