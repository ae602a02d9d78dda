"""Regularizers and constraints of a variable of which each replica holds a part."""

from typing import Any

import keras
import tensorflow as tf

from toolkit.strategies import collectives
from toolkit.strategies.sharded import ShardedVariable

__all__ = ["Constraint", "Regularizer"]

_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class Regularizer(keras.regularizers.Regularizer):
    """A regularizer of the whole, asked in a step with a part.

    Keras adds 1/replicas of each replica's penalty to its loss, and would then sum the gradients
    over replicas. A part's gradient isn't summed: what is a sum over elements is taken `replicas`
    times, and anything else is computed of the gathered whole, whose gradient is brought back.

    Args:
        whole: The user's.
    """

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __call__(self, variable: ShardedVariable) -> tf.Tensor:
        _, count = collectives.place()
        if count == 1:
            return self.whole(variable.whole())
        part = keras.ops.convert_to_tensor(variable)
        if type(self.whole) in _SUMS:
            mine = self.whole(part)
            # The value of the whole on every replica, with the gradient of the part.
            return tf.stop_gradient(collectives.all_reduce(mine) - count * mine) + count * mine
        return self.whole(variable.gathered(part))

    def get_config(self) -> dict:
        return {"whole": self.whole}


class Constraint(keras.constraints.Constraint):
    """A constraint of the whole, asked in a step with a part, of which it returns the new one.

    Args:
        whole: The user's.
    """

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __call__(self, variable: ShardedVariable) -> tf.Tensor:
        part = keras.ops.convert_to_tensor(variable)
        if isinstance(self.whole, keras.constraints.NonNeg):
            return self.whole(part)
        return variable.part_of(self.whole(variable.gathered(part)))

    def get_config(self) -> dict:
        return {"whole": self.whole}
