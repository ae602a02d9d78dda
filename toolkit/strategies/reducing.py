"""`reduce` as Keras's training loop calls it, under a strategy of several replicas."""

from typing import Any

import tensorflow as tf

from toolkit.strategies import step_logs
from toolkit.strategies.uneven_inputs import called_by_symbolic_build

__all__ = ["ReducesForKeras"]


class ReducesForKeras:
    """Goes before TensorFlow's class of a strategy."""

    experimental_local_results: Any

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces what TensorFlow does, and what Keras gives it: a nest of values, or scalars along an axis.

        While it builds a model, Keras reduces a whole batch, mostly a nest, of which it wants just
        the shapes: the first local result of each leaf has them, where replicas have batches of different sizes, too.
        Of a step's logs it asks the mean along axis 0 of scalars (keras-team/keras#20585). Nothing else may be touched:
        metrics' variables are reduced through this method too.
        """
        if isinstance(value, (tuple, list, dict)) or called_by_symbolic_build():
            return tf.nest.map_structure(lambda leaf: self.experimental_local_results(leaf)[0], value)
        parts = self.experimental_local_results(value)
        if step_logs.are_of_all_replicas(parts):
            return parts[0]
        if axis is not None and all(part.shape.rank == 0 for part in parts):
            axis = None
        return super().reduce(reduce_op, value, axis)  # type: ignore[misc]
