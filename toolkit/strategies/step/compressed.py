"""The exchange of compressed gradients, by any `Compression`: what is the same for all of them.

A compression is asked which gradients it takes. For these the optimizer keeps what is another on each replica, or the
same on all, beside its slots, from when it is built: then it learns what it trains. A checkpoint has the tensors of all
replicas, so a resumed run is bit for bit that of no pause. With another number of replicas they are dropped.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.compression import Compression, Kept
from toolkit.strategies.context import this_step
from toolkit.strategies.mesh import Among, Layout, layout_of, replica_count
from toolkit.strategies.options import GradientExchange, options_of
from toolkit.strategies.step import collectives
from toolkit.strategies.step.collectives import joined
from toolkit.strategies.step.gradients import Exchange, Gradients, sent_as, summed
from toolkit.strategies.step.powersgd import PowerSGD
from toolkit.strategies.step.sharded_optimizer import is_in_parts, make_in_scope
from toolkit.strategies.step.sharded_variable import ReplicaShardedVariable
from toolkit.strategies.step.trusted import check_elementwise
from toolkit.strategies.variables import is_table, optimizers_of

# `options.COMPRESSIONS`, but for "none".
_BY_NAME: dict[str, Callable[[GradientExchange], Compression]] = {"powersgd": lambda exchange: PowerSGD(exchange.rank)}
_ATTRIBUTE = "_toolkit_memories"
_WAITS = "_toolkit_sends_all_yet"


def compression_of(strategy: tf.distribute.Strategy) -> Compression | None:
    """Returns how the gradients of a strategy are compressed; None if they aren't."""
    exchange = options_of(strategy).gradients
    if isinstance(exchange.compression, Compression):
        return exchange.compression
    return None if exchange.compression == "none" else _BY_NAME[exchange.compression](exchange)


class Memory(NamedTuple):
    """A replica's state for one gradient, kept from step to step.

    Attributes:
        number: The variable's, among those that the optimizer trains.
        compression: Whose.
        kept: What it keeps, by name.
        variables: The variable of each.
    """

    number: int
    compression: Compression
    kept: Mapping[str, Kept]
    variables: Mapping[str, Any]

    def read(self, scale: tf.Tensor | float) -> dict[str, tf.Tensor]:
        """Returns this replica's values, in a step whose gradients are multiplied by `scale`."""
        values = {name: tf.convert_to_tensor(variable.value) for name, variable in self.variables.items()}
        return {name: value * scale if self.kept[name].own else value for name, value in values.items()}

    def write(self, values: Mapping[str, tf.Tensor], scale: tf.Tensor | float, finite: tf.Tensor) -> None:
        """Keeps values, unless what was exchanged isn't finite."""
        for name, variable in self.variables.items():
            value = values[name] / scale if self.kept[name].own else values[name]
            variable.assign(tf.where(finite, value, tf.convert_to_tensor(variable.value)))


class _Replicas:
    """By what a compression exchanges: see `Replicas`.

    Args:
        beside: Gradients that are sent as they are: the first sum has them too, so that they take no exchange of their
            own.

    Attributes:
        count: How many replicas there are.
        beside: Their sums, once there was a sum.
        finite: Whether all that was exchanged is finite: the same on all replicas.
    """

    def __init__(self, beside: Sequence[tf.Tensor]) -> None:
        self.count: int = this_step.count
        self.beside: list[tf.Tensor] | None = None
        self.finite: tf.Tensor = tf.constant(value=True)
        self._waiting = list(beside)

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns sums over all replicas, and keeps those of what is sent beside them."""
        flat, split = joined([*tensors, *self._waiting])
        total = collectives.all_reduce(flat, dtype=sent_as())
        self._look(total)
        parts = split(total)
        if self.beside is None:
            self.beside, self._waiting = parts[len(tensors) :], []
        return parts[: len(tensors)]

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns all replicas' tensors."""
        found = collectives.all_gather(tensor, among=Among.ALL, dtype=sent_as() if tensor.dtype.is_floating else None)
        if tensor.dtype.is_floating:
            self._look(found)
        return found

    def _look(self, tensor: tf.Tensor) -> None:
        self.finite = tf.logical_and(self.finite, tf.reduce_all(tf.math.is_finite(tensor)))


class Compressed(Exchange):
    """Gradients that the strategy's compression takes, with what else is sent in float32 beside them."""

    name = "compression"

    def __init__(self, sent: Gradients) -> None:
        super().__init__(sent)
        self._memories = memories_of(sent.optimizer, sent.variables)

    @staticmethod
    def begin(optimizer: Any) -> bool:
        """Whether its strategy compresses."""
        return options_of(optimizer._distribution_strategy).gradients.compression != "none"

    @staticmethod
    @contextlib.contextmanager
    def building(optimizer: Any, variables: Sequence) -> Iterator[None]:
        """Makes the state of compression."""
        yield
        _make_memories(optimizer, variables)

    def choose(self, numbers: Sequence[int]) -> list[int]:
        """All, if some are compressed, but for those of which each replica updates its part."""
        return [number for number in numbers if self._takes(number)] if any(self._memories) else []

    def _takes(self, number: int) -> bool:
        in_parts = is_in_parts(self.sent.optimizer, self.sent.variables[number])
        rows = isinstance(self.sent.values[number], tf.IndexedSlices)
        return self._memories[number] is not None or rows or not in_parts

    def run(self) -> None:
        """Exchanges them."""
        memories = [self._memories[number] for number in self.numbers]
        self.sent.complete(self.numbers, totals(self.sent.of_shares(self.numbers), memories, self.sent.scale))

    @staticmethod
    def state(optimizer: Any) -> dict[str, Any]:
        """What each replica keeps, by the number of the optimizer's trainable variable."""
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        return {
            f"{memory.number:04d}/{name}": variable
            for memory in optimizer.__dict__.get(_ATTRIBUTE, {}).values()
            for name, variable in memory.variables.items()
        }


