"""Which functions of a dataset draw random numbers."""

import keras
import pytest
import tensorflow as tf

from toolkit.strategies.pipelines import draws_of


def pictures():
    return tf.data.Dataset.range(8).map(lambda _: tf.zeros((4, 4, 3)))


def augment(x):
    return tf.image.random_flip_left_right(x)


def augmented(x):
    return tf.data.Dataset.from_tensors(x).map(lambda y: y + tf.random.normal((), seed=1))


def alike(x):
    return tf.image.stateless_random_flip_left_right(x, (1, 2))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (
            lambda: pictures().map(augment, num_parallel_calls=tf.data.AUTOTUNE).batch(2).prefetch(1),
            [("augment", True)],
        ),
        (lambda: pictures().map(augment).shuffle(3).repeat().batch(2), [("augment", False)]),
        (lambda: pictures().map(alike, num_parallel_calls=2).shuffle(3).batch(2), []),
        (lambda: tf.data.Dataset.zip(pictures().map(augment), pictures()), [("augment", False)]),
        (lambda: pictures().map(keras.layers.RandomFlip(name="flip")).batch(2), [("flip", False)]),
        (
            lambda: pictures().interleave(augmented, num_parallel_calls=2),
            [("augmented", True)],
        ),
        (lambda: pictures().with_options(tf.data.Options()).map(augment), [("augment", False)]),
        (lambda: [1, 2], []),
    ],
    ids=["parallel", "in order", "stateless", "zip", "a layer of Keras's", "interleave", "options", "no dataset"],
)
def test_functions_that_draw_are_found(make, found):
    assert draws_of(make()) == found


def test_a_generator_of_tensorflows_is_found():
    generator = tf.random.Generator.from_seed(1)
    assert draws_of(pictures().map(lambda x: x + generator.uniform(()))) == [("<lambda>", False)]
