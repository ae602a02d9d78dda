"""Regularizers and constraints of a variable whose shards are on several replicas."""

from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies.exchange import collectives
from toolkit.strategies.exchange.mesh import Among
from toolkit.strategies.step import batch_share
from toolkit.strategies.variables.sharded_variable import ReplicaShardedVariable

__all__ = ["ShardedConstraint", "ShardedRegularizer"]

_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class ShardedRegularizer(keras.regularizers.Regularizer):
    """A regularizer of a whole variable, which Keras calls in a step with one shard.

    In a step of `fit` every replica's loss has the penalty, and in the user's own loop 1/replicas of it. A shard's
    gradient is summed over the groups of the mesh only: so a penalty that is a sum over elements counts 1/groups there,
    and as often as there are shards here. Any other is computed from the gathered variable, whose gradient is brought
    back.

    Args:
        whole: The user's regularizer.
    """

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __call__(self, variable: ReplicaShardedVariable) -> tf.Tensor:
        _, count = collectives.replica_id_and_count(Among.GROUP)
        if count == 1:
            return self.whole(variable.whole())
        shard = keras.ops.convert_to_tensor(variable)
        if type(self.whole) in _SUMS:
            own = self.whole(shard)
            groups = collectives.replica_id_and_count(Among.PEERS)[1]
            times = count if batch_share.current() is None else 1 / groups
            # The value is that of the whole variable on every replica; the gradient is that of the shard.
            return tf.stop_gradient(collectives.all_reduce(own, among=Among.GROUP) - times * own) + times * own
        return batch_share.weigh(self.whole(variable.gather(shard)))


class ShardedConstraint(keras.constraints.Constraint):
    """A constraint of a whole variable, which in a step takes one shard and returns the new shard.

    Args:
        whole: The user's constraint.
    """

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __call__(self, variable: ReplicaShardedVariable) -> tf.Tensor:
        shard = keras.ops.convert_to_tensor(variable)
        if isinstance(self.whole, keras.constraints.NonNeg):  # An elementwise constraint.
            return self.whole(shard)
        return variable.shard_of(self.whole(variable.gather(shard)))