def totals(gradients: list, memories: Sequence[Memory | None], scale: tf.Tensor | float = 1.0) -> list:
    """Returns the sums over all replicas: of gradients with a memory as their compression has them.

    Args:
        gradients: Weighted; tensors or `tf.IndexedSlices`, in the order in which they are known.
        memories: What this replica keeps of each, None for those that are sent as they are; () if all are.
        scale: By what gradients are multiplied in this step.
    """
    kinds = [
        "compressed"
        if memory is not None and not isinstance(gradient, tf.IndexedSlices)
        else "beside"
        if isinstance(gradient, tf.Tensor) and gradient.dtype == tf.float32
        else "alone"
        for gradient, memory in zip(gradients, memories or [None] * len(gradients), strict=True)
    ]
    compressed, beside, alone = (
        [n for n, kind in enumerate(kinds) if kind == each] for each in ("compressed", "beside", "alone")
    )
    if not compressed:  # Gradients of a table's looked up rows.
        return summed(gradients)
    given, replicas = [gradients[n] for n in compressed], _Replicas([gradients[n] for n in beside])
    held: list[Memory] = [memory for n in compressed if (memory := memories[n]) is not None]
    sums, later = held[0].compression.exchange(
        [tf.cast(each, tf.float32) for each in given], [memory.read(scale) for memory in held], replicas
    )
    for memory, values in zip(held, later, strict=True):
        memory.write(values, scale, replicas.finite)
    sums = [tf.cast(each, gradient.dtype) for each, gradient in zip(sums, given, strict=True)]
    others = replicas.beside if replicas.beside is not None else summed([gradients[n] for n in beside])
    rest = summed([gradients[n] for n in alone]) if alone else []
    by_number = dict(zip([*compressed, *beside, *alone], [*sums, *others, *rest], strict=True))
    return [by_number[n] for n in range(len(gradients))]


def memories_of(optimizer: Any, variables: Sequence[Any]) -> list[Memory | None]:
    """Returns each variable's state; None for variables whose gradients are sent exactly."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # Of a LossScaleOptimizer.
    kept = {} if optimizer.__dict__.get(_WAITS) else optimizer.__dict__.get(_ATTRIBUTE, {})
    return [kept.get(optimizer._var_key(variable)) if kept else None for variable in variables]


def _make_memories(optimizer: Any, variables: Sequence) -> None:
    compression = compression_of(optimizer._distribution_strategy)
    if not variables or compression is None:
        return
    check_elementwise(
        optimizer,
        asked=f"gradients compressed by {compression}",
        found="its update may depend on the whole layer's gradient, of which a part comes later",
        option="compression",
    )
    memories = {
        optimizer._var_key(variable): make_in_scope(optimizer, functools.partial(_make, compression, variable, number))
        for number, variable in enumerate(variables)
        if _is_compressed(compression, variable)
    }
    object.__setattr__(optimizer, _ATTRIBUTE, memories)  # Keras would take them for the optimizer's own variables.


def check_smaller(model: keras.Model) -> None:
    """Checks that compression takes a gradient.

    Raises:
        StrategyError: It takes none.
    """
    compression, variables = compression_of(model.distribute_strategy), model.trainable_variables
    if compression is None or not variables or any(_is_compressed(compression, variable) for variable in variables):
        return
    largest = max(variables, key=lambda variable: tf.TensorShape(variable.shape).num_elements())
    raise StrategyError(
        asked=f"gradients compressed by {compression}",
        found=f"no gradient gets smaller: the largest, of {largest.path}, has the shape {tuple(largest.shape)}",
        remedy="Let it compress more, such as by a smaller rank, or leave compression out",
    )


def _is_compressed(compression: Compression, variable: Any) -> bool:
    plain = not layout_of(variable).in_shards and not getattr(variable, "overwrite_with_gradient", False)
    plain = plain and not is_table(variable.name)  # Of a table's gradient, only the looked up rows are sent.
    return plain and compression.takes(tuple(variable.shape))


def _make(compression: Compression, variable: Any, number: int) -> Memory:
    kept = compression.keeps(tuple(variable.shape), number)
    path = variable.path.replace("/", "_")
    return Memory(number, compression, kept, {name: _variable(each, f"{path}_{name}") for name, each in kept.items()})


def _variable(kept: Kept, name: str) -> Any:
    if kept.own:  # Rows of all replicas, each of which has its own. A checkpoint has all of them.
        first, *others = kept.shape
        return ReplicaShardedVariable(
            keras.initializers.Zeros(),
            [replica_count() * first, *others],
            layout=Layout(axis=0, among=Among.ALL),
            dtype="float32",
            trainable=False,
            name=name,
        )
    return keras.Variable(
        tf.zeros(kept.shape) if kept.initial is None else kept.initial,
        trainable=False,
        aggregation="only_first_replica",
        synchronization="on_read",
        name=name,
    )


def send_all(model: keras.Model, value: bool) -> None:
    """Makes a model's optimizers send whole gradients, or compress them, in what is traced from now on."""
    for optimizer in optimizers_of(model):
        object.__setattr__(getattr(optimizer, "inner_optimizer", optimizer), _WAITS, value)
