"""A table in a step: rows that are looked up, their gradients, and updates of those rows alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit.strategies.parameter_servers import local_values
from toolkit.strategies.parameter_servers.placement import ServerShardedVariable

ROWS = np.arange(28, dtype="float32").reshape(7, 4)


def variable(shards):
    parts = [tf.Variable(part) for part in np.split(ROWS, [3, 4][: shards - 1])]
    return ServerShardedVariable(parts, like=None, trainable=True, name="it") if shards > 1 else parts[0]


def in_step(value):
    return local_values.LocalTable(value, trainable=True, after={})


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_rows_are_those_of_the_table(shards):
    value = variable(shards)

    @tf.function
    def found(indices):
        return in_step(value).lookup(indices)

    for indices in ([[5, 0], [5, 3]], [], 6, [-1, -7]):
        given = tf.constant(indices, tf.int32)
        np.testing.assert_array_equal(found(given), ROWS[np.array(indices, int)])


@pytest.mark.parametrize("index", [7, -8])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_row_that_is_not_there_is_an_error(shards, index):
    value = variable(shards)
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.function(lambda: in_step(value).lookup(tf.constant([index])))()


@pytest.mark.parametrize("shards", [1, 3])
def test_the_gradient_is_of_the_rows_as_they_were_looked_up(shards):
    value = variable(shards)

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            mine = in_step(value)
            loss = tf.reduce_sum(mine.lookup(tf.constant([5, 0, 5])) * [[1.0], [2.0], [4.0]])
        found = tape.gradient(loss, [mine.handle])[0]
        assert isinstance(found, tf.IndexedSlices)
        return found

    found = gradient()
    np.testing.assert_array_equal(found.indices, [5, 0, 5])
    np.testing.assert_array_equal(found.values, [[1.0] * 4, [2.0] * 4, [4.0] * 4])


def test_who_also_reads_the_whole_has_both_gradients():
    value = variable(2)

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            mine = in_step(value)
            loss = tf.reduce_sum(mine.lookup(tf.constant([1]))) + 3.0 * tf.reduce_sum(tf.convert_to_tensor(mine))
        return tf.convert_to_tensor(tape.gradient(loss, [mine.handle])[0])

    expected = np.full((7, 4), 3.0)
    expected[1] = 4.0
    np.testing.assert_array_equal(gradient(), expected)


def test_rows_that_are_named_twice_are_added():
    found = local_values.with_each_row_once(
        tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([3, 1, 3]), tf.constant([7, 1]))
    )
    assert dict(zip(found.indices.numpy(), found.values.numpy()[:, 0], strict=True)) == {3: 5.0, 1: 2.0}


def test_a_variable_that_is_seen_by_rows_keeps_the_others():
    variable = tf.Variable(ROWS)
    rows = local_values.RowsOfVariable(variable, tf.constant([6, 2]))
    np.testing.assert_array_equal(tf.convert_to_tensor(rows), ROWS[[6, 2]])
    rows.assign_add(tf.ones([2, 4]))
    rows.assign_sub(3 * tf.ones([2, 4]))
    expected = ROWS.copy()
    expected[[6, 2]] -= 2
    np.testing.assert_array_equal(variable, expected)
    rows.assign(tf.zeros([2, 4]))
    expected[[6, 2]] = 0
    np.testing.assert_array_equal(variable, expected)


class OfRows(keras.optimizers.Adam):
    def update_step(self, gradient, variable, learning_rate):
        """Looks at all rows."""


@pytest.mark.parametrize(
    ("optimizer", "small", "large"),
    [
        (keras.optimizers.SGD, "exact", "exact"),
        (keras.optimizers.Adagrad, "exact", "exact"),
        (lambda: keras.optimizers.SGD(momentum=0.9), "", "lazy"),
        (keras.optimizers.AdamW, "", "lazy"),
        (keras.optimizers.Lamb, "", ""),
        (keras.optimizers.Adafactor, "", ""),
        (OfRows, "", ""),
    ],
)
def test_which_optimizers_update_rows_alone(optimizer, small, large):
    value = tf.zeros([10, 4])
    assert local_values.updates_by_rows(optimizer(), value, min_lazy_bytes=161) == small
    assert local_values.updates_by_rows(optimizer(), value, min_lazy_bytes=160) == large
