"""Synchronous rounds: the workers share each batch, and their gradients are applied together.

Not every step can be divided: a worker knows its own share, and variables as they are before the round is applied. Such
a step is found while it is traced for one worker's share (`RoundShare`, `ShareStep`), and each batch then goes to one
worker, one after another.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from toolkit.strategies.batches import row_range
from toolkit.strategies.context import this_step
from toolkit.strategies.options import options_of
from toolkit.strategies.parameter_servers import functions
from toolkit.strategies.parameter_servers.dispatch import Dispatch, Dispatcher
from toolkit.strategies.parameter_servers.ledger import CAPACITY
from toolkit.strategies.parameter_servers.local_values import LocalValue
from toolkit.strategies.parameter_servers.placement import ServerShardedVariable, shards_of
from toolkit.strategies.parameter_servers.sources import Stream
from toolkit.strategies.parameter_servers.variables import LocalScope, Variables, changes, packed, unpacked
from toolkit.strategies.parameter_servers.worker_step import WorkerStep, tracing
from toolkit.strategies.step.draws import Draws
from toolkit.strategies.step.moments import normalises_batch
from toolkit.strategies.step.rows import ALIKE, Of, Rows
from toolkit.strategies.step.share import Share, entered
from toolkit.strategies.step.trial import shown
from toolkit.strategies.upstream.attributes import layers_within
from toolkit.support.graphs import assigns_others, derives_from, outside

_EXAMPLES = "/examples"  # The entry among a share's logs with the number of its examples.
# What shares store: gradients and what a normalisation averages, whose weighted mean counts, and what is the same.
_GRADIENTS, _AVERAGES, _SAME = "gradients", "averages", "same"


class Rounds:
    """Synchronous steps: workers store the gradients of their shares on the ps, where they are applied together.

    What a worker stores lies in a row of its share's own, so a share that is computed again, because
    its worker died, changes nothing.

    Args:
        variables: The model's.
        shares: The number of shares of each batch.

    Attributes:
        undivided: Why the step can't be divided; None where it can, or where it hasn't been traced yet.
        kinds: What the values of its logs are, by name and in the logs' own structure.
        tables: The paths of variables of which the step looks up rows.
    """

    def __init__(self, variables: Variables, shares: int) -> None:
        self.undivided: str | None = None
        self.kinds: dict[str, Any] = {}
        self.tables: list[str] = []
        self.variables = variables
        self.shares = shares
        self._rows: dict[Any, list[tf.Variable]] = {}  # By content and ps device.
        self._applied: list[Any] = []  # Variables, as they were given to the optimizer.
        self._order: list[tuple] = []  # For each: (the variable's value, whether it has a gradient).
        self._assigned: dict[str, dict[str, list]] = {}  # By _SAME or _AVERAGES, and ps device: as `changes` has it.

    def share(self, stream: Stream) -> tuple[Any, list[int]]:
        """Creates the function of one share, as `training` does, with the share's index as the step in the ledgers.

        Args:
            stream: Where its batch comes from.
        """
        variables = self.variables
        model = variables.model
        normalised = [x for x in layers_within(model) if isinstance(x, keras.layers.BatchNormalization)]
        options = options_of(model.distribute_strategy)
        for layer in normalised:
            if layer.trainable and normalises_batch(layer, options):
                self.note(
                    f"{layer.name} normalises over the whole batch, unless you give create(batch_statistics="
                    '"replica"), which leaves each worker its own share'
                )
        averages = {id(v) for layer in normalised for v in layer.non_trainable_variables}
        assigned: list[int] = []

        def replica(first: tf.Tensor, index: tf.Tensor, counters: list, data: Any) -> tuple:
            values, _ = variables.pull()
            scope = variables.scope(values, counters)
            batch = stream.batch(0, first, data, share=index, shares=self.shares)
            rows = stream.rows_of(batch)
            share = RoundShare(rows, lambda: stream.rows(first), index, self.shares, self.note)
            share.of_batch(batch)
            step = ShareStep(self, scope, index)
            found = outside(lambda: shown(model, model.train_step, batch, stream.tables))
            if found.opened or found.sums:
                self.note("it computes something of the whole batch, which isn't shown to be a mean over examples")
            with (
                tracing(step, scope),
                entered(share),
                this_step.having(tables=stream.tables, draws=Draws(share)),
                functions.python_gradients() as of_python,
                functions.reports_of(variables, "train") as reports,
            ):
                returned = functions.as_they_are(model.train_step(batch))
                logs = reports(returned)
            kinds = [found.logs.get(number, ALIKE) for number in range(len(keras.tree.flatten(returned)))]
            self.kinds = functions.in_one_dict(keras.tree.pack_sequence_as(returned, kinds))
            if of_python:
                self.note("it needs the gradient of a tf.py_function")
            if not self._order:
                self.note("it applies no gradients")
            if any(variables.values[id(v)].trainable for v in variables.served if id(v) in scope.unsent):
                self.note("it assigns a trainable variable")
            if scope.without_cell:
                self.note("it assigns variables in a branch, a loop or a function")
                scope.without_cell.clear()  # One that can't be divided needs no cells.
            for v in (variables.counters[place] for place in functions.conditional_in(scope, variables)):
                if id(v) in scope.assigned:  # The chief would have to know it before it applies the round.
                    self.note(f"it assigns {v.path}")
            same = [v for v in variables.served if id(v) in scope.unsent and id(v) not in averages]
            for v in same:
                if derives_from(tf.convert_to_tensor(scope.values[id(v)]), tf.nest.flatten(batch)):
                    self.note(f"it computes {v.path} from the batch's examples")
            if self.undivided is None:
                self._assigned = {_SAME: changes(variables, scope, among=same), _AVERAGES: changes(variables, scope)}
                for kind, by_device in self._assigned.items():
                    for device, pairs in by_device.items():
                        self._store(kind, device, [change for change, _ in pairs], index)
            assigned[:] = [scope.assigned.get(id(v), 0) for v in variables.counters]
            return functions.flattened(scope.tensors(variables.metrics)), {**logs, _EXAMPLES: tf.cast(rows, tf.float64)}

        function = functions.trace(variables, replica, stream.signature(1))
        mine = [each.handle for rows in self._rows.values() for each in rows]
        if assigns_others(function.graph, mine):
            self.note("it assigns a tf.Variable")
        return function, assigned

    def note(self, why: str) -> None:
        """Records why the step can't be divided."""
        self.undivided = self.undivided or why

    def applying(self) -> tuple[Any, list[int]]:
        """Creates the function, run by the chief, that applies a round.

        It takes the shares' weights in the mean (float64 [shares]), the step's number in the ledgers, and the
        values of `variables.counters`, and returns what `branched` does, in one tensor. The indices of those are
        returned beside it.
        """
        variables = self.variables
        optimizer = variables.model.optimizer
        counters = [tf.TensorSpec(v.shape, v.dtype) for v in variables.counters]
        conditional: list[int] = []

        def run(weights: tf.Tensor, ledger_step: tf.Tensor, counters: list) -> tf.Tensor:
            versions, slots = {}, {}
            for device, ledger in variables.ledgers.items():
                versions[device] = ledger.version()
                with tf.device(device):
                    slots[device] = ledger_step % CAPACITY
            for kind, by_device in self._assigned.items():
                for device, pairs in by_device.items():
                    whole = self._of_all(kind, device, [value for value, _ in pairs], weights)
                    for (_, assign), value in zip(pairs, whole, strict=True):
                        with tf.device(device):
                            assign(value)
            scope = variables.scope_of(variables.counters, counters)
            step = _RoundStep(variables, scope, versions, slots)
            step.gradients = self._gradients(weights)
            # These need gradients on the chief. Otherwise gradients stay on the ps, and the optimizer gets zeros.
            clips = optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue
            scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
            step.looks = bool(clips or scaled or optimizer.gradient_accumulation_steps)
            grads = [
                None if not there else step.whole(value) if step.looks else tf.zeros([], value.dtype)
                for value, there in self._order
            ]
            with tracing(step, scope):
                optimizer.apply(grads, self._applied)
            conditional[:] = functions.conditional_in(scope, variables)
            return functions.flattened(functions.branched(conditional, counters, scope.tensors(variables.counters)))

        signature = [tf.TensorSpec([self.shares], tf.float64), tf.TensorSpec([], tf.int64), counters]
        return functions.traced(variables, run, signature), conditional

    def store(self, grads: Sequence[Any], variables: Sequence[Any], share: tf.Tensor) -> None:
        """Stores a share's gradients on the ps."""
        self._applied = list(variables)
        pairs = zip(grads, variables, strict=True)
        self.tables = [v.path for gradient, v in pairs if isinstance(gradient, tf.IndexedSlices)]
        values = [self.variables.values[id(v)] for v in variables]
        self._order = [(value, gradient is not None) for gradient, value in zip(grads, values, strict=True)]
        by_value = {id(value): gradient for gradient, value in zip(grads, values, strict=True)}
        for device, held in self._by_device().items():
            mine = []
            for value, index in held:
                gradient = tf.convert_to_tensor(by_value[id(value)])
                mine.append(value.rows(gradient, index) if isinstance(value, ServerShardedVariable) else gradient)
            self._store(_GRADIENTS, device, mine, share)

    def _by_device(self) -> dict[str, list[tuple]]:
        """Returns, by device, (the variable's value, the index of its shard) of those that have gradients."""
        devices: dict[str, list[tuple]] = {}
        for value, there in self._order:
            for index, shard in enumerate(shards_of(value)):
                if there:
                    devices.setdefault(shard.device, []).append((value, index))
        return devices

    def _store(self, kind: str, device: str, values: Sequence[tf.Tensor], share: tf.Tensor) -> None:
        sent = packed(values)
        if (kind, device) not in self._rows:
            shards = (s for v in self.variables.served for s in shards_of(self.variables.values[id(v)]))
            beside = next(shard for shard in shards if shard.device == device)
            strategy = self.variables.model.distribute_strategy
            with tf.init_scope(), strategy.extended.colocate_vars_with(beside):
                self._rows[kind, device] = [
                    tf.Variable(tf.zeros([self.shares, each.shape.num_elements()], each.dtype), trainable=False)
                    for each in sent
                ]
        for each, rows in zip(sent, self._rows[kind, device], strict=True):
            with tf.device(device):
                mine = tf.reshape(tf.identity(each), [1, -1])
                rows.scatter_update(tf.IndexedSlices(values=mine, indices=tf.reshape(tf.identity(share), [1])))

    def _of_all(self, kind: str, device: str, like: Sequence[Any], weights: tf.Tensor) -> list[tf.Tensor]:
        """Returns what all shares have stored together, on the ps, in the shapes of `like`."""
        with tf.device(device):
            weights = tf.identity(weights)
            values = [rows.read_value() for rows in self._rows[kind, device]]
            if kind == _SAME:
                values = [value[tf.argmax(weights)] for value in values]  # A share without examples has stored none.
            else:
                values = [tf.tensordot(tf.cast(weights, value.dtype), value, 1) for value in values]
            return unpacked(values, [tf.TensorSpec(each.shape, each.dtype) for each in like])

    def _gradients(self, weights: tf.Tensor) -> dict[int, dict[int, tf.Tensor]]:
        """Returns each variable's gradient: by its value's id and the shard's index, a tensor on the ps."""
        found: dict[int, dict[int, tf.Tensor]] = {}
        for device, held in self._by_device().items():
            like = [shards_of(value)[index] for value, index in held]
            for (value, index), mean in zip(held, self._of_all(_GRADIENTS, device, like, weights), strict=True):
                found.setdefault(id(value), {})[index] = mean
        return found


