"""CIFAR-10 models as pure Keras: a convolutional trunk and a fully connected head.

A model is `Sequential([Input, trunk, head])`; `model.get_layer("trunk")` and `model.get_layer("head")`
give the two parts, which want different kinds of parallelism: the trunk does most of the
arithmetic with few parameters, the head the reverse (Krizhevsky, arXiv 1404.5997).

    networks    small_cnn, alexnet and vit, and `build`
    opening     a model by its name, by a function, or from a file
"""

from toolkit.models.networks import NAMES, build
from toolkit.models.opening import open_model

__all__ = ["NAMES", "build", "open_model"]
