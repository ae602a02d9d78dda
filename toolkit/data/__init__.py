"""Training examples, and the pipelines that make global batches of them.

pipeline   arrays of pictures, and global batches of them as tf.data: a pure function of seed and step
data_sets  data sets by name: CIFAR-10 through TFDS, and shapes, which are generated
"""

from toolkit.data.data_sets import NAMES, load
from toolkit.data.pipeline import Batches, Examples

__all__ = ["NAMES", "Batches", "Examples", "load"]
