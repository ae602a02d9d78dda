"""Components with examples are divided, each by its own number of them; replicas get the others whole."""

import beside
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from toolkit import strategies
from toolkit.errors import StrategyError
from toolkit.strategies import batches
from toolkit.strategies.batches import show, split, without_copies
from toolkit.strategies.pipelines import by_example, in_order

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True).astype("float32")


def pairs(size=8, **how):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size, **how)


def table(x, y):
    return {"table": tf.ones((4, 6)), "x": x}, y


def generated(shapes):
    return tf.data.Dataset.from_generator(
        lambda: iter(()), output_signature=tuple(tf.TensorSpec(shape, tf.float32) for shape in shapes)
    )


CASES = {
    "a batch": (pairs, [True, True]),
    "a table of a function": (lambda: pairs().map(table), [False, True, True]),
    "a table beside batches of a known size": (
        lambda: pairs(drop_remainder=True).map(table).shuffle(3).repeat(2).prefetch(1),
        [False, True, True],
    ),
    "a scalar": (lambda: pairs().map(lambda x, y: (x, y, 0.5)), [True, True, False]),
    "weights of a known size": (
        lambda: pairs(drop_remainder=True).map(lambda x, y: (x, y, tf.ones(8))),
        [True, True, True],
    ),
    "weights of ones": (lambda: pairs().map(lambda x, y: (x, y, tf.ones(tf.shape(y)))), [True, True, True]),
    "what a function shapes": (lambda: pairs().map(lambda x, y: (tf.reshape(x, (8, 2, 2)), y)), [True, True]),
    "two batch sizes": (
        lambda: tf.data.Dataset.zip((pairs(6, drop_remainder=True), pairs(2))),
        [True] * 4,
    ),
    "two batch sizes and a table, enumerated": (
        lambda: (
            tf.data.Dataset.zip((pairs(6, drop_remainder=True), pairs(2)))
            .map(lambda a, b: (a[0], b[0], tf.zeros((3, 3))))
            .enumerate()
        ),
        [False, True, True, False],
    ),
    "a generator": (lambda: generated([(None, 3), (4, 6), ()]), [True, False, False]),
    "a generator of batches of a known size": (lambda: generated([(8, 3), (4, 6), (8,)]), [True, False, True]),
}


@pytest.mark.parametrize("name", CASES)
def test_components_with_examples_are_told(name):
    make, wanted = CASES[name]
    assert by_example(make()) == wanted
    assert by_example(show(in_order(make()), print)) == wanted


def test_each_component_is_divided_by_its_examples():
    numbers = tf.data.Dataset.range
    dataset = tf.data.Dataset.zip((numbers(12).batch(6), numbers(4).batch(2)))
    dataset = dataset.map(lambda many, few: {"many": many, "few": few, "scale": 0.5, "table": tf.zeros((3, 2))})
    parts = list(split(dataset, indices=range(3), count=3))
    assert [part.batch["many"].numpy().tolist() for part in parts[:3]] == [[0, 1, 2], [3, 4, 5], [5]]
    assert [part.batch["few"].numpy().tolist() for part in parts[:3]] == [[0], [1], [1]]
    assert [int(part.rows) for part in parts[:3]] == [3, 3, 0]
    assert {tuple(part.batch["table"].shape) for part in parts} == {(3, 2)}
    assert {float(part.batch["scale"]) for part in parts} == {0.5}
    assert set(parts[0].tables) == {"2", "3"}
    (own,) = without_copies(split(dataset.take(1), indices=[8], count=9))
    assert [len(own[name]) for name in ("few", "many", "table")] == [0, 0, 3]


def test_the_first_share_has_all_of_components_without_examples_in_common(caplog):
    batches._say_once.cache_clear()  # Another test's batch may have been the first.
    numbers = tf.data.Dataset.range
    dataset = tf.data.Dataset.zip((numbers(14).batch(7), numbers(4).batch(2)))
    parts = list(split(dataset, indices=range(2), count=2))
    assert [[each.numpy().tolist() for each in part.batch] for part in parts[:2]] == [[[*range(7)], [0, 1]], [[6], [1]]]
    assert [int(part.rows) for part in parts] == [7, 0] * 2
    assert caplog.text.count("it isn't divided") == 1


