"""What Keras keeps in private attributes, and private methods of its objects that many files call.

They are partials of C, which cost nothing and are in nobody's traceback.
"""

import operator

# Of a layer or a model: itself and all layers within it; those without itself; itself and those that it has itself.
layers_within = operator.methodcaller("_flatten_layers")
layers_below = operator.methodcaller("_flatten_layers", include_self=False)
layers_just_below = operator.methodcaller("_flatten_layers", recursive=False)