def run_shares(
    dispatcher: Dispatcher,
    stream: Stream,
    item: Any,
    function: Callable[[tf.Tensor, list], Any],
    kinds: dict[str, Any],
) -> tuple[list[tuple], tf.Tensor]:
    """Makes the workers compute all shares of a batch.

    Args:
        dispatcher: Sends them.
        stream: Where the batch comes from.
        item: What its reader took for the batch.
        function: Takes a share's index and what is sent along with it.
        kinds: As of `Rounds`.

    Returns:
        (sums of the metrics, logs of the whole batch) of each share, and the shares' weights in the mean, float64.
    """
    count = dispatcher.workers
    found: dict[int, tuple] = {}

    def one(share: int, data: list) -> Dispatch:
        index = tf.constant(share, tf.int64)
        run = lambda _: functions.fetched([function(index, data)])  # noqa: E731
        return Dispatch(1, run, lambda got: found.update({share: got[0]}), trains=True)

    for share, data in stream.shares(item, count):
        dispatcher.send(one(share, data), staleness=None)
    dispatcher.wait_for_all()
    examples = np.array([found[share][1].pop(_EXAMPLES) if share in found else 0 for share in range(count)])
    weights = examples / examples.sum()
    own = [(weights[share], found[share][1]) for share in sorted(found) if weights[share]]

    def of_all(kind: Rows, *parts: Any) -> Any:
        return _together(kind, parts, [weight for weight, _ in own])

    whole = keras.tree.map_structure(of_all, kinds, *(logs for _, logs in own))
    return [(found[share][0], whole) for share in sorted(found)], tf.constant(weights, tf.float64)


