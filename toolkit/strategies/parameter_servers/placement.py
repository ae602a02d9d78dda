"""Which task holds which variable, and the table of it.

What only counts (steps, seeds, running metrics, a learning rate) stays with the chief: workers get
its value with each step, and it is never a race.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from toolkit.strategies.parameter_servers.options import ParameterServerOptions
from toolkit.strategies.parameter_servers.sharded import Sharded, offsets

__all__ = ["Held", "Placement", "devices_of", "loads", "table"]


class Placement:
    """Chooses, as a variable is made under the strategy's scope, who holds it. Made outside of that scope.

    Args:
        servers: Number of ps tasks.
        options: How they are used.
    """

    def __init__(self, servers: int, options: ParameterServerOptions) -> None:
        self.servers = servers
        self.options = options
        self._next = 0
        self._bytes = [0] * servers
        # TensorFlow puts a variable where the one is beside which it is asked for.
        self._anchors = [_anchor(f"/job:ps/task:{number}/device:CPU:0") for number in range(servers)]
        self._chief = _anchor("/job:chief/task:0/device:CPU:0")

    def create(self, make: Callable, **kwargs: Any) -> Any:
        """Makes a variable; for `tf.variable_creator_scope`.

        Args:
            make: TensorFlow's next creator.
            kwargs: As `tf.Variable` takes them.
        """
        beside = kwargs.pop("colocate_with", None)
        value = kwargs.pop("initial_value", None)
        if value is None:
            return make(initial_value=None, **kwargs)
        with tf.init_scope(), tf.device("CPU:0"):
            value = tf.convert_to_tensor(value() if callable(value) else value, dtype=kwargs.get("dtype"))
        kwargs.pop("shape", None)
        if isinstance(beside, Sharded):
            return self._cut(make, value, beside.parts, like=beside, **kwargs)
        if beside is None:
            if _only_counts(value, kwargs):
                beside = self._chief
            else:
                parts = self._parts(value)
                if parts > 1:
                    first = self._lightest()
                    # Beginning with the lightest, in turn.
                    anchors = [self._anchors[(first + number) % self.servers] for number in range(parts)]
                    whole = self._cut(make, value, anchors, like=None, **kwargs)
                    for number, part in enumerate(whole.parts):
                        self._bytes[(first + number) % self.servers] += _size(part)
                    return whole
                beside = self._anchors[self._choose(value)]
        return make(initial_value=value, colocate_with=beside, **kwargs)

    def _cut(
        self, make: Callable, value: tf.Tensor, beside: Iterable, *, like: Sharded | None, **kwargs: Any
    ) -> Sharded:
        beside = list(beside)
        name = kwargs.pop("name", None) or "variable"
        ends = like.places if like is not None else offsets(value.shape[0], len(beside))
        parts = [
            make(
                initial_value=value[ends[number] : ends[number + 1]],
                colocate_with=neighbour,
                name=f"{name}_part_{number}",
                **kwargs,
            )
            for number, neighbour in enumerate(beside)
        ]
        return Sharded(parts, like=like, trainable=kwargs.get("trainable") is not False, name=name)

    def _parts(self, value: tf.Tensor) -> int:
        if self.options.variables != "sharded" or not value.shape.rank:
            return 1
        wanted = self.options.shards or self.servers
        return max(1, min(wanted, _size(value) // self.options.min_shard_bytes, value.shape[0]))

    def _choose(self, value: tf.Tensor) -> int:
        if self.options.variables == "round_robin":
            chosen = self._next % self.servers
            self._next += 1
        else:
            chosen = self._lightest()
        self._bytes[chosen] += _size(value)
        return chosen

    def _lightest(self) -> int:
        return min(range(self.servers), key=self._bytes.__getitem__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """A variable, or a part of one, and its task.

    Attributes:
        name: Its path in the model or optimizer.
        shape: Of the part.
        size: In bytes.
        task: "ps:0", or "chief:0".
    """

    name: str
    shape: tuple[int, ...]
    size: int
    task: str


def table(variables: Iterable[Any]) -> list[Held]:
    """Returns where each of some `keras.Variable`s is, a row for each part."""
    rows = []
    for variable in variables:
        parts = getattr(variable.value, "parts", None)
        for number, part in enumerate(parts or [variable.value]):
            spec = tf.DeviceSpec.from_string(part.device)
            shape = tuple(part.shape)
            rows.append(
                Held(
                    name=variable.path + (f"[{number}]" if parts else ""),
                    shape=shape,
                    size=math.prod(shape) * part.dtype.size,
                    task=f"{spec.job or 'chief'}:{spec.task or 0}",
                )
            )
    return rows


def loads(rows: Iterable[Held]) -> dict[str, int]:
    """Returns the bytes that each task holds."""
    total: dict[str, int] = {}
    for row in rows:
        total[row.task] = total.get(row.task, 0) + row.size
    return dict(sorted(total.items()))


def devices_of(value: Any) -> list[str]:
    """Returns the device of a variable, or of each of its parts."""
    return [part.device for part in getattr(value, "parts", [value])]


def _only_counts(value: tf.Tensor, kwargs: dict) -> bool:
    if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:  # Metrics.
        return True
    # Steps, rates, and the state of a seed generator, which is two numbers.
    return kwargs.get("trainable") is False and value.shape.num_elements() <= 2


def _anchor(device: str) -> tf.Variable:
    with tf.device(device):
        return tf.Variable(0, trainable=False, name="anchor")


def _size(value: Any) -> int:
    return value.shape.num_elements() * value.dtype.size
