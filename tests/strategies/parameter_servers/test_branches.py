"""What a branch of Keras's assigns to a step's own copies is carried out of it."""

import keras
import pytest
import tensorflow as tf

from toolkit.errors import StrategyError
from toolkit.strategies.parameter_servers.branches import adapt_branches
from toolkit.strategies.parameter_servers.variables import LocalScope, LocalValue

adapt_branches()


def _nothing(_):
    """What a branch returns: both must return the same."""


def test_assignments_in_a_branch_are_seen_after_it():
    count, scale, kept = keras.Variable(0, dtype="int64"), keras.Variable(8.0), keras.Variable(1.0)

    @tf.function
    def step(overflow, values):
        with LocalScope([count, scale, kept], values) as scope:
            keras.ops.cond(overflow, lambda: _nothing(scale.assign(scale / 2)), lambda: _nothing(count.assign_add(1)))
            scale.assign(scale + 1)  # Not a tensor of the branch any more.
        assert scope.conditional == {id(count), id(scale)}
        assert scope.assigned == {id(count): 1, id(scale): 2}
        return [scope.values[id(v)] for v in (count, scale, kept)]

    given = [tf.constant(4, tf.int64), tf.constant(8.0), tf.constant(1.0)]
    assert [float(v) for v in step(tf.constant(True), given)] == [4, 5, 1]
    assert [float(v) for v in step(tf.constant(False), given)] == [5, 9, 1]
    assert (float(count.value), float(scale.value)) == (0, 8)


def test_branches_lie_in_one_another_and_return_what_they_did():
    count = keras.Variable(0.0)

    def inner():
        count.assign_add(1.0)
        return keras.ops.cond(count > 2, lambda: count.assign(0.0) * 0 + 7.0, lambda: count * 1.0)

    @tf.function
    def step(value):
        with LocalScope([count], [value]) as scope:
            result = keras.ops.cond(count >= 0, inner, lambda: keras.ops.convert_to_tensor(-1.0))
        return result, scope.values[id(count)]

    assert [float(v) for v in step(tf.constant(0.0))] == [1, 1]
    assert [float(v) for v in step(tf.constant(2.0))] == [7, 0]
    assert [float(v) for v in step(tf.constant(-5.0))] == [-1, -5]


def test_a_branch_in_a_loop_that_assigns_nothing_leaves_no_tensor_behind():
    rate = keras.Variable(2.0)

    @tf.function
    def step(value, turns):
        with LocalScope([rate], [value]):
            grown = keras.ops.while_loop(
                lambda turn, _: turn < turns,
                lambda turn, x: (turn + 1, keras.ops.cond(x > 5, lambda: x, lambda: x * rate)),
                (tf.constant(0), tf.constant(1.0)),
            )[1]
            return grown + rate

    assert float(step(tf.constant(2.0), tf.constant(9))) == 10.0


def test_a_trainable_variable_assigned_in_a_branch_is_refused():
    weight = keras.Variable(1.0)

    @tf.function(autograph=False)
    def step(value):
        with LocalScope([weight], [LocalValue(value, trainable=True)]):
            keras.ops.cond(value > 0, lambda: weight.assign(0.0), lambda: weight + 0.0)

    with pytest.raises(StrategyError, match="a trainable variable is assigned in a branch"):
        step(tf.constant(1.0))


def test_outside_of_a_step_a_branch_is_keras_own():
    variable = keras.Variable(1.0)
    assert float(keras.ops.cond(variable > 0, lambda: variable.assign_add(1.0), lambda: variable + 0.0)) == 2.0
