"""What `fit`, `evaluate` and `predict` of a model call in place of Keras's own functions of a step."""

import collections
import itertools
import logging
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.parameter_servers import private, step
from toolkit.parameter_servers.dispatch import Dispatcher, Work
from toolkit.parameter_servers.ledger import APPLIED, CAPACITY, INTERRUPTED, Ledger
from toolkit.parameter_servers.options import Options
from toolkit.parameter_servers.rounds import EXAMPLES, Rounds
from toolkit.parameter_servers.sources import Reader, Stream

__all__ = ["Session"]

_LOG = logging.getLogger(__name__)
_DISPATCH_SECONDS = 0.2  # A dispatch that takes so long costs little beside what it does.
_MOST_STEPS = 16  # In a dispatch: its function holds each of them.
_WORTH_IT = 32  # Dispatches that must be left for a longer one to be worth its tracing.
_EVALUATED = 8  # Numbered batches evaluated in one dispatch.


class Session:
    """Training and evaluation of one compiled model.

    Args:
        model: Built and compiled under the strategy's scope.
        dispatcher: Of the strategy.
        ledgers: Of each ps device.
        options: How asynchronous.

    Attributes:
        staleness: How many gradients were so many updates old when they were applied.
        applied: Steps that are applied, in this process.
        recovered: Steps of killed workers that had been applied, wholly or on some ps, before they were run again.
        interrupted: Those of them that were killed in the midst of being applied.
    """

    def __init__(self, model: Any, dispatcher: Dispatcher, ledgers: dict[str, Ledger], options: Options) -> None:
        self.model = model
        self.dispatcher = dispatcher
        self.ledgers = ledgers
        self.options = options
        self.staleness: collections.Counter = collections.Counter()
        self.applied = self.recovered = self.interrupted = 0
        self._lock = threading.Lock()
        self._functions: dict[Any, Any] = {}
        self._increments: list[Any] = []
        self._variables: step.Variables | None = None
        self._pending: list[tuple[int, Any]] = []
        self._stream: Stream | None = None
        self._sums: list[np.ndarray] | None = None
        self._counts: list[Any] = []  # Of what counts, where training stood when it was last settled.
        self._sent = 0  # Steps since then.
        self._first = 0  # The ledgers' number of the first of them.
        self._last_logs: dict[str, float] = {}
        self._logs: dict[str, float] = {}
        self._changed = False
        self._seconds: list[float] = []
        self._per_dispatch = options.steps_per_dispatch or 1
        self._here: int | None = None  # Steps left in this epoch.
        self._left: int | None = None  # And in all.

    def begin(self) -> None:
        """Begins a training.

        Raises:
            StrategyError: The model can't be trained so.
        """
        self.settle()
        if self.model.run_eagerly:
            raise StrategyError(
                asked="compile(run_eagerly=True)",
                found="under parameter servers steps run as functions on the workers",
                remedy="Leave run_eagerly out",
            )

    def begin_epoch(self, steps: int | None, epochs: int) -> None:
        """Begins an epoch.

        Args:
            steps: In it, None where `fit` doesn't know.
            epochs: Left with it.
        """
        self._here = steps
        self._left = None if steps is None else steps * epochs

    # What Keras calls.

    def train(self, reader: Reader) -> dict[str, float]:
        """Sends the next steps of `fit` on their way; returns how training stands as far as is known."""
        reader = self._checked(reader)
        for number in range(self.model.steps_per_execution):
            try:
                item = reader.take()
            except (StopIteration, tf.errors.OutOfRangeError):
                if number == 0:
                    raise StopIteration from None
                break
            if self._stream is not reader.stream:
                self._flush()
                self._stream = reader.stream
            if self.options.synchronous:
                self._round(reader.stream, item)
            else:
                self._pending.append((self._first + self._sent, item))
                self._sent += 1
            if len(self._pending) >= self._per_dispatch:
                self._flush()
            if self._here is not None and self._left is not None:
                self._here -= 1
                self._left -= 1
        if self._here == 0:  # So that the time it takes is the epoch's.
            self._flush()
            self.dispatcher.settle()
        elif not self._logs:  # Of an epoch's first step something must be known.
            self._flush()
            self.dispatcher.wait(lambda: self._changed)
        if self._sent >= CAPACITY // 2:
            self.settle()
        return self._known()

    def test(self, reader: Reader) -> dict[str, float]:
        """Sends the next batches of `evaluate` on their way."""
        reader = self._checked(reader)
        for number in range(self.model.steps_per_execution):
            try:
                item = reader.take()
            except (StopIteration, tf.errors.OutOfRangeError):
                if number == 0:
                    raise StopIteration from None
                break
            self._stream = reader.stream
            self._pending.append((-1, item))
            if len(self._pending) >= (_EVALUATED if reader.stream.kind == "numbered" else 1):
                self._flush()
        if not self._logs:
            self._flush()
            self.dispatcher.wait(lambda: self._changed)
        return self._known()

    def predict(self, data: Sequence[Any]) -> Any:
        """Predicts some batches."""
        results = []
        for batch in data:
            flat = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor)]
            results.append(self._predicted(batch, flat))
        if len(results) == 1:
            return results[0]
        return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *results)

    def results(self, original: Any) -> Any:
        """In the place of `Model.get_metrics_result`: exact, so it waits for all that is under way."""
        if not tf.inside_function():
            self.settle()
        return original()

    def reset(self, original: Any) -> None:
        """In the place of `Model.reset_metrics`: what is under way counts for what was before."""
        self.settle()
        original()

    def settle(self) -> None:
        """Waits for all steps, and sets what counts: the optimizer's steps, seeds, metrics.

        Raises:
            TaskLost: A ps is gone, or all workers are.
        """
        self._flush()
        self.dispatcher.settle()
        if self._sums is not None:
            for variable, value in zip(self._the().metrics, self._sums, strict=True):
                variable.assign(value)
            self._sums = None
        self._logs = {}
        self._last_logs = {}
        self._changed = False
        if self._sent:
            counting = self._the().counting
            for variable, value in zip(counting, self._counting_at(self._sent), strict=True):
                if variable.dtype not in ("float32", "float64", "float16", "bfloat16"):
                    variable.assign(value)
            self._balance()
            self._first += self._sent
            self._sent = 0
        self._counts = []

    # How it is done.

    def _checked(self, reader: Any) -> Reader:
        if isinstance(reader, Reader):
            return reader
        # train_on_batch and test_on_batch hand over a Python generator.
        batch = next(reader)
        dataset = tf.data.Dataset.from_tensors(tf.nest.map_structure(tf.convert_to_tensor, _without_none(batch)))
        return iter(Stream(dataset))

    def _the(self) -> step.Variables:
        if self._variables is None:
            self._variables = step.Variables(self.model, self.ledgers)
        return self._variables

    def _flush(self) -> None:
        """Sends what is pending."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        stream = self._stream
        assert stream is not None
        if self._sums is None:
            self._sums = [np.array(v.numpy()) for v in self._the().metrics]
        if pending[0][0] < 0:
            self._send_test(stream, [item for _, item in pending])
            return
        if len(pending) not in (1, self._per_dispatch):
            for one in pending:
                self._send_train(stream, [one])
        else:
            self._send_train(stream, pending)

    def _send_train(self, stream: Stream, pending: list[tuple[int, Any]]) -> None:
        first = pending[0][0]
        function = self._function("train", stream, len(pending))
        counting = [tf.constant(value) for value in self._counting_at(first - self._first)]
        arguments = self._arguments(stream, [item for _, item in pending], first, counting)

        def run(attempt: int) -> list:
            if attempt == 1:
                return _fetched([function(*self._here_too(stream, arguments))])
            return self._again(stream, pending)

        def done(result: list) -> None:
            self._add(result)
            if len(pending) == 1:
                self._seconds.append(work.seconds)

        work = Work(len(pending), run, done, trains=True)
        staleness = self.options.max_staleness
        most = self.dispatcher.workers * (2 if staleness is None else 1)
        self.dispatcher.send(work, most=most, staleness=staleness)
        self._adapt()

    def _round(self, stream: Stream, item: Any) -> None:
        """Does a step together: every worker a share of the batch."""
        if self._sums is None:
            self._sums = [np.array(v.numpy()) for v in self._the().metrics]
        shares, data = self._shares(stream, item)
        key = ("round", stream.key)
        if key not in self._functions:
            rounds = Rounds(self._the(), self.dispatcher.workers)
            made = rounds.share(
                lambda number, share, sent: stream.batch(0, number, sent, share=share, shares=rounds.shares),
                signature=stream.signature(1),
            )
            self._note_increments(made)
            self._functions[key] = (made.run, rounds.applying())
        function, applying = self._functions[key]
        counting = [tf.constant(value) for value in self._counting_at(self._sent)]
        number = tf.constant(item if stream.kind == "numbered" else 0, tf.int64)
        examples = np.zeros(self.dispatcher.workers)

        def one(share: int) -> Work:
            def done(result: list) -> None:
                examples[share] = result[0][1].pop(EXAMPLES)
                self._add(result)

            arguments = (number, tf.constant(share, tf.int64), counting, data[share])
            return Work(1, lambda _: _fetched([function(*arguments)]), done, trains=True)

        for share in shares:
            self.dispatcher.send(one(share), most=2 * self.dispatcher.workers, staleness=None)
        self.dispatcher.settle()
        try:
            applying(tf.constant(examples / examples.sum()), tf.constant(self._first + self._sent, tf.int64), counting)
        except tf.errors.OpError:
            self.dispatcher.look()
            raise
        self._sent += 1

    def _shares(self, stream: Stream, item: Any) -> tuple[list[int], list[list]]:
        """Returns the numbers of the shares that hold examples, and the data of each."""
        count = self.dispatcher.workers
        if stream.kind == "per worker":
            raise StrategyError(
                asked="synchronous rounds with distribute_datasets_from_function",
                found="in a round the workers share one batch, and there each has its own",
                remedy="Give fit one dataset of global batches",
            )
        if stream.kind == "numbered":
            return list(range(count)), [[]] * count
        rows = int(item[0].shape[0])
        ends = [share * rows // count for share in range(count + 1)]
        data = [[leaf[start:stop] for leaf in item] for start, stop in itertools.pairwise(ends)]
        return [share for share in range(count) if ends[share + 1] > ends[share]], data

    def _send_test(self, stream: Stream, items: list) -> None:
        function = self._function("test", stream, 1)
        counting = [tf.constant(value) for value in self._counting_at(0)]
        arguments = self._arguments(stream, items, len(items), counting)
        work = Work(
            len(items),
            lambda attempt: _fetched([function(*self._here_too(stream, arguments, anew=attempt > 1))]),
            self._add,
        )
        self.dispatcher.send(work, most=self.dispatcher.workers * 2, staleness=None)

    def _predicted(self, batch: Any, flat: list[tf.Tensor]) -> Any:
        spec = tf.nest.map_structure(tf.type_spec_from_value, batch)
        key = ("predict", str(spec))
        if key not in self._functions:
            signature = [tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in flat]
            places = [isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(batch)]

            def whole(tensors: list) -> Any:
                rest = iter(tensors)
                return tf.nest.pack_sequence_as(batch, [next(rest) if there else None for there in places])

            self._functions[key] = step.prediction(self._the(), whole, signature=signature).run
        zero = tf.constant(0, tf.int64)
        counting = [tf.constant(value) for value in self._counting_at(0)]
        results: list = []
        function = self._functions[key]
        work = Work(
            1,
            lambda _: tf.nest.map_structure(lambda t: t.numpy(), function(zero, zero, counting, flat)),
            results.append,
        )
        self.dispatcher.send(work, most=self.dispatcher.workers * 2, staleness=None)
        self.dispatcher.wait(lambda: bool(results))
        return results[0]

    def _again(self, stream: Stream, pending: list[tuple[int, Any]]) -> list:
        """Runs the steps of a worker that died, each by itself, without what was applied before."""
        numbers = [number for number, _ in pending]
        seen = {device: ledger.look(numbers) for device, ledger in self.ledgers.items()}
        outputs = []
        for place, (number, item) in enumerate(pending):
            notes = {device: int(found[place]) for device, found in seen.items()}
            before = [device for device, note in notes.items() if note]
            if before:
                with self._lock:
                    self.recovered += 1
                    self.interrupted += any(note == INTERRUPTED for note in notes.values())
            only = frozenset(notes) - frozenset(before)
            function = self._function("train", stream, 1, only=None if not before else only)
            start = [tf.constant(v) for v in self._counting_at(number - self._first)]
            arguments = self._arguments(stream, [item], number, start)
            outputs.append(function(*self._here_too(stream, arguments, anew=place == 0)))
        return _fetched(outputs)

    def _function(self, kind: str, stream: Stream, count: int, only: frozenset | None = None) -> Any:
        key = (kind, stream.key, count, only)
        with self._lock:
            if key in self._functions:
                return self._functions[key]
            variables = self._the()
            signature = stream.signature(count)
            if kind == "train":
                made = step.training(variables, stream.batch, signature=signature, count=count, only=only)
            else:
                made = step.evaluation(variables, stream.batch, signature=signature)
            self._functions[key] = made.run
            if kind == "train":
                self._note_increments(made)
            return made.run

    def _note_increments(self, made: step.Traced) -> None:
        pairs = zip(self._the().counting, made.assigned, strict=True)
        self._increments = [_increment(variable, times) for variable, times in pairs]

    def _arguments(self, stream: Stream, items: list, place: int, counting: list) -> tuple:
        numbered = stream.kind == "numbered"
        first = tf.constant(items[0] if numbered else 0, tf.int64)
        data = [] if stream.kind != "handed out" else [leaf for item in items for leaf in item]
        return first, tf.constant(place, tf.int64), counting, data

    def _here_too(self, stream: Stream, arguments: tuple, *, anew: bool = False) -> tuple:
        """Adds what only the worker has that this runs for."""
        if stream.kind != "per worker":
            return arguments
        return (*arguments[:-1], [stream.iterator(private.worker_index(), anew=anew)])

    def _counting_at(self, steps: int) -> list[np.ndarray]:
        """Values of what counts, so many steps after training was last settled."""
        counting = self._the().counting
        if not self._counts:
            self._counts = [np.array(v.numpy()) for v in counting]
        values = []
        for number, variable in enumerate(counting):
            if self._counts[number].dtype.kind == "f" or variable.dtype == "bfloat16":
                values.append(np.array(variable.numpy()))  # Such as a learning rate that a callback sets.
                continue
            increment = self._increments[number] if self._increments else 0
            values.append((self._counts[number] + np.asarray(increment * steps)).astype(self._counts[number].dtype))
        return values

    def _add(self, result: list) -> None:
        """Adds what a dispatch counted; in the worker's thread."""
        with self._lock:
            for sums, logs in result:
                place = 0
                assert self._sums is not None
                for number, total in enumerate(self._sums):
                    size = total.size
                    added = sums[place : place + size].reshape(total.shape)
                    self._sums[number] = (total.astype(np.float64) + added).astype(total.dtype)
                    place += size
                self._last_logs = logs
            self._changed = True

    def _known(self) -> dict[str, float]:
        """Returns the metrics as far as steps are done."""
        if self._changed:
            with self._lock:
                self._changed = False
                sums = [np.array(value) for value in self._sums or []]
                last = dict(self._last_logs)
            for variable, value in zip(self._the().metrics, sums, strict=True):
                variable.assign(value)
            known = {
                name: float(value) for name, value in _flat_results(type(self.model).get_metrics_result(self.model))
            }
            self._logs = {**last, **known} if set(last) - set(known) else known
        return dict(self._logs)

    def _adapt(self) -> None:
        """Lengthens dispatches where a single step is too short for one."""
        if self.options.steps_per_dispatch or self.options.synchronous or self._per_dispatch > 1:
            return
        staleness = self.options.max_staleness
        workers = self.dispatcher.workers
        limit = _MOST_STEPS
        if staleness is not None and workers > 1:
            limit = max(1, staleness // (2 * (workers - 1)))
        if len(self._seconds) < 4 * workers or limit == 1:
            return
        wanted = min(limit, int(_DISPATCH_SECONDS / max(1e-4, min(self._seconds))))
        wanted = 1 << max(0, wanted.bit_length() - 1)
        if wanted > 1 and (self._left is None or self._left > _WORTH_IT * wanted):
            self._per_dispatch = wanted
            _LOG.info("A step takes a worker %.0f ms: %d are sent at once", 1000 * min(self._seconds), wanted)

    def _balance(self) -> None:
        """Takes over what the ledgers noted since training was last settled, and sees whether it adds up."""
        numbers = np.arange(self._first, self._first + self._sent)
        notes = np.stack([ledger.look(numbers) for ledger in self.ledgers.values()])
        for ledger in self.ledgers.values():
            ledger.clear()
        missing = int((notes < APPLIED).any(axis=0).sum()) - self.interrupted
        ages = (notes - APPLIED).max(axis=0)
        self.staleness.update(int(age) for age in ages if age >= 0)
        self.applied += self._sent
        if missing > 0:
            _LOG.warning("%d of %d steps are not in the ledgers of all ps", missing, self._sent)


def _fetched(outputs: Sequence[tuple]) -> list[tuple]:
    """Brings a function's results from the worker."""
    return [(sums.numpy(), {name: float(v.numpy()) for name, v in logs.items()}) for sums, logs in outputs]


def _increment(variable: Any, times: int) -> Any:
    """How much a step adds to what counts: to a seed generator's second number, or to a count of steps."""
    return np.array([0, times]) if tuple(variable.shape) == (2,) else times


def _flat_results(results: dict) -> list[tuple[str, Any]]:
    flat = []
    for name, value in results.items():
        flat += [(key, v) for key, v in value.items()] if isinstance(value, dict) else [(name, value)]
    return flat


def _without_none(batch: Any) -> Any:
    return tuple(part for part in batch if part is not None) if isinstance(batch, tuple) else batch
