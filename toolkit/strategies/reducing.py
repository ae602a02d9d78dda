"""`reduce` as Keras's training loop calls it, under a strategy of several replicas."""

from typing import Any

import tensorflow as tf

from toolkit.strategies import step_logs

__all__ = ["ReducesForKeras"]


class ReducesForKeras:
    """Goes before TensorFlow's class of a strategy."""

    made_by_toolkit = True
    experimental_local_results: Any

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces what TensorFlow does, and scalars along an axis.

        Of a step's logs Keras asks the mean along axis 0 of scalars (keras-team/keras#20585). Nothing else may be
        touched: metrics' variables are reduced through this method too.
        """
        if isinstance(value, (tuple, list, dict)):
            return tf.nest.map_structure(lambda leaf: self.reduce(reduce_op, leaf, axis), value)
        parts = self.experimental_local_results(value)
        if step_logs.are_of_all_replicas(parts):
            return parts[0]
        if axis is not None and all(part.shape.rank == 0 for part in parts):
            axis = None
        return super().reduce(reduce_op, value, axis)  # type: ignore[misc]
