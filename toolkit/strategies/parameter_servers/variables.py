"""The variables of a compiled model by their use in a step, a step's own copy of them, and what it sends to the ps.

Read one by one, each of a model's variables is a message from a ps to the worker, and its gradient
one back. Here all small ones of a ps are sent as one tensor. `changes` and `push` send what a step assigns, such as
moving averages, and weights that it clips or copies.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.context import this_step
from toolkit.strategies.parameter_servers import internals
from toolkit.strategies.parameter_servers.ledger import Ledger
from toolkit.strategies.parameter_servers.local_values import Cell, LocalTable, LocalValue, ServedTable, updates_by_rows
from toolkit.strategies.parameter_servers.placement import SEED, ServerShardedVariable, shards_of
from toolkit.strategies.step.train_step import global_seeds
from toolkit.strategies.variables import optimizers_of

_LOG = logging.getLogger(__name__)

_SMALL = 64 << 10  # Up to this many bytes a variable is packed; copying a larger one costs more than a message.


class LocalScope(keras.StatelessScope):
    """A context in which reads of some variables return these values, and assignments stay in the step.

    Variables that aren't among them are assigned as ever.

    Args:
        variables: `keras.Variable`s.
        values: A tensor, a `LocalValue`, a `LocalTable` or a `Cell`, for each of them.
        without_cell: Takes the ids of variables that change in a branch or a loop and have no cell: the function that
            is being traced is no good.

    Attributes:
        variables: As given.
        values: By a variable's id, what it has been set to last.
        assigned: By a variable's id, how often it was assigned.
        counted: By a variable's id, how often of these an optimizer has added one to it, for a step that it applies.
        unsent: The ids of variables that were assigned since this step has last sent them to their ps.
        conditional: The ids of variables that were assigned in a branch or a loop, so that what they hold isn't known
            beforehand.
    """

    def __init__(self, variables: Iterable[Any], values: Iterable[Any], without_cell: set[int] | None = None) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.variables = list(variables)
        ids = [id(variable) for variable in self.variables]
        self.values = dict(zip(ids, values, strict=True))
        self.assigned: dict[int, int] = {}
        self.counted: dict[int, int] = {}
        self.unsent: set[int] = set()
        self.conditional: set[int] = set()
        self.without_cell = set() if without_cell is None else without_cell
        self._graph = tf.compat.v1.get_default_graph()

    def __enter__(self) -> "LocalScope":
        this_step.ps_scopes = (*this_step.ps_scopes, self)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        this_step.ps_scopes = this_step.ps_scopes[:-1]

    @property
    def within(self) -> bool:
        """Whether a branch, a loop or a function within the step is being traced."""
        return tf.compat.v1.get_default_graph() is not self._graph

    def get_current_value(self, variable: Any) -> Any:
        """Returns a variable's value in the step, None for a variable that isn't included."""
        value = self.values.get(id(variable))
        return value.read_value() if isinstance(value, Cell) and not value.trainable else value

    def tensors(self, variables: Iterable[Any]) -> list[tf.Tensor]:
        """Returns the current values of some variables."""
        return [tf.convert_to_tensor(self.values[id(variable)]) for variable in variables]

    def add_update(self, update: tuple) -> None:
        """Takes an assignment."""
        variable, value = update
        key = id(variable)
        if key not in self.values:
            variable.value.assign(tf.cast(value, variable.value.dtype))
            return
        self.note(key)
        value = tf.ensure_shape(value, variable.shape)  # TensorFlow doesn't always know it.
        before = self.values[key]
        if isinstance(before, Cell):
            before.assign(value)
        elif not self.within:
            self.unsent.add(key)
            self.values[key] = before.assigned(value) if isinstance(before, LocalValue) else tf.stop_gradient(value)

    def count(self, key: int) -> None:
        """Records that an optimizer has added one to a variable of this id, for a step that it applies."""
        self.counted[key] = self.counted.get(key, 0) + 1

    def note(self, key: int) -> None:
        """Records that a variable of this id is assigned."""
        self.assigned[key] = self.assigned.get(key, 0) + 1
        if self.within:
            self.conditional.add(key)
            self.need_cell(key)

    def need_cell(self, key: int) -> None:
        """Records that a variable of this id changes in a branch, a loop or a function within the step."""
        if not isinstance(self.values[key], Cell):
            self.without_cell.add(key)


def innermost() -> LocalScope | None:
    """Returns this thread's innermost scope; None outside of all."""
    return this_step.ps_scopes[-1] if this_step.ps_scopes else None


