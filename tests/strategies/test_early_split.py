"""Shares that are cut before examples are decoded: the same examples, and none that others decode."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from toolkit.strategies import batches as division
from toolkit.strategies.batches import undecoded

decoded = []


def note(value):
    decoded.append(int(value))
    return value


def counted(value):
    """Squares a number, and notes in Python that it has; TensorFlow takes it for a function without state."""
    seen = tf.ensure_shape(tf.numpy_function(note, [value], tf.int64, stateful=False), ())
    return tf.cast(seen, tf.float32) ** 2, seen


def read(dataset, share, shares):
    first = undecoded(dataset)
    cut = first.decode(division.split(first.batches, indices=[share], count=shares))
    decoded.clear()
    return [part.batch for part in cut.as_numpy_iterator() if part.rows]


def in_a_loop(dataset):
    for change in (lambda x: 3 * x, lambda x: x + 1):
        dataset = dataset.map(lambda x, seen: (change(x), seen))  # noqa: B023 - As people write it.
    return dataset


numbers = tf.data.Dataset.range
CHAINS = {
    "a map": lambda: numbers(22).map(counted).batch(8),
    "in parallel, and read ahead": lambda: (
        numbers(22)
        .shuffle(9, seed=3, reshuffle_each_iteration=False)
        .map(counted, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(2)
        .batch(8, num_parallel_calls=2)
        .prefetch(tf.data.AUTOTUNE)
    ),
    "two functions": lambda: numbers(22).map(counted).map(lambda x, y: {"x": x, "y": y}).batch(8, drop_remainder=True),
    "a last batch that is too small for all": lambda: numbers(17).map(counted).batch(8),
    "of various lengths in between": lambda: (
        numbers(22).map(tf.range).map(lambda r: counted(tf.size(r, tf.int64))).batch(8)
    ),
    "functions of a loop, whose variable is another one by now": lambda: in_a_loop(numbers(22).map(counted)).batch(8),
    "with options": lambda: numbers(22).map(counted).batch(8).with_options(tf.data.Options()),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_each_worker_decodes_its_own_share_of_the_same_batches(chain):
    dataset = CHAINS[chain]()
    whole = list(dataset.as_numpy_iterator())
    first, calls = read(dataset, 0, 2), len(decoded)
    second, calls = read(dataset, 1, 2), calls + len(decoded)
    pairs = itertools.zip_longest(first, second)
    together = [
        tf.nest.map_structure(lambda *parts: np.concatenate(parts), *(each for each in pair if each is not None))
        for pair in pairs
    ]
    tf.nest.map_structure(np.testing.assert_array_equal, together, whole)
    copies = chain == "a last batch that is too small for all"
    assert calls == sum(len(tf.nest.flatten(batch)[0]) for batch in whole) + copies


OTHERS = {
    "no map": lambda: numbers(22).batch(8),
    "random numbers": lambda: numbers(22).map(lambda n: n + tf.random.uniform([], 0, 9, tf.int64)).batch(8),
    "Python": lambda: numbers(22).map(lambda n: tf.numpy_function(note, [n], tf.int64)).batch(8),
    "a map of batches": lambda: numbers(22).map(lambda n: n + 1).batch(8).map(tf.square),
    "elements of various lengths": lambda: numbers(22).map(tf.range).map(tf.reduce_sum).padded_batch(8),
    "a variable": lambda: numbers(22).map(tf.Variable(1, dtype=tf.int64).__add__).batch(8),
    "shuffled after": lambda: numbers(22).map(lambda n: n + 1).shuffle(9).batch(8),
}


@pytest.mark.parametrize("chain", OTHERS)
def test_what_may_not_be_moved_is_left_alone(chain):
    dataset = OTHERS[chain]()
    assert undecoded(dataset).batches is dataset


def test_its_iterators_can_be_saved(tmp_path):
    first = undecoded(numbers(24).map(lambda n: n * n).batch(8))
    cut = first.decode(division.split(first.batches, indices=[1], count=2))
    batches = iter(cut)
    assert next(batches).batch.numpy().tolist() == [16, 25, 36, 49]
    path = tf.train.Checkpoint(it=batches).save(str(tmp_path / "of"))
    again = iter(cut)
    tf.train.Checkpoint(it=again).restore(path)
    assert [part.batch.numpy().tolist() for part in again] == [
        [n * n for n in range(12, 16)],
        [n * n for n in range(20, 24)],
    ]


def test_images_from_a_directory_are_decoded_by_whom_they_are_for(tmp_path):
    keras = pytest.importorskip("keras")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for n in range(5):
            keras.utils.save_img(tmp_path / name / f"{n}.png", np.full((4, 4, 3), 10 * n))
    images = keras.utils.image_dataset_from_directory(tmp_path, image_size=(4, 4), batch_size=4, seed=1, verbose=False)
    first = undecoded(images)
    assert first.batches is not images
    assert tf.nest.flatten(first.batches.element_spec)[0].dtype == tf.string
