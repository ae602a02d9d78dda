"""What tells weights apart that differ by a bit, or by their order."""

import numpy as np
import pytest

from toolkit.strategies.variables.equality import _sum_of_bits


def sums(*arrays):
    import tensorflow as tf

    return {int(_sum_of_bits(tf.constant(array))) for array in arrays}


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"])
def test_weights_that_differ_anywhere_or_by_their_order_have_other_sums(kind):
    array = np.random.default_rng(0).integers(0, 2, 3001).astype(kind)
    array[:2] = 0, 1
    others = [np.where(np.arange(array.size) == place, 1 - array, array) for place in (0, 1023, 1024, 3000)]
    swapped = array.copy()
    swapped[:2] = array[1::-1]
    far = array.copy()
    far[[0, 2048 + int(np.argmax(array[2048:] != array[0]))]] = far[
        [2048 + int(np.argmax(array[2048:] != array[0])), 0]
    ]
    all_of_them = [array, *(each.astype(kind) for each in others), swapped, far]
    assert len(sums(*all_of_them)) == len(all_of_them)
    assert len(sums(array, array.copy())) == 1


def test_bits_count_and_not_values():
    assert len(sums(np.float32([0.0]), np.float32([-0.0]), np.float32([np.nan]))) == 3
    assert len(sums(np.float32([np.nan]), np.float32([np.nan]))) == 1
    assert sums(np.zeros((0, 4), "float32")) == {0}