def take(original: Callable, x: Any, indices: Any, axis: int | None = None) -> Any:
    """Looks rows up where a variable is a table in the step that is being traced, in the place of `keras.ops.take`.

    A layer hands its variable to that, but what arrives where TensorFlow is called is a whole tensor.
    """
    if axis != 0 or not isinstance(x, keras.Variable) or isinstance(indices, (tf.SparseTensor, tf.RaggedTensor)):
        return original(x, indices, axis)
    scope, held = innermost(), internals.held(x)
    table = None if scope is None else scope.values.get(id(x))
    if isinstance(table, LocalTable):
        return table.lookup(tf.convert_to_tensor(indices))
    if table is None and isinstance(held, ServerShardedVariable):  # In the user's own loop.
        if held.trainable:
            internals.accessed(held)
        return ServedTable(held, {}).lookup(tf.convert_to_tensor(indices), held.handle)
    return original(x, indices, axis)


def watched(original: Callable, tape: Any) -> Sequence[Any]:
    """Returns what a tape watches: the variables of which it has seen their values in the step that is being traced."""
    pairs = [(v, scope.values[id(v)]) for scope in this_step.ps_scopes for v in scope.variables]
    of = {id(value.handle): v for v, value in pairs if isinstance(value, (LocalValue, Cell))}
    return tuple(of.get(id(each.handle), each) for each in original(tape))