def _together(kind: Rows, parts: Sequence[Any], weights: Sequence[float]) -> Any:
    """Returns the whole batch's value of which each share has returned its own, as `Share.of_all` does of replicas'."""
    if kind.is_alike:
        return parts[0]
    if kind.of is Of.ROWS:
        return np.concatenate(parts)
    exact = [part.astype(np.result_type(part.dtype, np.float64)) for part in map(np.asarray, parts)]
    whole = sum(part * (1 if kind.is_sum else weight) for part, weight in zip(exact, weights, strict=True))
    return np.asarray(whole, np.asarray(parts[0]).dtype)[()]


class _RoundStep(WorkerStep):
    """The step in which a round is applied: the gradients are already on the ps."""

    gradients: dict[int, dict[int, tf.Tensor]]
    looks: bool  # Whether the optimizer reads the gradients before it applies them.

    def whole(self, value: Any) -> tf.Tensor:
        shards = self.gradients[id(value)]
        return tf.concat([shards[index] for index in sorted(shards)], 0) if len(shards) > 1 else shards[0]

    def send(self, grads_and_vars: Sequence[tuple]) -> list[tuple]:
        if self.looks:
            return super().send(grads_and_vars)
        out = []
        for gradient, value in grads_and_vars:
            if gradient is None:
                out.append((None, value))
                continue
            for index, shard in enumerate(shards_of(value)):
                mean = self.gradients[id(value)][index]
                with tf.device(shard.device), tf.control_dependencies([mean]):
                    self.begin(shard.device)
                with tf.device(shard.device), self.begun(shard.device):
                    out.append((tf.identity(mean), shard))
        return out


