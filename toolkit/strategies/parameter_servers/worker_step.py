"""A step: pulls the variables, runs the user's own `train_step`, and pushes what it changes.

`train_step` is Keras's or the user's, unchanged: it reads the step's own copies, and where it applies
gradients they are sent to the ps and applied there by the optimizer's own update. `adapt_updates` lets an optimizer
update variables that are sharded over several ps, in a step and in the user's own loop.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.context import this_step
from toolkit.strategies.parameter_servers import internals
from toolkit.strategies.parameter_servers.local_values import Cell, RowsOfVariable, with_each_row_once
from toolkit.strategies.parameter_servers.placement import ServerShardedVariable, shards_of
from toolkit.strategies.parameter_servers.variables import (
    LocalScope,
    Variables,
    by_device,
    changes,
    packed,
    push,
    sends_difference,
    unpacked,
)
from toolkit.strategies.step.train_step import inlining
from toolkit.strategies.variables import trained_by


@contextlib.contextmanager
def tracing(step: Any, scope: LocalScope) -> Iterator[None]:
    """A context in which optimizers ask this step what to do with gradients, and variables have the scope's values."""
    with this_step.having(ps_step=step), scope, inlining():
        yield


def current() -> Any:
    """Returns the step that is being traced, None outside of one."""
    return this_step.ps_step


