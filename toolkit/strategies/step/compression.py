"""State that an optimizer keeps for compressed gradients, beside its slots; see `exchange/powersgd.py`.

Keras has no public hook for it: `Optimizer.build` is wrapped, as there an optimizer learns what it trains.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.exchange.mesh import Among, replica_count
from toolkit.strategies.exchange.powersgd import Memory, matrix_shape, shrinks
from toolkit.strategies.options import options_of
from toolkit.strategies.variables.model_optimizers import optimizers_of
from toolkit.strategies.variables.sharded_variable import ReplicaShardedVariable
from toolkit.strategies.variables.zero1 import WHOLE, make_in_scope
from toolkit.support.wrapping import attach

__all__ = ["attach_to", "check_smaller", "memories_of", "per_replica_state", "send_all"]

_ATTRIBUTE = "_toolkit_memories"
_WAITS = "_toolkit_sends_all_yet"


def attach_to(optimizer: Any) -> None:
    """Makes an optimizer of several replicas keep the state of compression."""
    attach(optimizer, "build", _build)


def memories_of(optimizer: Any, variables: Sequence[Any]) -> list[Memory | None]:
    """Returns each variable's state; None for variables whose gradients are sent exactly."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # Of a LossScaleOptimizer.
    if not optimizer.built and options_of(optimizer._distribution_strategy).gradients.compression != "none":
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))
    kept = {} if optimizer.__dict__.get(_WAITS) else optimizer.__dict__.get(_ATTRIBUTE, {})
    return [kept.get(optimizer._var_key(variable)) if kept else None for variable in variables]


def per_replica_state(optimizer: Any) -> list[Any]:
    """Returns the state's variables, in the order of the optimizer's trainable variables."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return [variable for memory in optimizer.__dict__.get(_ATTRIBUTE, {}).values() for variable in memory]


def _build(original: Callable, optimizer: Any, variables: Sequence) -> None:
    original(optimizer, variables)
    strategy = optimizer._distribution_strategy
    exchange = options_of(strategy).gradients
    if not variables:
        return
    _check(optimizer, exchange.rank)
    memories = {
        optimizer._var_key(variable): make_in_scope(
            optimizer, functools.partial(_make, variable, exchange.rank, number)
        )
        for number, variable in enumerate(variables)
        if _is_compressed(variable, exchange.rank)
    }
    object.__setattr__(optimizer, _ATTRIBUTE, memories)  # Keras would take them for the optimizer's own variables.


def _check(optimizer: Any, rank: int) -> None:
    """Checks that compression makes sense.

    Raises:
        StrategyError: It doesn't for this optimizer.
    """
    if isinstance(optimizer, WHOLE):
        raise StrategyError(
            asked=f"gradients compressed by PowerSGD at rank {rank}, with {type(optimizer).__name__}",
            found="its update depends on the whole layer's gradient, of which a part comes later",
            remedy="Use another optimizer, such as SGD or AdamW, or leave compression out",
        )


def check_smaller(model: keras.Model) -> None:
    """Checks that compression makes a gradient smaller.

    Raises:
        StrategyError: It makes none.
    """
    rank, variables = options_of(model.distribute_strategy).gradients.rank, model.trainable_variables
    if variables and not any(_is_compressed(variable, rank) for variable in variables):
        largest = max(variables, key=lambda variable: tf.TensorShape(variable.shape).num_elements())
        n, m = matrix_shape(largest.shape) if len(largest.shape) else (1, 1)
        raise StrategyError(
            asked=f"gradients compressed by PowerSGD at rank {rank}",
            found=f"no gradient gets smaller: the largest, of {largest.path}, is a matrix of {n} x {m}",
            remedy="Give a smaller rank, or leave compression out",
        )


def _is_compressed(variable: Any, rank: int) -> bool:
    plain = not isinstance(variable, ReplicaShardedVariable) and not getattr(variable, "overwrite_with_gradient", False)
    plain = plain and variable.name != "embeddings"  # Of a table's gradient, only the looked up rows are sent.
    return plain and len(variable.shape) > 1 and shrinks(variable.shape, rank)


def _make(variable: Any, rank: int, number: int) -> Memory:
    n, m = matrix_shape(variable.shape)
    name = variable.path.replace("/", "_")
    # Rows of all replicas, each of which has its own. A checkpoint has all of them.
    unsent = ReplicaShardedVariable(
        keras.initializers.Zeros(),
        [replica_count() * n, m],
        axis=0,
        among=Among.ALL,
        dtype="float32",
        trainable=False,
        name=f"{name}_unsent",
    )
    right = keras.Variable(
        tf.random.stateless_normal([m, rank], [number, 1905_13727]),
        trainable=False,
        aggregation="only_first_replica",
        synchronization="on_read",
        name=f"{name}_right",
    )
    return Memory(unsent, right)


def send_all(model: keras.Model, value: bool) -> None:
    """Makes a model's optimizers send whole gradients, or compress them, in what is traced from now on."""
    for optimizer in optimizers_of(model):
        object.__setattr__(getattr(optimizer, "inner_optimizer", optimizer), _WAITS, value)