class Semi(beside.OneDense):
    """Has unlabelled and labelled examples in each batch, and a scale and a table for all of them."""

    def train_step(self, data):
        many, (x, y), scale, table = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            loss += scale * tf.reduce_mean((self(many, training=True) + tf.reduce_sum(table)) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.slow
def test_batches_of_two_sizes_with_a_table_train_as_on_one_device(four_devices):
    data = tf.data.Dataset.zip((tf.data.Dataset.from_tensor_slices(X).batch(8), pairs(4).take(3)))
    data = data.map(lambda many, pair: (many, pair, 0.5, tf.ones((3, 2)) / 7))
    beside.assert_one_devices(four_devices[:2], Semi, data, compiled=beside.descent(0.1), rtol=1e-5, atol=1e-6)


def test_a_batch_that_is_made_from_a_number_has_examples():
    made = tf.data.Dataset.range(3).map(lambda n: (tf.ones((4, 2)) * tf.cast(n, tf.float32), tf.ones((5, 2))))
    assert by_example(made) == [True, False]


class Mixed(keras.Model):
    """Multiplies by a table that comes with each batch, and before its examples."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(6)

    def call(self, inputs):
        return tf.reduce_sum(self.dense(inputs["x"]) @ tf.transpose(inputs["table"]), -1, keepdims=True)


@pytest.mark.slow
def test_the_loss_of_an_epoch_counts_examples_and_not_a_tables_rows(four_devices):
    data, compiled = pairs(5).map(table), beside.descent(0.001, "mse")
    beside.assert_one_devices(four_devices[:2], Mixed, data, compiled=compiled, rtol=1e-5)


class Pairs(keras.Model):
    """Compares what its data have stacked along axis 0."""

    def __init__(self, taken):
        super().__init__()
        self.dense, self.taken = keras.layers.Dense(2), taken

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        anchors, positives = self.taken(data[0] if isinstance(data, tuple) else data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(anchors, training=True) - positives[:, :2]) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"distance": loss}


def stacked():
    return tf.data.Dataset.from_tensor_slices(X.reshape(3, 2, 4, 4))


@pytest.mark.slow
@pytest.mark.parametrize("taken", [lambda pair: (pair[0], pair[1]), tf.unstack], ids=["by number", "unstacked"])
def test_what_is_stacked_along_axis_0_is_one_devices(taken, four_devices):
    beside.assert_one_devices(
        four_devices[:2], lambda: Pairs(taken), stacked(), compiled=beside.descent(0.1), atol=1e-5
    )


@pytest.mark.slow
def test_a_step_that_takes_uneven_rows_apart_is_told_why_it_cannot(four_devices):
    with strategies.create("mirrored", devices=four_devices[:2]).scope():
        model = Pairs(lambda three: tf.unstack(three)[:2])
        model.compile("sgd")
    with pytest.raises(StrategyError, match="takes a tensor apart along axis 0.*Take rows by their number"):
        model.fit(tf.data.Dataset.from_tensor_slices(X.reshape(2, 3, 4, 4)), verbose=0, shuffle=False)


def graphs():
    """Batches of graphs that are joined into one: nodes, edges by nodes' numbers, graphs by nodes; labels by graphs."""
    draw = np.random.default_rng(4)
    for count in (8, 8, 5):
        sizes = draw.integers(2, 6, count)
        first = np.cumsum([0, *sizes])
        edges = np.concatenate([draw.integers(0, n, (n + 1, 2)) + first[k] for k, n in enumerate(sizes)])
        nodes = draw.normal(size=(sizes.sum(), 3)).astype("float32")
        yield (nodes, edges, np.repeat(np.arange(count), sizes)), draw.normal(size=(count, 1)).astype("float32")


class Passing(keras.Model):
    """Passes messages along edges, and adds up each graph's nodes."""

    def __init__(self):
        super().__init__()
        self.own, self.sent, self.last = layers.Dense(4), layers.Dense(4), layers.Dense(1)

    def call(self, inputs):
        x, edges, graph = inputs
        message = tf.math.unsorted_segment_sum(tf.gather(self.sent(x), edges[:, 0]), edges[:, 1], tf.shape(x)[0])
        return self.last(tf.math.segment_sum(tf.nn.tanh(self.own(x) + message), graph))


@pytest.mark.slow
def test_joined_graphs_train_as_on_one_device(four_devices):
    spec = [((None, 3), "float32"), ((None, 2), "int64"), ((None,), "int64"), ((None, 1), "float32")]
    *x, y = (tf.TensorSpec(*each) for each in spec)

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = Passing()
            model.compile(keras.optimizers.SGD(0.02), "mse", metrics=["mae"])
        data = tf.data.Dataset.from_generator(graphs, output_signature=(tuple(x), y))
        data = data.apply(tf.data.experimental.assert_cardinality(3))
        history = model.fit(data, epochs=2, verbose=0, shuffle=False).history
        return np.concatenate([*history.values(), model.evaluate(data, verbose=0), *map(np.ravel, model.get_weights())])

    one = trained(tf.distribute.get_strategy())
    np.testing.assert_allclose(
        trained(strategies.create("mirrored", devices=four_devices[:2])), one, rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
def test_rows_that_a_lookup_has_once_are_added_before_they_are_squared(four_devices):
    """A dense layer of sparse inputs looks each column up once; two replicas may both look it up."""
    x = np.random.default_rng(3).normal(size=(32, 6)) * (np.random.default_rng(4).uniform(size=(32, 6)) < 0.4)
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x.astype("float32")), x.sum(1, keepdims=True)))

    def build():
        return keras.Sequential([keras.Input((6,), sparse=True), layers.Dense(4), layers.Dense(1)])

    def compiled():
        return keras.optimizers.Adam(0.05), "mse"

    for count in (2, 3):
        how = {"epochs": 3, "compiled": compiled, "rtol": 1e-5, "atol": 1e-6}
        beside.assert_one_devices(four_devices[:count], build, data.batch(8), **how)


class Convolving(layers.Layer):
    """Mixes the nodes of a graph by its sparse adjacency."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, inputs):
        x, adjacency = inputs
        return tf.sparse.sparse_dense_matmul(adjacency, self.dense(x))

    def compute_output_shape(self, shapes):
        return shapes[0][0], 3


def one_graph():
    x, adjacency = keras.Input((4,)), keras.Input((23,), sparse=True)
    hidden = layers.ReLU()(Convolving()([x, adjacency]))
    return keras.Model([x, adjacency], Convolving()([hidden, adjacency]))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_one_graph_with_a_sparse_adjacency_trains_as_on_one_device(four_devices, count):
    adjacency = tf.sparse.from_dense(np.eye(23, dtype="float32") + (np.outer(range(23), range(23)) % 7 == 3) / 3.0)
    given = (X[:23], tf.sparse.SparseTensor(adjacency.indices, tf.cast(adjacency.values, "float32"), (23, 23)))

    data = tf.data.Dataset.from_tensors((given, X[:23, :3], (np.arange(23) < 9).astype("float32")))
    how = {"epochs": 3, "compiled": beside.descent(0.05, "mse"), "rtol": 1e-5, "atol": 1e-6}
    beside.assert_one_devices(four_devices[:count], one_graph, data, **how)
