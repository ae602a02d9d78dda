"""A step: pull the variables, run the user's own `train_step`, push what it changes.

`train_step` is Keras's or the user's, unchanged: it reads the step's own copies, and where it applies
gradients they travel to the ps and are applied there by the optimizer's own update.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.parameter_servers import private
from toolkit.strategies.parameter_servers.local import Copies, Stand, packed, unpacked
from toolkit.strategies.parameter_servers.placement import devices_of
from toolkit.strategies.parameter_servers.sharded import Sharded
from toolkit.strategies.parameter_servers.variables import Variables
from toolkit.support.wrapping import wrap

__all__ = ["Step", "active", "adapt_optimizers", "changes", "push", "updates"]

active = threading.local()  # `active.step` is the one that is being traced.


def adapt_optimizers() -> None:
    """Has Keras's optimizers ask a step, where they are used in one, what to do with gradients."""
    wrap(keras.optimizers.Optimizer, "apply", _apply)


def _apply(original: Callable, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    step = getattr(active, "step", None)
    if step is None:
        return original(optimizer, grads, trainable_variables)
    return step.apply(lambda g, v: original(optimizer, g, v), optimizer, list(grads), trainable_variables)


class _Book(Copies):
    """What an optimizer sees while it applies: its counters' values in the step, and parts of what is sharded."""

    part: tuple[Sharded, int] | None = None
    sharded: dict[int, Sharded]

    def get_current_value(self, variable: Any) -> Any:
        if self.part is not None:
            mine = self.sharded.get(id(variable))
            if mine is not None and mine.like is self.part[0]:
                return mine.parts[self.part[1]]
        return super().get_current_value(variable)


class Step:
    """One step, while it is traced.

    Args:
        variables: Of the model.
        copies: The step's.
        versions: Of each ps, when the copies were read.
        places: Of each ps device: the step modulo the ledgers' capacity, there.
        only: Devices whose variables are to be updated; None for all.
    """

    def __init__(
        self, variables: Variables, copies: Copies, versions: dict, places: dict, only: frozenset | None
    ) -> None:
        self.variables = variables
        self.copies = copies
        self.versions = versions
        self.places = places
        self.only = only
        self.notes: dict[str, tf.Tensor] = {}
        self.book: _Book | None = None

    def wanted(self, device: str) -> bool:
        return self.only is None or device in self.only

    def apply(self, original: Callable, optimizer: Any, grads: list, variables: Any) -> Any:
        variables = list(variables) if variables is not None else list(self.variables.model.trainable_variables)
        counting = self.variables.counting
        book = _Book(counting, [self.copies.values[id(v)] for v in counting])
        book.sharded = self.variables.sharded
        self.book = book
        with book:
            real = [v.value for v in variables]
            devices = sorted({device for value in real for device in devices_of(value)})
            if optimizer.weight_decay is not None:  # It changes variables before the gradients are sent.
                dense = [g for g in grads if g is not None]
                with tf.control_dependencies([tf.convert_to_tensor(g) for g in dense]):
                    ready = tf.constant(0)
                for device in devices:
                    with tf.device(device), tf.control_dependencies([tf.identity(ready)]):
                        self.begin(device)
            with private.gradients_through(optimizer, self.send):
                result = original(grads, variables)
            for device in devices:
                if self.wanted(device):
                    here = [
                        part for value in real for part in getattr(value, "parts", [value]) if part.device == device
                    ]
                    with tf.device(device), tf.control_dependencies([part.value() for part in here]):
                        self._finish(device)
        self.book = None
        # What counts goes on from where the optimizer left it.
        for v in counting:
            if id(v) in book.assigned:
                self.copies.add_update((v, book.values[id(v)]))
        self.copies.values.update(self._read_again(variables))
        return result

    def _read_again(self, variables: Sequence[Any]) -> dict[int, Any]:
        """A step that applies twice sees its own first update; nothing is read where nobody asks."""
        mine = [v for v in variables if id(v) in self.copies.values]
        return {id(v): _Late(self.variables.values[id(v)], self.copies.values[id(v)]) for v in mine}

    def begin(self, device: str) -> None:
        if device in self.notes or not self.wanted(device) or device not in self.variables.ledgers:
            return
        self.variables.applied_on.add(device)
        self.notes[device] = self.variables.ledgers[device].begin(self.places[device], self.versions[device])

    def _finish(self, device: str) -> None:
        if device in self.notes:
            self.variables.ledgers[device].finish(self.places[device], self.notes.pop(device))

    def send(self, grads_and_vars: Sequence[tuple]) -> list[tuple]:
        """Moves gradients to where their variables are, the small ones of each ps as one tensor."""
        out: list[tuple] = []
        groups: dict[str, list[tuple]] = {}
        for gradient, value in grads_and_vars:
            if gradient is None:
                out.append((None, value))
                continue
            if isinstance(value, Sharded):
                whole = tf.convert_to_tensor(gradient)
                for number, part in enumerate(value.parts):
                    groups.setdefault(part.device, []).append((value.rows(whole, number), part))
            else:
                groups.setdefault(value.device, []).append((gradient, value))
        for device, pairs in groups.items():
            if not self.wanted(device):
                continue
            sparse = [pair for pair in pairs if isinstance(pair[0], tf.IndexedSlices)]
            dense = [pair for pair in pairs if not isinstance(pair[0], tf.IndexedSlices)]
            sent = packed([gradient for gradient, _ in dense])
            with tf.device(device):
                arrived = [tf.identity(flat) for flat in sent]
                with tf.control_dependencies(arrived):
                    self.begin(device)
                note = [self.notes[device]] if device in self.notes else []
                with tf.control_dependencies(note):
                    parts = unpacked(arrived, [gradient for gradient, _ in dense])
            out += [(part, value) for part, (_, value) in zip(parts, dense, strict=True)] + sparse
        return out

    def update(self, original: Callable, var: Any, fn: Callable, args: tuple, kwargs: Any, group: bool) -> Any:
        """In the place of `strategy.extended.update`."""
        if not self.wanted(var.device):
            return None
        note = [self.notes[var.device]] if var.device in self.notes else []
        with tf.control_dependencies(note):
            return original(var, fn, args, kwargs, group)

    @contextlib.contextmanager
    def part(self, var: Any) -> Iterator[None]:
        """While entered, an optimizer's variables are the parts that belong to this one."""
        if self.book is not None:
            self.book.part = getattr(var, "_part_of", None)
        try:
            yield
        finally:
            if self.book is not None:
                self.book.part = None


class _Late(Stand):
    """A variable that this step has updated: read from its ps again when it is asked for."""

    def __init__(self, value: Any, before: Stand) -> None:
        self._value = value
        self.trainable = before.trainable
        self.shape = before.shape
        self.dtype = before.dtype
        self._read: tf.Tensor | None = None

    @property
    def handle(self) -> tf.Tensor:
        if self._read is None:
            self._read = self._value.read_value()
        return self._read


def updates(strategy: Any) -> None:
    """Lets `strategy.extended.update` take sharded variables, and heed the step that it is used in."""
    original = strategy.extended.update

    def update(var: Any, fn: Callable, args: tuple = (), kwargs: Any = None, group: bool = True) -> Any:
        step = getattr(active, "step", None)
        parts = var.parts if isinstance(var, Sharded) else [var]
        result = None
        for number, part in enumerate(parts):
            given = tuple(_piece(var, value, number) for value in args) if isinstance(var, Sharded) else args
            if step is None:
                result = original(part, fn, given, kwargs, group)
            else:
                with step.part(part):
                    result = step.update(original, part, fn, given, kwargs, group)
        return result

    strategy.extended.update = update


def _piece(whole: Sharded, value: Any, number: int) -> Any:
    value = getattr(value, "value", value)  # A keras.Variable.
    if isinstance(value, Sharded):
        return value.parts[number]
    shape = getattr(value, "shape", None)
    return whole.rows(value, number) if shape is not None and tuple(shape) == tuple(whole.shape) else value


def changes(variables: Variables, copies: Copies, before: Sequence[Stand], only: frozenset | None) -> dict[str, list]:
    """Returns, by device, (what a step added to a held variable that it assigned, how to add it)."""
    groups: dict[str, list[tuple]] = {}
    for v, stand in zip(variables.held, before, strict=True):
        if id(v) not in copies.assigned:
            continue
        value = variables.values[id(v)]
        change = tf.convert_to_tensor(copies.values[id(v)])
        adds = tf.as_dtype(v.dtype).is_floating or tf.as_dtype(v.dtype).is_integer
        if adds:
            change = change - stand.handle
        for number, part in enumerate(getattr(value, "parts", [value])):
            if only is None or part.device in only:
                mine = value.rows(change, number) if isinstance(value, Sharded) else change
                groups.setdefault(part.device, []).append((mine, part.assign_add if adds else part.assign))
    return groups


def push(groups: dict[str, list]) -> None:
    """Has the ps add what a step changed besides its parameters, such as moving averages."""
    for device, pairs in groups.items():
        sent = packed([change for change, _ in pairs])
        with tf.device(device):
            arrived = unpacked(sent, [change for change, _ in pairs])
            for (_, assign), change in zip(pairs, arrived, strict=True):
                assign(change)