class RoundShare(Share):
    """A worker's share of a round. It can't ask the others for theirs.

    Args:
        rows: How many examples it has.
        total: Returns how many the batch has, an int64 scalar.
        index: Which share of the batch it is.
        shares: How many there are.
        note: Takes why the step can't be divided.
    """

    def __init__(
        self,
        rows: tf.Tensor,
        total: Callable[[], tf.Tensor],
        index: tf.Tensor,
        shares: int,
        note: Callable[[str], None],
    ) -> None:
        super().__init__(rows)
        self._all, self._index, self._shares, self._note = total, index, shares, note
        self._gradients: dict[int, tuple[tf.Tensor, int]] = {}  # By id, with the number of operations that used them.

    @property
    def total_count(self) -> tf.Tensor:
        """How many examples the batch has, a float64 scalar."""
        return self._in_step("total_count", lambda: tf.cast(self._all(), tf.float64))

    @property
    def first(self) -> tf.Tensor:
        """How many of them stand before this share, a float64 scalar."""
        rows = tf.cast(self.total_count, tf.int64)
        return self._in_step("first", lambda: tf.cast(row_range(rows, self._index, self._shares)[0], tf.float64))

    def total(self, x: tf.Tensor) -> tf.Tensor:
        """Records that the step can't be divided, because it needs what all shares have."""
        self._note("it needs the whole batch, as masks, sample weights and some losses and metrics do")
        return x

    rows_of_all = total

    def has_gradients(self, gradients: list[tf.Tensor]) -> None:
        """Records gradients that may be applied unchanged."""
        self._gradients |= {id(each): (each, len(each.consumers())) for each in gradients}

    def check_unchanged(self, grads: list) -> None:
        """Records that the step can't be divided if gradients are used before they are applied."""
        given = tf.nest.flatten([each for each in grads if each is not None], expand_composites=True)
        used = (len(each.consumers()) != before for each, before in self._gradients.values())
        if any(id(each) not in self._gradients for each in given) or any(used):
            self._note("it does something with gradients, which are those of a share, before they are applied")

    def keeps_whole(self, metric: keras.Metric, *, over_batches: bool) -> None:  # noqa: ARG002
        """The same, for a metric whose state isn't a sum."""
        self.total(tf.zeros([]))


