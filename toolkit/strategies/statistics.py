"""One value on all workers for what each has estimated from its own examples."""

import numpy as np
import tensorflow as tf

from toolkit.strategies.agreement import extremes, mean

__all__ = ["average"]


def average(model: tf.Module) -> None:
    """Sets a model's statistics, such as BatchNormalization's moving ones, to their mean over the workers.

    Keras lets each worker update its own copy, and they drift apart. Only variables that do differ
    are sent. It is a collective: every process must call it.

    Args:
        model: A built `keras.Model` whose strategy has several processes.
    """
    strategy = model.distribute_strategy
    variables = [v for v in model.non_trainable_variables if tf.as_dtype(v.dtype).is_floating]
    if not variables:
        return
    sums = np.array([float(tf.reduce_sum(tf.cast(tf.convert_to_tensor(v), tf.float64))) for v in variables])
    lowest, highest = extremes(strategy, sums)
    with strategy.scope():
        for variable, alike in zip(variables, lowest == highest, strict=True):
            if not alike:
                variable.assign(mean(strategy, tf.convert_to_tensor(variable)))
