"""The variables of a compiled model, by what a step does with them, and a step's own copy of them.

Read one by one, each of a model's variables is a message from a ps to the worker, and its gradient
one back. Here all small ones of a ps are sent as one tensor.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.parameter_servers import private
from toolkit.strategies.parameter_servers.ledger import Ledger
from toolkit.strategies.parameter_servers.server_shards import shards_of

__all__ = ["LocalScope", "LocalValue", "Variables", "packed", "unpacked"]

_SMALL = 64 << 10  # Bytes up to which a variable is packed; copying larger ones costs more than a message.


class LocalValue:
    """Takes the place of `keras.Variable.value` in a step: a tensor that gradient tapes take for a variable.

    Args:
        handle: The value, on the worker.
        trainable: Whether gradient tapes watch it, as they do the variable.
    """

    def __init__(self, handle: tf.Tensor, *, trainable: bool) -> None:
        self.handle = handle
        self.trainable = trainable
        self.shape = handle.shape
        self.dtype = handle.dtype

    def read_value(self) -> tf.Tensor:
        """Returns the value."""
        return self.__tf_tensor__()

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        if self.trainable:
            private.accessed(self)
        return self.handle if dtype is None or dtype == self.dtype else tf.cast(self.handle, dtype)


class LocalScope(keras.StatelessScope):
    """While entered, reads of some variables give these values, and assignments stay in the step.

    Variables that aren't among them are assigned as ever.

    Args:
        variables: `keras.Variable`s.
        values: A tensor, or a `LocalValue`, for each of them.

    Attributes:
        values: By a variable's id, what it has been set to last.
        assigned: By a variable's id, how often it was assigned.
    """

    def __init__(self, variables: Iterable[Any], values: Iterable[Any]) -> None:
        super().__init__(initialize_variables=False)
        ids = [id(variable) for variable in variables]
        self.values = dict(zip(ids, values, strict=True))
        self.assigned: dict[int, int] = {}

    def get_current_value(self, variable: Any) -> Any:
        """Returns a variable's value in the step, None for a variable that isn't among them."""
        return self.values.get(id(variable))

    def add_update(self, update: tuple) -> None:
        """Takes an assignment."""
        variable, value = update
        key = id(variable)
        if key not in self.values:
            variable.value.assign(tf.cast(value, variable.value.dtype))
            return
        self.assigned[key] = self.assigned.get(key, 0) + 1
        before = self.values[key]
        self.values[key] = LocalValue(value, trainable=before.trainable) if isinstance(before, LocalValue) else value


class Variables:
    """The variables of a compiled model, by what a step does with them.

    Args:
        model: A model that was built under the strategy's scope.
        ledgers: The ledger on each ps device.

    Attributes:
        served: The model's variables on the ps, which a step pulls.
        counters: What the chief holds for model and optimizer, and sends with each step.
        metrics: The metrics' running sums, which start anew in each dispatch.
        values: By a variable's id, its `value` outside of any step.
        applied_on: The ps that traced steps apply gradients on; there may be more ps than variables.
    """

    def __init__(self, model: Any, ledgers: dict[str, Ledger]) -> None:
        self.model = model
        self.ledgers = ledgers
        self.applied_on: set[str] = set()
        every = [*model.variables, *(model.optimizer.variables if model.optimizer is not None else [])]
        self.values = {id(v): v.value for v in every}
        served = {id(v) for v in every if any("/job:ps" in shard.device for shard in shards_of(v.value))}
        self.served = [v for v in model.variables if id(v) in served]
        self.counters = [v for v in every if id(v) not in served]
        self.metrics = list(model.metrics_variables)

    def scope(self, served: Iterable[Any], counters: Iterable[Any], metrics: Iterable[Any]) -> LocalScope:
        """Returns a step's own copy of all variables, with these values."""
        return LocalScope([*self.served, *self.counters, *self.metrics], [*served, *counters, *metrics])

    def pull(self) -> tuple[list[LocalValue], dict[str, tf.Tensor]]:
        """Brings the served variables to the device of the caller.

        Returns:
            Their values in the same order, and by ps device which version was read.
        """
        shards = [shard for v in self.served for shard in shards_of(self.values[id(v)])]
        by_device: dict[str, list[int]] = {}
        for index, shard in enumerate(shards):
            by_device.setdefault(shard.device, []).append(index)
        tensors: dict[int, tf.Tensor] = {}
        versions = {}
        for device, indices in by_device.items():
            before = []
            if device in self.ledgers:
                versions[device] = self.ledgers[device].version()
                before = [versions[device]]
            with tf.device(device), tf.control_dependencies(before):
                read = [shards[index].read_value() for index in indices]
                sent = packed(read)
            tensors.update(zip(indices, unpacked(sent, read), strict=True))
        in_order = iter([tensors[index] for index in range(len(shards))])
        values = []
        for v in self.served:
            mine = [next(in_order) for _ in shards_of(self.values[id(v)])]
            values.append(LocalValue(tf.concat(mine, 0) if len(mine) > 1 else mine[0], trainable=bool(v.trainable)))
        return values, versions


def packed(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns flat tensors: one of all small values of each dtype, and one of each other."""
    return [
        tf.concat([tf.reshape(values[n], [-1]) for n in indices], 0)
        if len(indices) > 1
        else tf.reshape(values[indices[0]], [-1])
        for indices in _packs(values)
    ]


def unpacked(flat: Sequence[tf.Tensor], like: Sequence[Any]) -> list[tf.Tensor]:
    """Returns what was packed, on the device of the caller.

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
    """Returns the indices of the values that are sent as one tensor, for each tensor."""
    packs: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        small = value.shape.num_elements() * value.dtype.size <= _SMALL
        packs.setdefault((value.dtype, None if small else index), []).append(index)
    return list(packs.values())