class ShareStep:
    """The step of one share, which stores the gradients that an optimizer will apply.

    Args:
        rounds: The `Rounds`.
        scope: The step's own copy of variables.
        share: The share's index, an int64 scalar.
    """

    def __init__(self, rounds: Any, scope: LocalScope, share: tf.Tensor) -> None:
        self.rounds = rounds
        self.scope = scope
        self.share = share
        self.applied = False

    def apply_scaled(self, optimizer: Any, grads: list, variables: list) -> None:
        """As `apply`."""
        self.apply(None, optimizer, grads, variables)  # The loss's scale is divided out when the round is applied.

    def apply(self, _original: Any, optimizer: Any, grads: list, variables: Any) -> None:
        """Stores gradients, or records why that isn't possible."""
        if self.applied or optimizer is not self.rounds.variables.model.optimizer:
            self.rounds.note("it applies gradients several times, or by another optimizer than the model's")
        elif self.scope.within:
            self.rounds.note("it applies gradients in a branch, a loop or a function")
        else:
            if isinstance(share := this_step.share, RoundShare):
                share.check_unchanged(grads)
            self.rounds.store(grads, variables, self.share)
            self._count_step(optimizer)
        self.applied = True
        for v in variables:
            before = self.scope.values.get(id(v))
            if isinstance(before, LocalValue):
                self.scope.values[id(v)] = _NotUpdatedYet(before, self.rounds.note)

    def _count_step(self, optimizer: Any) -> None:
        """Counts the step that will be applied; gradients of a scaled loss may overflow, and then none is."""
        scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        for v in optimizer.variables:
            if v.name not in ("iteration", "step_counter", "dynamic_scale") or id(v) not in self.scope.values:
                continue
            value = tf.convert_to_tensor(self.scope.values[id(v)])
            if scaled:
                before = LocalValue(value, trainable=False)
                self.scope.values[id(v)] = _NotUpdatedYet(before, self.rounds.note)
            elif v.name == "iteration":
                self.scope.add_update((v, value + 1))
                self.scope.count(id(v))


class _NotUpdatedYet(LocalValue):
    """A variable that is updated when the step has ended."""

    def __init__(self, before: LocalValue, note: Callable[[str], None]) -> None:
        super().__init__(before.handle, trainable=before.trainable)
        self.shape = before.shape
        self._before, self._note = before, note

    def current(self) -> tf.Tensor:
        self._note("it reads variables after it has applied their gradients")
        return self._before.current()
