"""Training examples, and the pipelines that make global batches of them.

examples   arrays of pictures and labels, with the names of their classes
shapes     the embedded data set: generated on the fly, nothing to download
cifar10    CIFAR-10 through TFDS, from a prepared directory, an archive, or a download
catalog    data sets by name, and what "auto" means
pipeline   global batches as tf.data: shuffled, augmented, a pure function of seed and step
"""

from toolkit.data.catalog import NAMES, load
from toolkit.data.examples import Examples
from toolkit.data.pipeline import Batches

__all__ = ["NAMES", "Batches", "Examples", "load"]
