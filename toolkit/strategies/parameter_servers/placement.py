"""Which task holds which variable, and a table of it.

What optimizers and seed generators count, running metrics and a learning rate stay with the chief: workers get their
values with each step. What a model counts by itself is on a ps, as all else that its steps assign.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from toolkit.strategies.input.batch_split import row_range
from toolkit.strategies.options import ParameterServerOptions
from toolkit.strategies.parameter_servers.ps_sharded_variable import ServerShardedVariable, shards_of

__all__ = ["CHIEF", "SEED", "Placement", "bytes_by_task", "table"]

CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"
SEED = "seed_generator_state"  # Keras's name of what a seed generator counts.
# Its names of what optimizers count and of what callbacks set.
_OF_OPTIMIZERS = ("iteration", "step_counter", "learning_rate", "dynamic_scale")


class Placement:
    """Chooses the task that holds each new variable under the strategy's scope. Create it outside of that scope.

    Args:
        servers: The number of ps tasks.
        options: How they are used.
    """

    def __init__(self, servers: int, options: ParameterServerOptions) -> None:
        self.servers = servers
        self.options = options
        self._next = 0
        self._bytes = [0] * servers
        # TensorFlow places a variable beside another if it is asked to.
        self._anchors = [_anchor(f"/job:ps/task:{index}/device:CPU:0") for index in range(servers)]
        self._chief = _anchor(CHIEF)

    def create(self, make: Callable, **kwargs: Any) -> Any:
        """Creates a variable; for `tf.variable_creator_scope`.

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
        if isinstance(beside, ServerShardedVariable):
            return _sharded(make, value, beside.shards, like=beside, **kwargs)
        if beside is None and _stays_with_chief(value, kwargs):
            beside = self._chief
        elif beside is None:
            first = self._lightest()
            # In turn, beginning with the task that holds the fewest bytes.
            holders = [(first + index) % self.servers for index in range(self._shard_count(value))]
            if len(holders) > 1:
                whole = _sharded(make, value, [self._anchors[index] for index in holders], like=None, **kwargs)
                for index, shard in zip(holders, whole.shards, strict=True):
                    self._bytes[index] += _size(shard)
                return whole
            if self.options.variables == "round_robin":
                first = self._next % self.servers
                self._next += 1
            self._bytes[first] += _size(value)
            beside = self._anchors[first]
        return make(initial_value=value, colocate_with=beside, **kwargs)

    def _shard_count(self, value: tf.Tensor) -> int:
        if self.options.variables != "sharded" or not value.shape.rank:
            return 1
        wanted = self.options.shards or self.servers
        return max(1, min(wanted, _size(value) // self.options.min_shard_bytes, value.shape[0]))

    def _lightest(self) -> int:
        return min(range(self.servers), key=self._bytes.__getitem__)


def table(variables: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns the placement of some `keras.Variable`s: name, shape, bytes and task of each, a row for each shard."""
    rows = []
    for variable in variables:
        for index, shard in enumerate(shards_of(variable.value)):
            spec = tf.DeviceSpec.from_string(shard.device)
            rows.append(
                {
                    "name": variable.path + (f"[{index}]" if isinstance(variable.value, ServerShardedVariable) else ""),
                    "shape": list(shard.shape),
                    "bytes": _size(shard),
                    "task": f"{spec.job or 'chief'}:{spec.task or 0}",
                }
            )
    return rows


def bytes_by_task(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Returns the bytes that each task holds, from the rows of a table."""
    total: dict[str, int] = {}
    for row in rows:
        total[row["task"]] = total.get(row["task"], 0) + row["bytes"]
    return dict(sorted(total.items()))


def _sharded(
    make: Callable, value: tf.Tensor, beside: Sequence, *, like: ServerShardedVariable | None, **kwargs: Any
) -> ServerShardedVariable:
    name = kwargs.pop("name", None) or "variable"
    shards = []
    for index, neighbour in enumerate(beside):
        start, stop = row_range(value.shape[0], index, len(beside)) if like is None else like.offsets[index : index + 2]
        shards.append(
            make(initial_value=value[start:stop], colocate_with=neighbour, name=f"{name}_part_{index}", **kwargs)
        )
    return ServerShardedVariable(shards, like=like, trainable=kwargs.get("trainable") is not False, name=name)


def _stays_with_chief(value: tf.Tensor, kwargs: dict) -> bool:
    if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:  # Metrics.
        return True
    # A variable that is made again has the name of its owner before its own.
    name = (kwargs.get("name") or "").rpartition("/")[2]
    if kwargs.get("trainable") is not False:
        return False
    return name == SEED or (not value.shape.rank and name in _OF_OPTIMIZERS)


def _anchor(device: str) -> tf.Variable:
    with tf.device(device):
        return tf.Variable(0, trainable=False, name="anchor")


def _size(value: Any) -> int:
    return value.shape.num_elements() * value.dtype.size
