"""A step's own copies of variables: what it assigns, in branches and loops too, and their gradients."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit.strategies.parameter_servers.functions import traced
from toolkit.strategies.parameter_servers.local_values import Cell, LocalValue
from toolkit.strategies.parameter_servers.variables import Variables
from toolkit.strategies.step.train_step import call_function, inlining
from toolkit.strategies.upstream import replaced


def run(step, variables, *values):
    """What a step returns, and the variables' values after it; it is traced as for a worker."""
    model = types.SimpleNamespace(distribute_strategy=tf.distribute.get_strategy(), jit_compile=False)
    of = types.SimpleNamespace(celled=set(), without_cell=set(), model=model, seeds=None)

    def function(*tensors):
        held = [
            LocalValue(value, trainable=True) if variable.trainable else value
            for variable, value in zip(variables, tensors, strict=True)
        ]
        scope = Variables.scope_of(of, variables, held)
        with scope, inlining():
            result = step()
        return result, scope.tensors(variables)

    specs = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
    concrete = traced(of, function, specs)
    result, after = concrete(*[tf.constant(value, v.dtype) for v, value in zip(variables, values, strict=True)])
    return result, [float(value) for value in after], of.celled


def kept(value, *, dtype="float32", trainable=False):
    return keras.Variable(value, dtype=dtype, trainable=trainable)


def nothing(_):
    """What a branch returns: both must return the same."""


CONDITIONALS = {
    "tf.cond": tf.cond,
    "keras.ops.cond": keras.ops.cond,
    "tf.switch_case": lambda pred, yes, no: tf.switch_case(tf.cast(pred, tf.int32), [no, yes]),
}


@pytest.mark.parametrize("cond", CONDITIONALS.values(), ids=CONDITIONALS)
def test_an_assignment_in_a_branch_happens_where_the_branch_is_taken(cond):
    count, scale = kept(0, dtype="int64"), kept(8.0)

    def step():
        cond(count > 3, lambda: nothing(scale.assign(scale / 2)), lambda: nothing(count.assign_add(1)))
        scale.assign(scale + 1)
        return scale + 0.0

    assert run(step, [count, scale], 4, 8.0)[:2] == (5.0, [4, 5])
    assert run(step, [count, scale], 3, 8.0)[:2] == (9.0, [4, 9])
    assert (float(count.value), float(scale.value)) == (0, 8)


def test_a_loop_assigns_as_often_as_it_turns_and_sees_what_it_has_assigned():
    weight, turns = kept(1.0, trainable=True), kept(0, dtype="int64")

    def turn(number):
        turns.assign_add(1)
        weight.assign(weight * 2.0)
        return (number + 1,)

    def step():
        tf.while_loop(lambda number: number < 3, turn, (tf.constant(0),))
        return weight + 0.0

    assert run(step, [weight, turns], 1.0, 10)[:2] == (8.0, [8, 13])


def test_a_function_of_the_users_own_is_a_part_of_the_step_with_its_if():
    replaced.FUNCTION.answer(step=call_function)
    count, copy = kept(0, dtype="int64"), kept(0.0)

    @tf.function
    def every_third(value):
        count.assign_add(1)
        if count % 3 == 0:
            copy.assign(value)
        return copy * 2.0

    def step():
        return every_third(tf.constant(7.0)) + every_third(tf.constant(9.0))

    assert run(step, [count, copy], 1, 0.0)[:2] == (18.0, [3, 9])
    assert run(step, [count, copy], 2, 1.0)[:2] == (28.0, [4, 7])


def test_what_no_branch_assigns_needs_no_cell():
    rate, weight = kept(2.0), kept(1.0, trainable=True)

    def step():
        weight.assign(weight * rate)
        grow = lambda turn, x: (turn + 1, tf.cond(x > 5, lambda: x, lambda: x * rate))  # noqa: E731
        return tf.while_loop(lambda turn, _: turn < 9, grow, (0, 1.0))[1] + rate

    result, after, celled = run(step, [rate, weight], 2.0, 3.0)
    assert (float(result), after, celled) == (10.0, [2, 6], set())


@pytest.mark.parametrize("within", [False, True], ids=["step", "branch"])
def test_gradients_are_the_variables_before_and_after_an_assignment(within):
    """As on one device, where a read is differentiated by the variable, whatever has been assigned to it since."""
    weight = kept(3.0, trainable=True)

    def step():
        with tf.GradientTape() as tape:
            first = weight * weight
            if within:
                tf.cond(first > 0, lambda: nothing(weight.assign(weight * 2.0)), lambda: None)
            else:
                weight.assign(weight * 2.0)
            loss = first + 5.0 * weight
        return tape.gradient(loss, [weight])[0]

    result, after, _ = run(step, [weight], 3.0)
    assert (float(result), after) == (2 * 3 + 5, [6])


def test_rows_of_an_assigned_table_have_a_gradient():
    table = kept(np.ones((4, 2)), trainable=True)

    @tf.function
    def step(value):
        local = LocalValue(value, trainable=True)
        changed = local.assigned(local.read_value() * 2)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(tf.convert_to_tensor(changed), [1, 1, 3]))
        return tf.convert_to_tensor(tape.gradient(loss, changed.handle)), changed.change

    gradient, change = step(tf.convert_to_tensor(table))
    np.testing.assert_array_equal(gradient, [[0, 0], [2, 2], [0, 0], [1, 1]])
    np.testing.assert_array_equal(change, np.ones((4, 2)))


def test_what_a_variable_is_computed_from_says_whether_it_is_moved_or_replaced():
    @tf.function
    def moved(value, other):
        one, two = (LocalValue(each, trainable=trainable) for each, trainable in ((value, False), (other, True)))
        chosen = tf.cond(other > 0, one.read_value, lambda: other)
        after = {
            "added": one.read_value() + 2.0,
            "chosen": chosen,
            "copied": two.read_value(),
            "computed": 2.0 * other + 1.0,
        }
        found = {name: one.assigned(each) for name, each in after.items()}
        found["again"] = found["added"].assigned(found["added"].read_value() * 2.0)
        found["replaced and added"] = found["copied"].assigned(found["copied"].read_value() + 1.0)
        return {name: tf.constant(each.moved) for name, each in found.items()}

    found = moved(tf.constant(1.0), tf.constant(2.0))
    assert {name for name, each in found.items() if each} == {"added", "chosen", "again"}


def test_a_cell_hands_on_what_it_is_assigned():
    @tf.function
    def step(value):
        cell, sent = Cell(value, trainable=False), []
        cell.send = lambda before, after, moved: sent.append(after - before if moved else after)
        cell.assign(cell.read_value() + 2.5)
        cell.assign(value * 4.0)
        cell.set(tf.constant(7.0))
        return *sent, cell.read_value()

    assert [float(each) for each in step(tf.constant(1.0))] == [2.5, 4.0, 7.0]
    assert [float(each) for each in step(tf.constant(3.0))] == [2.5, 12.0, 7.0]
