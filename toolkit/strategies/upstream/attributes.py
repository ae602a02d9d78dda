"""What Keras keeps in private attributes, and private methods of its objects that many files call.

Those for layers are partials of C, which cost nothing and are in nobody's traceback.
"""

import operator
from typing import Any

# Of a layer or a model: itself and all layers within it; those without itself; itself and those that it has itself.
layers_within = operator.methodcaller("_flatten_layers")
layers_below = operator.methodcaller("_flatten_layers", include_self=False)
layers_just_below = operator.methodcaller("_flatten_layers", recursive=False)


def compiled_as(model: Any) -> Any:
    """Returns what Keras keeps of a model's last `compile`: another object after each."""
    return vars(model).get("_compile_config")


def last_learning_rate(optimizer: Any) -> Any:
    """Returns the learning rate of the last step that an optimizer has made; of a new one, that of its first step."""
    import keras

    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # A LossScaleOptimizer has no rate of its own.
    rate = getattr(optimizer, "_learning_rate", None)
    if not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return optimizer.learning_rate
    # `learning_rate` is the schedule's value for the next step. `iterations` counts accumulated steps as one.
    return rate(keras.ops.maximum(optimizer._iterations - 1, 0))