class Variables:
    """The variables of a compiled model by their use in a step.

    Args:
        model: A model that was built under the strategy's scope.
        ledgers: The ledger on each ps device.
        min_lazy_bytes: As `ParameterServerOptions` has it.
        in_turn: Whether no two steps are under way at the same time.
        not_sums: The ids of metrics' variables that are no sums: each step is sent what the one before has left.

    Attributes:
        served: The model's variables on the ps, which a step pulls.
        counters: What the chief holds for model and optimizer, and sends with each step.
        told: The ids of counters of which only a worker knows what a step makes of them: metrics that are no sums, and
            variables of layers that are named as an optimizer's.
        metrics: The metrics' running sums, which start again from zero in each dispatch.
        values: By a variable's id, its `value` outside of any step.
        celled: The ids of those that a step assigns in branches, loops or functions within it.
        without_cell: The ids of those of which this has shown since the function that is traced was begun.
        reported: Of a step, "train" or "test", by the names in its logs: the number of the metric whose result it is,
            and its place among that metric's results.
        applied_on: The ps that traced steps apply gradients on; there may be more ps than variables.
        seeds: `keras.random`'s generator for calls without a seed, which counts with the others.
    """

    def __init__(
        self,
        model: Any,
        ledgers: dict[str, Ledger],
        *,
        min_lazy_bytes: int = 1 << 20,
        in_turn: bool = False,
        not_sums: Iterable[int] = (),
    ) -> None:
        not_sums = frozenset(not_sums)
        self.in_turn = in_turn
        self.min_lazy_bytes = min_lazy_bytes
        self.model = model
        self.ledgers = ledgers
        self.applied_on: set[str] = set()
        self._lazy: dict[int, str] = {}  # Those for which a message was logged.
        self.seeds = global_seeds(model)
        of_optimizers = (v for optimizer in optimizers_of(model) for v in optimizer.variables)
        every = [*model.variables, *of_optimizers, self.seeds.state]
        self.values = {id(v): v.value for v in every}
        served = {id(v) for v in every if any("/job:ps" in shard.device for shard in shards_of(v.value))}
        self.served = [v for v in model.variables if id(v) in served]
        kept = [v for v in model.metrics_variables if id(v) in not_sums]
        counters = {id(v): v for v in [*every, *kept] if id(v) not in served}
        self.counters = list(counters.values())
        self.told = not_sums | {id(v) for v in model.variables if id(v) in counters and v.name != SEED}
        self.metrics = [v for v in model.metrics_variables if id(v) not in not_sums]
        self.celled: set[int] = set()
        self.without_cell: set[int] = set()
        self.reported: dict[str, dict[str, tuple[int, int]]] = {}

    def scope(self, served: Iterable[Any], counters: Iterable[Any], metrics: Iterable[Any] | None = None) -> LocalScope:
        """Returns a step's own copy of all variables, with these values; metrics begin at zero unless given."""
        if metrics is None:
            metrics = [tf.zeros(v.shape, v.dtype) for v in self.metrics]
        return self.scope_of([*self.served, *self.counters, *self.metrics], [*served, *counters, *metrics])

    def scope_of(self, variables: Sequence[Any], values: Iterable[Any]) -> LocalScope:
        """Returns a step's own copy of some variables, with these values, in local variables if the step needs them."""
        held = [
            Cell(tf.convert_to_tensor(value), trainable=isinstance(value, LocalValue) and value.trainable)
            if id(variable) in self.celled
            else value
            for variable, value in zip(variables, values, strict=True)
        ]
        return LocalScope(variables, held, self.without_cell)

    def by_rows(self, optimizer: Any, variable: Any) -> str:
        """Returns how an optimizer updates only the looked up rows of a variable, as `updates_by_rows` does."""
        how = ""
        if _is_table(variable):
            how = updates_by_rows(optimizer, self.values[id(variable)], min_lazy_bytes=self.min_lazy_bytes)
        if how == "lazy" and id(variable) not in self._lazy:
            self._lazy[id(variable)] = variable.path
            _LOG.info(
                "With %s, rows of %s are updated only in the steps that look them up; on one device, in every step "
                "(min_lazy_bytes=%d)",
                type(optimizer).__name__,
                variable.path,
                self.min_lazy_bytes,
            )
        return how

    @property
    def lazy(self) -> list[str]:
        """The paths of those of which `by_rows` has said that only looked up rows are updated."""
        return list(self._lazy.values())

    def pull(self) -> tuple[list[LocalValue], dict[str, tf.Tensor]]:
        """Copies the served variables to the caller's device.

        Returns:
            Their values in the same order, and by ps device which version was read.
        """
        versions = {device: ledger.version() for device, ledger in self.ledgers.items()}
        after = {device: [version] for device, version in versions.items()}
        tables = {id(v): self.values[id(v)] for v in self.served if _is_table(v)}
        shards = [shard for v in self.served if id(v) not in tables for shard in shards_of(self.values[id(v)])]
        by_device: dict[str, list[int]] = {}
        for index, shard in enumerate(shards):
            by_device.setdefault(shard.device, []).append(index)
        tensors: dict[int, tf.Tensor] = {}
        for device, indices in by_device.items():
            with tf.device(device), tf.control_dependencies(after.get(device, [])):
                read = [shards[index].read_value() for index in indices]
                sent = packed(read)
            tensors.update(zip(indices, unpacked(sent, read), strict=True))
        in_order = iter([tensors[index] for index in range(len(shards))])
        values: list[LocalValue] = []
        for v in self.served:
            if id(v) in tables:
                values.append(LocalTable(tables[id(v)], trainable=True, after=after))
                continue
            mine = [next(in_order) for _ in shards_of(self.values[id(v)])]
            values.append(LocalValue(tf.concat(mine, 0) if len(mine) > 1 else mine[0], trainable=bool(v.trainable)))
        return values, versions


