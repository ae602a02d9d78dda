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
