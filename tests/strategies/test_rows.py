"""What a graph computes of a batch's rows is told by its operations, and whatever is told is so."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from toolkit.strategies.step.rows import Graph, Of

WIDTH, ROWS, FIRST = 4, 7, 3


def traced(function):
    """Returns a function of x and y with any number of rows, and what its results are."""
    found = {}

    def traced_once(x, y):
        results = function(x, y)
        found["tensors"] = results = [results] if tf.is_tensor(results) else list(results)
        found["of"] = Graph(x.graph)
        return results

    spec = tf.TensorSpec([None, WIDTH])
    wrapped = tf.compat.v1.wrap_function(traced_once, [spec, spec])
    return wrapped, [found["of"][each] for each in found["tensors"]]


def of(function):
    return traced(function)[1][0]


def cross_entropy(x, y):
    return tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(y), x)


def gan_labels(x, y):
    """As scripts of GANs have it: real and made pictures in one call, and noisy labels."""
    both = tf.concat([x, tf.random.normal(tf.shape(y))], 0)
    labels = tf.concat([tf.ones((tf.shape(x)[0], 1)), tf.zeros((tf.shape(x)[0], 1))], 0)
    labels += 0.05 * tf.random.uniform(tf.shape(labels))
    return keras.losses.BinaryCrossentropy(from_logits=True)(labels, both[:, :1])


def noised(x, y):
    """As scripts of diffusion have it."""
    times = tf.random.uniform((tf.shape(x)[0],), 0, 10, tf.int32)
    rate = tf.gather(tf.linspace(0.1, 0.9, 10), times)[:, None]
    noise = tf.random.normal(tf.shape(x))
    return tf.reduce_mean((x * tf.sqrt(rate) + noise * tf.sqrt(1 - rate) - y) ** 2)


MEANS = {
    "mean": lambda x, y: tf.reduce_mean((x - y) ** 2),
    "sum by the number of rows": lambda x, y: tf.reduce_sum((x - y) ** 2) / tf.cast(tf.shape(x)[0], tf.float32),
    "mean of rows divided by their number": lambda x, _: tf.reduce_sum(x / tf.cast(tf.shape(x)[0], tf.float32)),
    "regularised": lambda x, _: tf.reduce_mean(x) + 0.1 * tf.reduce_sum(tf.constant([1.0, 2.0]) ** 2),
    "matrix of products of features": lambda x, _: tf.matmul(x, x, transpose_a=True) / tf.cast(tf.shape(x)[0], x.dtype),
    "flattened": lambda x, y: tf.reduce_mean(tf.reshape(x, [-1]) * tf.reshape(y, [-1])),
    "class weights by row": lambda x, y: tf.reduce_mean(
        tf.gather([1.0, 3.0], tf.cast(y[:, 0] > 0, tf.int32)) * x[:, 0]
    ),
    "the only feature": lambda x, _: tf.reduce_mean(x[:, :1][:, 0]),
    "a Dice loss of each row": lambda x, y: 1 - ops.mean(ops.sum(x * y, -1) / (ops.sum(x + y, -1) + 1)),
    "Keras's reduction": lambda x, y: keras.losses.MeanSquaredError()(y, x),
    "real and made": gan_labels,
    "noise by row": noised,
    "noise of a seed that is written out": lambda x, _: tf.reduce_mean(x + keras.random.normal(ops.shape(x), seed=1)),
    "one stateless draw for all": lambda x, _: tf.reduce_mean(x * tf.random.stateless_uniform((), [1, 2])),
}
OTHER = {
    "as many draws as rows of the batch twice": lambda x, y: tf.reduce_mean(
        tf.concat([x, y], 0) * keras.random.normal((2 * ops.shape(x)[0], 1), seed=1)
    ),
    "masked": lambda x, y: tf.reduce_sum(tf.where(y > 0, x, 0)) / tf.reduce_sum(tf.cast(y > 0, tf.float32)),
    "negatives": lambda x, y: tf.reduce_mean(tf.nn.log_softmax(tf.matmul(x, y, transpose_b=True))),
    "reversed": lambda x, _: tf.reduce_mean(0.7 * x + 0.3 * x[::-1]),
    "centred": lambda x, _: x - tf.reduce_mean(x, 0),
    "root": lambda x, _: tf.sqrt(tf.reduce_mean(x**2)),
    "largest": lambda x, _: tf.reduce_max(x),
    "hardest": lambda x, _: tf.reduce_mean(tf.math.top_k(tf.reduce_mean(x, 1), 2).values),
    "chosen": lambda x, y: tf.reduce_mean(tf.boolean_mask(x, y[:, 0] > 0)),
    "fixed noise": lambda x, _: tf.reduce_mean(x + tf.random.normal((ROWS, WIDTH))),
    "one draw for all": lambda x, _: tf.reduce_mean(x * tf.random.uniform(())),
    "two rows as one": lambda x, _: tf.reduce_mean(tf.reduce_max(tf.reshape(x, [-1, 2 * WIDTH]), 1)),
    "two rows of a batch that stands twice": lambda x, y: tf.reduce_max(
        tf.reshape(tf.concat([x, y], 0), [tf.shape(x)[0], -1]), 1
    ),
    "whether there is any": lambda x, _: tf.cast(tf.cast(tf.reduce_sum(tf.cast(x > 0, tf.int32)), tf.bool), tf.float32),
    "a sum and a constant": lambda x, _: tf.reduce_sum(x) + 1.0,
    "by its number": lambda x, _: tf.reduce_mean(x[:, 0] * tf.cast(tf.range(tf.shape(x)[0]), tf.float32)),
    "one row": lambda x, _: x[0],
    "a diagonal": lambda x, _: tf.einsum("ii->i", x),
    "shuffled": lambda x, _: tf.reduce_mean(x * tf.random.shuffle(x)),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_over_rows_are_told(name):
    assert of(MEANS[name]).is_mean


@pytest.mark.parametrize("name", OTHER)
def test_what_mixes_rows_is_not_taken_for_a_mean_or_rows(name):
    assert of(OTHER[name]).of is Of.OTHER


def test_sums_and_rows_are_told():
    assert of(lambda x, y: tf.reduce_sum((x - y) ** 2) / 16).is_sum
    assert of(lambda x, _: tf.cast(tf.shape(x)[0], tf.float32) * 0.5).is_sum
    assert of(cross_entropy).by_row
    assert of(lambda x, _: tf.einsum("bi,ij->bj", x, tf.ones((WIDTH, 2)))).by_row
    assert of(lambda x, _: tf.transpose(x)).axis == 1


def test_what_is_read_of_a_variable_after_it_was_set_to_rows_is_the_whole_batchs():
    state = tf.Variable(0.0)

    def running(x, _):
        state.assign(0.9 * state + 0.1 * tf.reduce_sum(x))
        return tf.reduce_mean(x) + state.read_value()

    assert of(running).of is Of.OTHER


# Sizes: what looks like the number of rows at some numbers isn't it at all.


def count(x):
    return tf.shape(x)[0]


def rate(x):
    return tf.cast(count(x), tf.float32)


def tenth(x):
    return tf.maximum(0.1 * rate(x), 1.0)


SIZES = {
    "mean": {
        "by the product of the shape": lambda x, _: tf.reduce_sum(x) / tf.cast(tf.reduce_prod(tf.shape(x)), tf.float32),
        "by the number of elements": lambda x, _: tf.reduce_sum(x) / tf.cast(tf.size(x), tf.float32),
        "by at least one": lambda x, _: tf.reduce_sum(x) / tf.maximum(rate(x), 1.0),
        "by at least three of four each": lambda x, _: tf.reduce_sum(x) / tf.maximum(tf.cast(tf.size(x), tf.float32), 3.0),
        "by at least one, with Keras's operations": lambda x, _: ops.sum(x) / ops.maximum(ops.cast(ops.shape(x)[0], "float32"), 1),
        "of normalised rows": lambda x, y: ops.mean(ops.normalize(x) * ops.normalize(y)),
        "one of two by a constant": lambda x, y: tf.where(tf.constant(True), tf.reduce_mean(x), tf.reduce_mean(y)),
        "of several": lambda x, y: 0.0 + tf.add_n([tf.reduce_mean(x), tf.reduce_mean(y)]),
        "of half of the features": lambda x, _: tf.reduce_mean(tf.split(x, 2, 1)[0]),
        "that had an axis": lambda x, _: tf.squeeze(tf.reduce_mean(x, keepdims=True)),
        "half the squares": lambda x, _: tf.nn.l2_loss(x) / rate(x),
        "smooth": lambda x, y: tf.reduce_mean(tf.where(tf.abs(x - y) < 1, 0.5 * (x - y) ** 2, tf.abs(x - y))),
        "with labels of ones": lambda x, _: tf.reduce_mean(
            keras.losses.binary_crossentropy(tf.ones((count(x), 1)), tf.sigmoid(x[:, :1]))
        ),
        "between two": lambda x, y: tf.reduce_mean(tf.random.uniform([count(x), 1]) * (x - y) + y),
    },
    "sum": {
        "of products": lambda x, y: tf.einsum("bi,bj->ij", x, y),
        "by class": lambda x, y: tf.math.unsorted_segment_sum(x, tf.argmax(y, 1), 4),
        "with rows of a constant": lambda x, _: tf.reduce_sum((x - 1) ** 2) / 8.0,
    },
    "rows": {
        "stacked and merged": lambda x, y: tf.reshape(tf.stack([x, y], 1), [-1, WIDTH]),
        "halves of what stands twice": lambda x, y: tf.reduce_mean(tf.reshape(tf.concat([x, y], 0), [2, -1, WIDTH]), 0),
        "a half of what stands twice": lambda x, y: tf.split(tf.concat([x, y], 0), 2, 0)[1],
        "repeated": lambda x, _: tf.repeat(x, 2, 0) * 1.5,
        "one of each row": lambda x, y: tf.gather(x, tf.argmax(y, 1), batch_dims=1),
        "variance of each row": lambda x, _: tf.nn.moments(x, [1])[1],
        "through a transposed convolution": lambda x, _: tf.nn.conv1d_transpose(
            x[:, :, None], tf.ones((3, 2, 1)), (count(x), WIDTH, 2), 1
        ),
    },
    "rows twice": {
        "stacked and merged": lambda x, y: tf.reshape(tf.stack([x, y]), [-1, WIDTH]),
        "tiled, beside two": lambda x, y: tf.tile(x, [2, 1]) + tf.concat([x, y], 0),
    },
    "whole": {
        "as many features as rows": lambda x, _: tf.reduce_mean(x[:, : count(x)]),
        "a feature by the number of rows": lambda x, _: tf.reduce_mean(tf.gather(x, count(x), axis=1)),
        "what is left of the rows": lambda x, y: tf.reduce_mean(x[count(y) :]),
        "half the rows": lambda x, y: tf.concat([x, y], 0)[: count(x)],
        "the first thousands": lambda x, _: tf.reduce_sum(x) / tf.cast(tf.shape(x[:20000])[0], tf.float32),
        "by half, rounded": lambda x, _: tf.reduce_sum(x) / tf.cast(tf.cast(rate(x) * 0.5, tf.int32), tf.float32),
        "by half of an integer": lambda x, _: tf.reduce_sum(x) / tf.cast(count(x) // 2, tf.float32),
        "by six more": lambda x, _: tf.reduce_sum(x) / (rate(x) + 6),
        "by at most so many": lambda x, _: tf.reduce_sum(x) / tf.minimum(rate(x), 1e9),
        "by at least two": lambda x, _: tf.reduce_sum(x) / tf.maximum(rate(x), 2.0),
        "by at least sixteen": lambda x, _: tf.reduce_sum(x) / tf.maximum(rate(x), 16.0),
        "by a tenth, at least one": lambda x, _: tf.reduce_sum(x) / tenth(x),
        "by its square and times it": lambda x, _: tf.reduce_sum(x) / rate(x) ** 2 * rate(x),
        "by its root": lambda x, _: tf.reduce_sum(x) * tf.math.rsqrt(rate(x)),
        "by the elements of at most so many": lambda x, _: tf.reduce_sum(x)
        / tf.cast(tf.size(tf.zeros([tf.minimum(count(x), 2000)])), tf.float32),
        "by a sum of at least so many ones": lambda x, _: tf.reduce_sum(x)
        / tf.reduce_sum(tf.ones([tf.maximum(count(x), 16)])),
        "of which a part is one of at least so many": lambda x, _: tf.reduce_mean(
            x + tf.ones([tf.maximum(count(x), 16), WIDTH])[: count(x)]
        ),
        "by how many a mask leaves": lambda x, _: tf.reduce_sum(x)
        / tf.cast(tf.shape(tf.boolean_mask(x, x[:, 0] > 0))[0], tf.float32),
        "another in large batches": lambda x, _: tf.where(count(x) > 8, tf.reduce_mean(x), tf.reduce_sum(x)),
        "pairs of what stands twice": lambda x, y: tf.reduce_mean(tf.reshape(tf.concat([x, y], 0), [-1, 2, WIDTH]), 1),
        "beside itself repeated": lambda x, _: tf.concat([x, tf.repeat(x, 2, 0)], 0),
        "a half of itself beside another repeated": lambda x, y: tf.split(tf.concat([x, tf.repeat(y, 3, 0)], 0), 2, 0)[0],
        "tiled, and repeated": lambda x, _: tf.tile(x, [2, 1]) + tf.repeat(x, 2, 0),
        "each with each": lambda x, y: x[:, None] - y[None],
        "each with each, by letters": lambda x, y: tf.einsum("bi,cj->bc", x, y),
        "by its number": lambda x, _: x * tf.cast(tf.range(count(x)), tf.float32)[:, None],
        "along a line": lambda x, _: x * tf.linspace(0.0, 1.0, count(x))[:, None],
        "times one": lambda x, _: tf.matmul(tf.eye(count(x)), x),
        "padded by as many": lambda x, _: tf.pad(x, [[0, count(x)], [0, 0]]),
        "normalised along the batch": lambda x, _: ops.normalize(x, axis=0),
        "a mean for each": lambda x, _: tf.broadcast_to(tf.reduce_mean(x), tf.shape(x)),
        "at places": lambda x, y: tf.gather_nd(x, tf.stack([tf.range(count(x)), tf.argmax(y, 1, output_type=tf.int32)], 1)),
        "variance of the batch": lambda x, _: tf.nn.moments(x, [0])[1],
        "added up along the batch": lambda x, _: tf.cumsum(x, 0),
        "largest of the batch": lambda x, _: tf.math.top_k(x[:, 0], 2).values,
        "norm of the batch": lambda x, _: tf.norm(x),
        "as many draws as pairs": lambda x, _: tf.reduce_sum(tf.random.uniform([count(x) * count(x)])) / rate(x),
        "eight rows": lambda x, _: tf.reduce_mean(tf.reshape(x, [8, -1])),
        "pairs": lambda x, _: tf.reduce_mean(tf.reduce_max(tf.reshape(x, [-1, 2, WIDTH]), 1)),
        "a queue beside it": lambda x, _: tf.reduce_sum(tf.concat([x, tf.zeros([6, WIDTH])], 0)) / 16.0,
        "one at a time": lambda x, _: tf.reduce_mean(tf.map_fn(lambda row: tf.reduce_sum(row**2), x)),
    },
}  # fmt: skip


def verdict(value):
    if value.by_row:
        return "rows" if value.parts == 1 else "rows twice"
    return "mean" if value.is_mean else "sum" if value.is_sum else "whole"


@pytest.mark.parametrize(("told", "name"), [(told, name) for told in SIZES for name in SIZES[told]])
def test_sizes_are_told_from_what_only_looks_like_them(told, name):
    assert verdict(of(SIZES[told][name])) == told


# What a script asks of a shape in Python, which is unknown while it is traced.
ASKED = {
    "or eight": (lambda x, y: tf.reduce_sum((x - y) ** 2) / (x.shape[0] or 8), "sum"),
    "if it is known": (lambda x, _: tf.reduce_sum(x) / (8 if x.shape[0] is None else x.shape[0]), "sum"),
    "at least one of a tenth": (lambda x, _: tf.reduce_sum(x) / max(x.shape[0] // 10, 1), None),
    "at least sixteen": (lambda x, _: tf.reduce_sum(x) / max(x.shape[0], 16), None),
    "a root": (lambda x, _: tf.reduce_sum(x) / x.shape[0] ** 0.5, None),
    "itself": (lambda x, _: tf.reduce_sum(x) / x.shape[0], None),
    "a loop": (lambda x, _: sum(tf.reduce_sum(x[i]) for i in range(x.shape[0])), None),
    "taken apart": (lambda x, _: tf.add_n([tf.reduce_sum(each) for each in tf.unstack(x)]), None),
    "or an identity of that size": (
        lambda x, y: tf.reduce_mean(tf.matmul(x, y, transpose_b=True) * tf.eye(x.shape[0] or count(x))), "whole",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_what_python_asks_of_a_shape_is_what_runs_or_raises(name):
    function, told = ASKED[name]
    if told is None:
        with pytest.raises((TypeError, ValueError)):
            of(function)
    else:
        assert verdict(of(function)) == told


# Random expressions.

UNARY = [
    lambda a: tf.reduce_mean(a), lambda a: tf.reduce_sum(a), lambda a: tf.reduce_sum(a, 0), lambda a: tf.reduce_mean(a, -1),
    lambda a: tf.reduce_max(a, -1), lambda a: tf.reduce_max(a, 0), tf.tanh, tf.square, lambda a: a * 3.0, lambda a: a + 1.0,
    tf.transpose, lambda a: a[::-1], lambda a: a[:, :2], lambda a: a[1:], lambda a: tf.reshape(a, [-1]),
    lambda a: tf.reshape(a, [-1, 2]), lambda a: tf.expand_dims(a, 0), lambda a: tf.expand_dims(a, -1), lambda a: tf.squeeze(a, 0),
    lambda a: tf.nn.softmax(a), lambda a: tf.cumsum(a, 0), lambda a: tf.cumsum(a, -1), lambda a: tf.tile(a, [2, 1]),
    lambda a: tf.repeat(a, 2, 0), lambda a: tf.split(a, 2, 0)[0], lambda a: tf.concat([a, a], 0), lambda a: tf.concat([a, a], -1),
    lambda a: tf.stack([a, a], 0), lambda a: tf.stack([a, a], -1), lambda a: tf.unstack(a, axis=1)[0], tf.zeros_like,
    lambda a: tf.cast(tf.shape(a)[0], tf.float32), lambda a: tf.cast(tf.size(a), tf.float32), lambda a: tf.nn.l2_loss(a),
    lambda a: tf.pad(a, [[0, 0], [1, 1]]), lambda a: tf.pad(a, [[1, 0], [0, 0]]), lambda a: tf.reverse(a, [-1]),
    lambda a: tf.one_hot(tf.argmax(a, -1), 3), lambda a: tf.gather(a, [0, 1], axis=1), lambda a: tf.gather(a, [0, 1], axis=0),
    lambda a: tf.gather(tf.constant([1.0, 2.0, 3.0, 4.0]), tf.argmax(a, -1)), lambda a: tf.where(a > 0, a, 0.0),
    lambda a: tf.math.unsorted_segment_sum(a, tf.cast(a[:, 0] > 0, tf.int32), 2), lambda a: tf.roll(a, 1, 0),
    lambda a: tf.broadcast_to(a, [2, *tf.unstack(tf.shape(a))]), lambda a: tf.math.top_k(a, 2).values,
    lambda a: tf.reshape(a, [tf.shape(a)[0] // 2, -1]), lambda a: tf.cast(tf.cast(a, tf.bool), tf.float32),
]  # fmt: skip
BINARY = [
    tf.add, tf.subtract, tf.multiply, tf.math.divide_no_nan, tf.maximum, lambda a, b: tf.where(a > b, a, b),
    lambda a, b: tf.matmul(a, b), lambda a, b: tf.matmul(a, b, transpose_a=True), lambda a, b: tf.matmul(a, b, transpose_b=True),
    lambda a, b: tf.einsum("ij,ij->i", a, b), lambda a, b: tf.einsum("ij,ij->j", a, b), lambda a, b: tf.concat([a, b], 0),
    lambda a, b: tf.tensordot(a, b, 1), tf.multiply, tf.add, tf.math.divide_no_nan,
    lambda a, b: tf.reshape(a, [tf.shape(b)[0], -1]),
]  # fmt: skip


def expression(seed):
    random = np.random.default_rng(seed)

    def build(x, y):
        pool = [x, y, tf.constant(random.normal(size=WIDTH), tf.float32), tf.constant(2.0)]
        pool += [tf.constant(random.normal(size=(WIDTH, WIDTH)), tf.float32)]
        made = []
        for _ in range(24):
            try:
                if random.random() < 0.6:
                    new = UNARY[random.integers(len(UNARY))](pool[random.integers(len(pool))])
                else:
                    a, b = (pool[random.integers(len(pool))] for _ in range(2))
                    new = BINARY[random.integers(len(BINARY))](a, b)
            except (ValueError, TypeError, tf.errors.InvalidArgumentError, IndexError, KeyError):
                continue
            new = tf.cast(new, tf.float32)
            if new.shape.rank is not None and new.shape.rank <= 4:
                pool.append(new)
                made.append(new)
        return made or [x]

    return build


def check(wrapped, number, value, parts):
    """Compares the whole batch's result with those of its parts."""
    fetched = wrapped.prune(list(wrapped.inputs[:2]), wrapped.outputs[number])
    try:
        whole, first, second = (np.asarray(fetched(*part)) for part in parts)
    except tf.errors.InvalidArgumentError:
        return False
    if not all(np.isfinite(each).all() for each in (whole, first, second)) or np.abs(whole).max(initial=0) > 1e6:
        return False
    close = {"rtol": 2e-3, "atol": 1e-3 * max(1.0, np.abs(whole).max(initial=0)), "err_msg": f"{value}"}
    factor = [float(n) ** value.power for n in (ROWS, FIRST, ROWS - FIRST)]
    whole, first, second = (each / by for each, by in zip((whole, first, second), factor, strict=True))
    if value.of is Of.ALIKE:
        np.testing.assert_allclose(first, whole, **close)
    elif value.of is Of.SUM and value.power == -1:  # Which a constant may be added to.
        weighted = (FIRST * first / factor[0] * factor[1] + (ROWS - FIRST) * second / factor[0] * factor[2]) / ROWS
        np.testing.assert_allclose(weighted, whole, **close)
    elif value.of is Of.SUM:
        np.testing.assert_allclose(first + second, whole, **close)
    elif value.of is Of.ROWS:
        # The batch stands along the axis so many times, one after another.
        whole, *of_parts = (np.split(each, value.parts, value.axis) for each in (whole, first, second))
        for mine, *theirs in zip(whole, *of_parts, strict=True):
            np.testing.assert_allclose(np.concatenate(theirs, value.axis), mine, **close)
    else:
        return False
    return True


def found_in(seed):
    wrapped, values = traced(expression(seed))
    random = np.random.default_rng(seed)
    x, y = (random.normal(size=(ROWS, WIDTH)).astype("float32") for _ in range(2))
    parts = [[tf.constant(each[rows]) for each in (x, y)] for rows in (slice(None), slice(FIRST), slice(FIRST, None))]
    return sum(check(wrapped, n, value, parts) for n, value in enumerate(values) if value.of is not Of.OTHER)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_what_is_told_of_random_expressions_is_so(seed):
    found_in(seed)


@pytest.mark.long
def test_what_is_told_of_many_random_expressions_is_so():
    assert sum(found_in(seed) for seed in range(300)) > 1000
