"""A step's own copy of the variables, in place of those on the ps.

Read one by one, each of a model's variables is a message from a ps to the worker, and its gradient
one back. Here all small ones of a ps travel as one tensor.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.parameter_servers import private
from toolkit.strategies.parameter_servers.ledger import Ledger

__all__ = ["Copies", "Stand", "fetch", "groups", "packed", "unpacked"]

_SMALL = 64 << 10  # Bytes up to which a variable is packed; copying larger ones costs more than a message.


class Stand:
    """Stands for `keras.Variable.value` in a step: a tensor that gradient tapes take for a variable.

    Args:
        handle: The value, on the worker.
        trainable: As the variable's.
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


class Copies(keras.StatelessScope):
    """While entered: reads of some variables give these values, and assignments stay in the step.

    Variables that aren't among them are assigned as ever.

    Args:
        variables: `keras.Variable`s.
        values: A tensor, or whatever is to stand for it, of each.
    """

    def __init__(self, variables: Iterable[Any], values: Iterable[Any]) -> None:
        super().__init__(initialize_variables=False)
        self.mine = {id(variable): variable for variable in variables}
        self.values = dict(zip(self.mine, values, strict=True))
        self.assigned: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        """Returns what stands for it, None for a variable that isn't among them."""
        return self.values.get(id(variable))

    def add_update(self, update: tuple) -> None:
        """Takes an assignment."""
        variable, value = update
        key = id(variable)
        if key not in self.mine:
            variable.value.assign(tf.cast(value, variable.value.dtype))
            return
        self.assigned[key] = self.assigned.get(key, 0) + 1
        before = self.values[key]
        self.values[key] = Stand(value, trainable=before.trainable) if isinstance(before, Stand) else value


def fetch(pieces: Sequence[Any], ledgers: dict[str, Ledger]) -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
    """Brings the values of variables to the device of the caller.

    Args:
        pieces: `tf.Variable`s on any devices.
        ledgers: Of each ps device.

    Returns:
        The values in the same order, and for each ps which version was read.
    """
    values: dict[int, tf.Tensor] = {}
    versions = {}
    for device, mine in _by_device(pieces):
        before = []
        if device in ledgers:
            versions[device] = ledgers[device].version()
            before = [versions[device]]
        with tf.device(device), tf.control_dependencies(before):
            read = [pieces[number].read_value() for number in mine]
            sent = packed(read)
        values.update(zip(mine, unpacked(sent, read), strict=True))
    return [values[number] for number in range(len(pieces))], versions


def packed(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the small ones of each dtype in one flat tensor, then the others."""
    flat = []
    for _, numbers in groups(values):
        flat.append(
            tf.concat([tf.reshape(values[n], [-1]) for n in numbers], 0) if len(numbers) > 1 else values[numbers[0]]
        )
    return flat


def unpacked(flat: Sequence[tf.Tensor], like: Sequence[Any]) -> list[tf.Tensor]:
    """Returns what was packed, on the device of the caller.

    Args:
        flat: What `packed` returned.
        like: Whatever has the shapes and dtypes of what was given to it.
    """
    values: dict[int, tf.Tensor] = {}
    for each, (_, numbers) in zip(flat, groups(like), strict=True):
        sent = tf.identity(each)
        if len(numbers) == 1:
            values[numbers[0]] = sent
            continue
        parts = tf.split(sent, [like[n].shape.num_elements() for n in numbers])
        for number, part in zip(numbers, parts, strict=True):
            values[number] = tf.reshape(part, like[number].shape)
    return [values[number] for number in range(len(like))]


def groups(values: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """Returns which values travel in one tensor: their numbers, after what they have in common."""
    found: dict[Any, list[int]] = {}
    for number, value in enumerate(values):
        small = value.shape.num_elements() * value.dtype.size <= _SMALL
        found.setdefault((value.dtype, None if small else number), []).append(number)
    return list(found.items())


def _by_device(pieces: Sequence[Any]) -> Iterable[tuple[str, list[int]]]:
    devices: dict[str, list[int]] = {}
    for number, piece in enumerate(pieces):
        devices.setdefault(piece.device, []).append(number)
    return devices.items()