def apply(original: Callable, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Has the step that is traced do with gradients what it does, in the place of Keras's `apply`."""
    step = this_step.ps_step
    grads, variables = _paired(optimizer, grads, trainable_variables)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return step.apply_scaled(optimizer, grads, variables)
    return step.apply(lambda g, v: original(optimizer, g, v), optimizer, grads, variables)


def apply_in_chief(original: Callable, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Applies gradients outside of a worker's step: in the chief, which acts as the only replica."""
    if not hasattr(tf.distribute.get_strategy(), "replace_functions") or not tf.distribute.in_cross_replica_context():
        return original(optimizer, grads, trainable_variables)
    if not optimizer.built and trainable_variables is not None:
        optimizer.build(trainable_variables)
    return tf.distribute.get_strategy().run(lambda: original(optimizer, grads, trainable_variables))


def _paired(optimizer: Any, grads: Any, trainable_variables: Any) -> tuple[list, list]:
    grads = list(grads)
    variables = list(trained_by(optimizer) if trainable_variables is None else trainable_variables)
    for gradient, variable in zip(grads, variables, strict=False):
        if isinstance(gradient, tf.Tensor) and not gradient.shape.is_fully_defined():
            gradient.set_shape(variable.shape)  # TensorFlow doesn't always know it, for example behind a mask.
    return grads, variables


class _OptimizerScope(LocalScope):
    """What an optimizer sees while it applies: its counters' values in the step, and one shard of sharded variables."""

    def __init__(self, step: "WorkerStep", values: Sequence[Any]) -> None:
        super().__init__(step.variables.counters, values, step.scope.without_cell)
        self.updating = False  # Whether a variable's own update is under way.
        self.shard: tuple[ServerShardedVariable, int] | None = None  # A variable, and which shard is being updated.
        self.rows: tuple[Any, tf.Tensor] | None = None  # The variable or shard, and which of its rows.
        self._wholes = step.variables.values
        self._step = step

    def get_current_value(self, variable: Any) -> Any:
        value = self._wholes.get(id(variable))
        found = None
        if self.shard is not None and isinstance(value, ServerShardedVariable) and value.like is self.shard[0]:
            found = value = value.shards[self.shard[1]]
        if self.rows is not None and value is not None and value.shape == self.rows[0].shape:
            found = RowsOfVariable(value, self.rows[1])
        return super().get_current_value(variable) if found is None else found

    def add_update(self, update: tuple) -> None:
        """Takes an assignment of variables on the ps if this step changes them there, such as sums of gradients."""
        variable, value = update
        whole = self._wholes.get(id(variable))
        if self.updating or whole is None or id(variable) in self.values:
            super().add_update(update)
            return
        value = tf.cast(value, whole.dtype)
        for index, shard in enumerate(shards_of(whole)):
            if self._step.wanted(shard.device):
                with self._step.begun(shard.device):
                    shard.assign(whole.rows(value, index) if isinstance(whole, ServerShardedVariable) else value)


class WorkerStep:
    """One step, while it is traced.

    Args:
        variables: The model's.
        scope: The step's own copy of them.
        versions: By ps device, which version the copy was read at.
        slots: By ps device, the step's slot in its ledger, on that device.
        only: Devices of the ps whose variables are to be updated; None for all.
    """

    def __init__(
        self, variables: Variables, scope: LocalScope, versions: dict, slots: dict, only: frozenset | None = None
    ) -> None:
        self.variables = variables
        self.scope = scope
        self.versions = versions
        self.slots = slots
        self.only = only
        self.entries: dict[str, tf.Tensor] = {}  # By ps device, the ledger's entry once the step is applied.
        self._scaled = False  # Whether gradients of a scaled loss are being applied.
        self.optimizer_scope: _OptimizerScope | None = None
        self._by_rows: dict[int, str] = {}  # How an update of only some rows works, by the id of a variable's value.

    def send_from_cells(self) -> None:
        """Makes assignments of served variables in branches and loops be sent at once."""
        for v in self.variables.served:
            if isinstance(cell := self.scope.values[id(v)], Cell):
                cell.send = functools.partial(self._send_change, v)

    def wanted(self, device: str) -> bool:
        return self.only is None or device in self.only

    def apply(self, original: Callable, optimizer: Any, grads: list, variables: Any) -> Any:
        self._send_assigned(variables)
        counters = self.variables.counters
        scope = _OptimizerScope(self, [self.scope.values[id(v)] for v in counters])
        self.optimizer_scope = scope
        values = self.variables.values
        looked_up = [v for g, v in zip(grads, variables, strict=False) if isinstance(g, tf.IndexedSlices)]
        self._by_rows = {id(values[id(v)]): self.variables.by_rows(optimizer, v) for v in looked_up}
        with scope:
            shards = [shard for v in variables for shard in shards_of(v.value)]
            devices = sorted({shard.device for shard in shards})
            # The gradients are changed before they are sent, or aren't sent.
            if optimizer.weight_decay is not None or optimizer.gradient_accumulation_steps:
                dense = [g for g in grads if g is not None]
                with tf.control_dependencies([tf.convert_to_tensor(g) for g in dense]):
                    ready = tf.constant(0)
                for device in devices:
                    with tf.device(device), tf.control_dependencies([tf.identity(ready)]):
                        self.begin(device)
            with internals.gradients_through(optimizer, self.send):
                result = original(grads, variables)
            for device in devices:
                if self.wanted(device):
                    updated = [shard.value() for shard in shards if shard.device == device]
                    with tf.device(device), tf.control_dependencies(updated):
                        self._finish(device)
        self.optimizer_scope = None
        # Counters continue from the optimizer's values.
        for v in counters:
            if id(v) not in scope.assigned:
                continue
            if v.name == "iteration":
                self.scope.count(id(v))
            if isinstance(scope.values[id(v)], Cell):
                self.scope.note(id(v))
            else:
                self.scope.add_update((v, scope.values[id(v)]))
        self._see_updates(variables)
        return result

    def apply_scaled(self, optimizer: Any, grads: list, variables: list) -> None:
        """Applies gradients of a scaled loss, or records in the ledgers that they were left out."""

        def skip() -> None:
            values = self.variables.values
            for device in sorted({shard.device for v in variables for shard in shards_of(values[id(v)])}):
                with tf.device(device):
                    self.begin(device)
                    self._finish(device)

        self._send_assigned(variables)
        self._scaled = True
        internals.apply_if_finite(optimizer, grads, variables, skip)
        self._scaled = False
        self._see_updates(variables)

    def _send_assigned(self, variables: Any) -> None:
        """Sends the step's assignments of variables before an optimizer updates them."""
        if not self._scaled:
            push(changes(self.variables, self.scope, self.only, among=variables))

    def _see_updates(self, variables: Any) -> None:
        """Makes the step see an optimizer's update, for a step that applies twice or assigns afterwards."""
        if self._scaled:
            return
        for v in variables:
            if id(v) not in self.scope.values:
                continue
            before, served = self.scope.values[id(v)], self.variables.values[id(v)]
            if isinstance(before, Cell):
                before.set(served.read_value())
            elif self.scope.within:
                self.scope.need_cell(id(v))
            else:
                self.scope.values[id(v)] = before.updated(served)

    def _send_change(self, variable: Any, before: tf.Tensor, after: tf.Tensor, moved: bool) -> None:
        add = moved and sends_difference(self.variables, variable)
        push(by_device(self.variables, variable, after - before if add else after, self.only, add=add))

    def begin(self, device: str) -> None:
        if device in self.entries or not self.wanted(device) or device not in self.variables.ledgers:
            return
        self.variables.applied_on.add(device)
        self.entries[device] = self.variables.ledgers[device].begin(self.slots[device], self.versions[device])

    def _finish(self, device: str) -> None:
        if device in self.entries:
            self.variables.ledgers[device].finish(self.slots[device], self.entries.pop(device))

    def begun(self, device: str) -> Any:
        """A context in which operations wait until the update has begun on a ps."""
        return tf.control_dependencies([self.entries[device]] if device in self.entries else [])

    def send(self, grads_and_vars: Sequence[tuple]) -> list[tuple]:
        """Moves gradients to their variables, the small ones of each ps as one tensor."""
        out: list[tuple] = []
        by_device: dict[str, list[tuple]] = {}
        for gradient, value in grads_and_vars:
            if gradient is None:
                out.append((None, value))
                continue
            whole = gradient if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)
            if self._by_rows.get(id(value)) == "lazy":  # Otherwise as on one device, which squares the summed rows.
                whole = with_each_row_once(gradient)
            if isinstance(value, ServerShardedVariable):
                for index, shard in enumerate(value.shards):
                    by_device.setdefault(shard.device, []).append((value.rows(whole, index), shard))
            else:
                by_device.setdefault(value.device, []).append((whole, value))
        for device, pairs in by_device.items():
            if not self.wanted(device):
                continue
            by_rows = [pair for pair in pairs if isinstance(pair[0], tf.IndexedSlices)]
            dense = [pair for pair in pairs if not isinstance(pair[0], tf.IndexedSlices)]
            gradients = [gradient for gradient, _ in dense]
            sent = packed(gradients)
            with tf.device(device):
                arrived = [tf.identity(flat) for flat in sent]
                rows = [tf.nest.map_structure(tf.identity, pair[0], expand_composites=True) for pair in by_rows]
                with tf.control_dependencies([*arrived, *(each.values for each in rows)]):
                    self.begin(device)
                with self.begun(device):
                    gradients = unpacked(arrived, gradients)
            for pairs_here, given in ((dense, gradients), (by_rows, rows)):
                out += [(gradient, value) for gradient, (_, value) in zip(given, pairs_here, strict=True)]
        return out

    def update(self, original: Callable, shard: Any, fn: Callable, args: tuple, kwargs: Any, group: bool) -> Any:
        """Updates a variable, or a shard of one, in place of `strategy.extended.update`."""
        if not self.wanted(shard.device):
            return None
        scope = self.optimizer_scope
        of = getattr(shard, "_shard_of", None)
        if scope is not None:
            scope.updating, scope.shard = True, of
            whole = shard if of is None else of[0]
            if args and isinstance(args[0], tf.IndexedSlices) and self._by_rows.get(id(whole)):
                indices, by_rows = args[0].indices, fn
                scope.rows = shard, indices
                fn, args = lambda v, *rest: by_rows(RowsOfVariable(v, indices), *rest), (args[0].values, *args[1:])
        try:
            with self.begun(shard.device):
                return original(shard, fn, args, kwargs, group)
        finally:
            if scope is not None:
                scope.updating, scope.shard, scope.rows = False, None, None


class _ShardScope(LocalScope):
    """What an optimizer updates in place of a variable: one of its shards, outside of our steps."""

    def __init__(self, variable: ServerShardedVariable, index: int) -> None:
        super().__init__([], [])
        self._variable = variable
        self._index = index

    def get_current_value(self, variable: Any) -> Any:
        value = internals.held(variable)
        mine = isinstance(value, ServerShardedVariable) and value.like is self._variable
        return value.shards[self._index] if mine else None


def adapt_updates(strategy: Any) -> None:
    """Makes `strategy.extended.update` accept sharded variables, and ask the step in which it is used."""
    original = strategy.extended.update

    def update(var: Any, fn: Callable, args: tuple = (), kwargs: Any = None, group: bool = True) -> Any:
        step = current()
        result = None
        for index, shard in enumerate(shards_of(var)):
            given = tuple(_rows(var, value, index) for value in args)
            if step is None and isinstance(var, ServerShardedVariable):  # In the user's own loop.
                with _ShardScope(var, index):
                    result = original(shard, fn, given, kwargs, group)
            elif step is None:
                result = original(shard, fn, given, kwargs, group)
            else:
                result = step.update(original, shard, fn, given, kwargs, group)
        return result

    strategy.extended.update = update


def _rows(var: Any, value: Any, index: int) -> Any:
    """Returns an argument of an update for one shard of a variable."""
    if not isinstance(var, ServerShardedVariable):
        return value
    value = getattr(value, "value", value)  # A keras.Variable.
    if isinstance(value, ServerShardedVariable):
        return value.shards[index]
    shape = getattr(value, "shape", None)
    return var.rows(value, index) if shape is not None and tuple(shape) == tuple(var.shape) else value
