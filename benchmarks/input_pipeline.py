"""The input pipeline against a plain one that maps picture by picture.

    python -m benchmarks.input_pipeline [--data=cifar10 --data_dir=DIR] [--rounds=5]

The plain one is what a TFDS tutorial writes: `tfds.load` (or tensor slices, for the embedded data), shuffle, `map` with
pad, random crop and random flip for each picture, batch, prefetch; `AUTOTUNE` and `cache` throughout. Both deliver the
same batches of 128 uint8 pictures. Rounds run in turn in one process; the figure is the median of the rounds' ratios of
images per second. Target: at least 5.
"""

import statistics
import time
from typing import Any

from absl import flags

import toolkit

_DATA = flags.DEFINE_enum("data", "shapes", ["shapes", "cifar10"], "Data set.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "TFDS's directory.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Pairs to run.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 300, "Batches that are timed in each.", lower_bound=10)
_BATCH = 128


def main() -> None:
    """Runs the pairs and prints each ratio."""
    examples = toolkit.data.load(_DATA.value, data_dir=_DATA_DIR.value)
    strategy = toolkit.strategies.create("one_device", devices=("CPU:0",))
    ours = toolkit.data.Batches(examples=examples, strategy=strategy, global_batch_size=_BATCH).train()
    plain = _plain(examples)
    _rate(plain, 2 * len(examples.train_labels) // _BATCH)  # Fills its cache.
    ratios = []
    for number in range(_ROUNDS.value):
        rates = (_rate(ours, _STEPS.value), _rate(plain, _STEPS.value))
        ratios.append(rates[0] / rates[1])
        print(f"round {number + 1}: toolkit {rates[0]:,.0f} images/s, plain {rates[1]:,.0f}, ratio {ratios[-1]:.1f}")
    print(f"toolkit / plain, median of {len(ratios)} rounds: {statistics.median(ratios):.1f}")


def _rate(dataset: Any, count: int) -> float:
    # Its own iterator each time: one that is left would go on filling its buffers while the other is timed.
    batches = iter(dataset)
    for _ in range(50):
        next(batches)
    began = time.perf_counter()
    for _ in range(count):
        next(batches)
    return count * _BATCH / (time.perf_counter() - began)


def _plain(examples: Any) -> Any:
    import tensorflow as tf

    def augment(image: Any, label: Any) -> Any:
        image = tf.image.resize_with_crop_or_pad(image, 36, 36)
        image = tf.image.random_crop(image, (32, 32, 3))
        return tf.image.random_flip_left_right(image), label

    if _DATA.value == "cifar10":
        import tensorflow_datasets as tfds

        data = tfds.load("cifar10", split="train", data_dir=_DATA_DIR.value, as_supervised=True)
    else:
        data = tf.data.Dataset.from_tensor_slices((examples.train_images, examples.train_labels))
    return (
        data.cache()
        .shuffle(10_000)
        .repeat()
        .map(augment, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(_BATCH, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )


if __name__ == "__main__":
    toolkit.cli.run(main)