def _is_table(variable: Any) -> bool:
    """Whether rows of a variable may be looked up and the whole is large enough for its own message."""
    dtype = tf.as_dtype(variable.dtype)
    size = math.prod(variable.shape) * dtype.size
    return bool(variable.trainable) and dtype.is_floating and len(variable.shape) == 2 and size > _SMALL


def packed(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns flat tensors: one of all small values of each dtype, and each other value."""
    return [
        tf.concat([tf.reshape(values[n], [-1]) for n in indices], 0)
        if len(indices) > 1
        else tf.reshape(values[indices[0]], [-1])
        for indices in _packs(values)
    ]


def unpacked(flat: Sequence[tf.Tensor], like: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the packed values, on the caller's device.

    Args:
        flat: What `packed` returned.
        like: Anything with the shapes and dtypes of the values that were packed.
    """
    values: dict[int, tf.Tensor] = {}
    for each, indices in zip(flat, _packs(like), strict=True):
        parts = [tf.identity(each)]
        if len(indices) > 1:
            parts = tf.split(parts[0], [like[n].shape.num_elements() for n in indices])
        for index, part in zip(indices, parts, strict=True):
            values[index] = tf.reshape(part, like[index].shape)
    return [values[index] for index in range(len(like))]


def _packs(values: Sequence[Any]) -> list[list[int]]:
    """Returns for each sent tensor the indices of the values in it."""
    packs: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        small = value.shape.num_elements() * value.dtype.size <= _SMALL
        packs.setdefault((value.dtype, None if small else index), []).append(index)
    return list(packs.values())


def changes(
    variables: Variables, scope: LocalScope, only: frozenset | None = None, *, among: Sequence | None = None
) -> dict[str, list]:
    """Returns, by device, (what a step sends to a served variable that it assigned, what takes it there).

    Args:
        variables: The model's.
        scope: The step's own copy of them, which takes them for sent.
        only: Devices of the ps whose variables are to be changed; None for all.
        among: Variables to look at; None for all.
    """
    found: dict[str, list[tuple]] = {}
    for v in variables.served if among is None else among:
        if id(v) not in scope.unsent:
            continue
        scope.unsent.remove(id(v))
        local = scope.values[id(v)]
        add = sends_difference(variables, v) and local.moved
        change = local.change if add else local.current()
        for device, pairs in by_device(variables, v, change, only, add=add).items():
            found.setdefault(device, []).extend(pairs)
    return found


def sends_difference(variables: Variables, variable: Any) -> bool:
    """Returns whether a step that computes a variable from itself sends the difference, to keep others' changes."""
    dtype = tf.as_dtype(variable.dtype)
    return not variables.in_turn and (dtype.is_floating or dtype.is_integer)


def by_device(
    variables: Variables, variable: Any, value: tf.Tensor, only: frozenset | None, *, add: bool
) -> dict[str, list]:
    """Returns a value for a served variable, or a difference to add to it, as `changes` does."""
    held = variables.values[id(variable)]
    found: dict[str, list[tuple]] = {}
    for index, shard in enumerate(shards_of(held)):
        if only is None or shard.device in only:
            mine = held.rows(value, index) if isinstance(held, ServerShardedVariable) else value
            found.setdefault(shard.device, []).append((mine, shard.assign_add if add else shard.assign))
    return found


def push(changed: dict[str, list]) -> None:
    """Sends the result of `changes` to the ps, the small changes of each ps as one tensor."""
    for device, pairs in changed.items():
        sent = packed([change for change, _ in pairs])
        with tf.device(device):
            arrived = unpacked(sent, [change for change, _ in pairs])
            for (_, assign), change in zip(pairs, arrived, strict=True):
                assign(change)
