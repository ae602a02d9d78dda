"""CIFAR-10 models as pure Keras: a convolutional trunk and a fully connected head.

A model is `Sequential([Input, trunk, head])`; `model.get_layer("trunk")` and `model.get_layer("head")`
give the two parts, which want different kinds of parallelism: the trunk does most of the
arithmetic with few parameters, the head the reverse (Krizhevsky, arXiv 1404.5997).

    small_cnn   three convolutions, one hidden FC layer: minutes on a CPU
    alexnet     AlexNet for 32x32 pictures: the FC head holds most of the parameters
    vit         a vision transformer: attention and FC layers, which share most of the parameters
    table       names and `build`
    opening     a model by its name, by a function, or from a file
"""

from toolkit.models.opening import open_model
from toolkit.models.table import NAMES, build

__all__ = ["NAMES", "build", "open_model"]
