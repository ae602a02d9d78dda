"""A step's own copies of variables, and tensors that are sent as one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit.strategies.parameter_servers.variables import LocalScope, LocalValue, packed, unpacked


def test_a_tape_takes_a_local_value_for_the_variable():
    """This fails when TensorFlow's tape no longer watches what it is told was accessed."""
    layer = keras.layers.Dense(3)
    layer.build((None, 2))
    values = [LocalValue(tf.random.normal(v.shape), trainable=True) for v in layer.weights]

    @tf.function
    def gradients(x):
        with LocalScope(layer.weights, values), tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x) ** 2)
            kernel = tape.gradient(loss, layer.trainable_weights)[0]
        return loss, kernel

    x = np.ones((4, 2), np.float32)
    loss, kernel = gradients(x)
    expected = x @ values[0].handle.numpy() + values[1].handle.numpy()
    assert float(loss) == pytest.approx(float((expected**2).sum()), rel=1e-5)
    np.testing.assert_allclose(kernel, 2 * x.T @ expected, rtol=1e-5)


def test_assignments_stay_in_the_step_and_others_do_not():
    mine, other = keras.Variable(1.0), keras.Variable(1.0)
    with LocalScope([mine], [tf.constant(5.0)]) as scope:
        mine.assign_add(2.0)
        other.assign_add(2.0)
        assert float(mine.value) == 7.0
    assert (float(mine.value), float(other.value)) == (1.0, 3.0)
    assert float(scope.values[id(mine)]) == 7.0
    assert scope.assigned == {id(mine): 1}


def test_what_is_packed_comes_back():
    shapes = [(3, 2), (), (200, 200), (5,), (7,)]
    dtypes = [np.float32, np.float32, np.float32, np.int64, np.float32]
    values = [
        tf.constant(np.random.default_rng(0).integers(0, 9, s).astype(d)) for s, d in zip(shapes, dtypes, strict=True)
    ]
    flat = packed(values)
    assert len(flat) == 3  # The small ones of float32, the large one, and the one of int64.
    for before, after in zip(values, unpacked(flat, values), strict=True):
        np.testing.assert_array_equal(before, after)
