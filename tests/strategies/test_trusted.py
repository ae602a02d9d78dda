"""What is trusted to compute each example for itself: Keras's own classes, with nothing of a script's in them."""

import ast
import functools
import inspect

import batteries
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses, metrics

from toolkit import strategies
from toolkit.strategies.step import trusted
from toolkit.strategies.step.trial import Tries


def test_no_line_of_the_list_takes_another_ones_place():
    """Two equal keys of a dict are one, and the last one's names stay."""
    tables = [each for each in ast.walk(ast.parse(inspect.getsource(trusted))) if isinstance(each, ast.Dict)]
    assert len(tables) > 4
    for each in tables:
        keys = [ast.unparse(key) for key in each.keys if key is not None]
        assert len(keys) == len(set(keys))
    assert {layers.InputLayer, layers.Add, layers.Embedding, keras.Sequential} <= set(trusted._list())


def over(x):
    return tf.exp(x) / tf.reduce_sum(tf.exp(x), 0)


def own(x):
    return tf.nn.relu(x)


class Sum(keras.regularizers.Regularizer):
    def __call__(self, x):
        return tf.reduce_sum(x)


def called(layer, *shapes):
    """Returns a layer that a model calls with inputs of such shapes, without the axis of the examples."""
    inputs = [keras.Input(shape) for shape in shapes]
    layer(inputs if len(inputs) > 1 else inputs[0])
    return layer


@keras.saving.register_keras_serializable("test_trusted")
class Cell(layers.Layer):
    def __init__(self, mixes, **kwargs):
        super().__init__(**kwargs)
        self.mixes, self.state_size, self.dense = mixes, 3, layers.Dense(3)

    def build(self, shape):
        self.dense.build((shape[0], shape[1] + 3))

    def get_config(self):
        return {**super().get_config(), "mixes": self.mixes}

    def call(self, x, states):
        x = self.dense(tf.concat([x, states[0]], -1))
        x = x - tf.reduce_mean(x, 0) if self.mixes else tf.tanh(x)
        return x, [x]


class OwnDense(layers.Dense):
    pass


def patched():
    layer = called(layers.Dense(3), (4,))
    layer.call = over
    return layer


@functools.wraps(keras.activations.relu)
def named_relu(x):
    return over(x)


PICTURES = (6, 6, 2)
TRUSTED = {
    "Dense": lambda: called(layers.Dense(3, activation="gelu"), (4,)),
    "Dense, with a regularizer of weights": lambda: called(layers.Dense(3, kernel_regularizer=Sum()), (4,)),
    "Dense, with activity": lambda: called(layers.Dense(3, activity_regularizer="l2"), (4,)),
    "Softmax": lambda: called(layers.Softmax(), (5, 4)),
    "Softmax along the second axis of three": lambda: called(layers.Softmax(axis=-2), (5, 4)),
    "Attention": lambda: attended(),
    "EinsumDense": lambda: called(layers.EinsumDense("...x,xy->...y", output_shape=3), (5, 4)),
    "LSTM": lambda: called(layers.LSTM(3), (5, 4)),
    "LSTM with an activation by row": lambda: called(layers.LSTM(3, activation=own), (5, 4)),
    "GRU with a recurrent activation by row": lambda: called(layers.GRU(3, recurrent_activation=own), (5, 4)),
    "ConvLSTM2D with an activation by row": lambda: called(layers.ConvLSTM2D(3, 3, activation=own), (5, *PICTURES)),
    "a cell by row": lambda: called(layers.RNN(Cell(False)), (5, 4)),
    "stacked cells by row": lambda: called(layers.RNN([Cell(False), layers.LSTMCell(2, activation=own)]), (5, 4)),
    "Bidirectional": lambda: called(layers.Bidirectional(layers.LSTM(3)), (5, 4)),
    "TimeDistributed": lambda: called(layers.TimeDistributed(layers.Dense(3)), (5, 4)),
    "TimeDistributed by row": lambda: called(layers.TimeDistributed(layers.Lambda(own)), (5, 4)),
    "TimeDistributed of a model": lambda: called(
        layers.TimeDistributed(keras.Sequential([keras.Input((4,)), layers.Dense(3, activation=own)])), (5, 4)
    ),
    "numbers of words": lambda: called(layers.Hashing(5), ()),
    "counts": lambda: called(layers.CategoryEncoding(4, output_mode="count"), (3,)),
    "pictures": lambda: called(layers.RandomFlip(), PICTURES),
    "an image resized": lambda: called(layers.Resizing(3, 3), PICTURES),
    "a model": lambda: keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Softmax()]),
}  # fmt: skip
TRACED = {
    "a subclass": lambda: called(OwnDense(3), (4,)),
    "a class of the same name": lambda: called(type("Dense", (layers.Dense,), {"__module__": "keras.layers"})(3), (4,)),
    "a method of its own": lambda: patched(),
    "an activation": lambda: called(layers.Dense(3, activation=over), (4,)),
    "an activation that goes by another's name": lambda: called(layers.Dense(3, activation=named_relu), (4,)),
    "an activation around Keras's": lambda: called(
        layers.Dense(3, activation=functools.partial(keras.activations.softmax, axis=0)), (4,)
    ),
    "an activation along its only axis": lambda: called(layers.Activation("softmax"), ()),
    "Activation": lambda: called(layers.Activation(over), (4,)),
    "a regularizer of activity": lambda: called(layers.Dense(3, activity_regularizer=lambda x: tf.norm(x)), (4,)),
    "a regularizer of activity that looks at the batch": lambda: called(
        layers.Dense(3, activity_regularizer=keras.regularizers.OrthogonalRegularizer()), (4,)
    ),
    "Softmax along the examples": lambda: called(layers.Softmax(axis=0), (4,)),
    "Softmax along the examples, from the right": lambda: called(layers.Softmax(axis=-2), (4,)),
    "Softmax along several": lambda: called(layers.Softmax(axis=(-1, -2)), (4,)),
    "Softmax of numbers": lambda: called(layers.Softmax(), ()),
    "Softmax called with less, too": lambda: called(called(layers.Softmax(axis=-2), (5, 4)), (4,)),
    "UnitNormalization": lambda: called(layers.UnitNormalization(axis=-2), (4,)),
    "Concatenate": lambda: called(layers.Concatenate(axis=0), (4,), (4,)),
    "Attention along the examples": lambda: called(layers.Attention(), (4,), (4,)),
    "counts of numbers": lambda: called(layers.CategoryEncoding(4, output_mode="count"), ()),
    "sets of numbers": lambda: called(layers.Discretization([1.0, 2.0], output_mode="multi_hot"), ()),
    "dropout of the batch": lambda: called(layers.Dropout(0.5, noise_shape=(1, 4)), (4,)),
    "a picture": lambda: called(layers.Resizing(3, 3), (6, 2)),
    "Lambda": lambda: called(layers.Lambda(own), (4,)),
    "CutMix": lambda: layers.CutMix(),
    "MixUp": lambda: layers.MixUp(),
    "an LSTM's activation": lambda: called(layers.LSTM(3, activation=over), (5, 4)),
    "an LSTM's recurrent activation": lambda: called(layers.LSTM(3, recurrent_activation=over), (5, 4)),
    "attention among examples": lambda: attended(attention_axes=(0,)),
    "a cell": lambda: called(layers.RNN(Cell(True)), (5, 4)),
    "one of several cells": lambda: called(layers.RNN([layers.LSTMCell(3), Cell(True)]), (5, 4)),
    "in Bidirectional": lambda: called(layers.Bidirectional(layers.RNN(Cell(True))), (5, 4)),
    "in TimeDistributed": lambda: called(layers.TimeDistributed(layers.Lambda(over)), (5, 4)),
    "along the examples in TimeDistributed": lambda: called(layers.TimeDistributed(layers.Softmax(axis=-2)), (5, 4)),
    "a model's layer in TimeDistributed": lambda: called(
        layers.TimeDistributed(keras.Sequential([keras.Input((4,)), layers.Dense(3, activation=over)])), (5, 4)
    ),
    "in SpectralNormalization": lambda: called(layers.SpectralNormalization(layers.Dense(3, activation=over)), (4,)),
    "a model's layer": lambda: keras.Sequential([keras.Input((4,)), layers.Dense(3, activation=over)]),
    "between a model's layers": lambda: centred(),
    "a layer that nobody has called": lambda: layers.Softmax(),
}  # fmt: skip


def attended(**more):
    layer, x = layers.MultiHeadAttention(2, 4, **more), keras.Input((5, 4))
    layer(x, x)
    return layer


def centred():
    x = keras.Input((4,))
    return keras.Model(x, x - keras.ops.mean(x, 0))


@pytest.mark.parametrize("name", TRUSTED)
def test_what_is_on_the_list_is_trusted(name):
    assert trusted.is_by_row(TRUSTED[name]())


@pytest.mark.parametrize("name", TRACED)
def test_what_may_look_at_other_examples_is_not_trusted(name):
    assert not trusted.is_by_row(TRACED[name]())


def _needed(kind):
    given = inspect.signature(kind.__init__).parameters.values()
    return [each.name for each in given if each.default is each.empty or each.name in ("bin_boundaries", "num_tokens")]


def test_every_layer_on_the_list_holds_nothing_of_a_script_as_keras_makes_it():
    """So that nothing is traced in vain when Keras gives its layers another attribute."""
    numbers = {
        "bin_boundaries": [1.0],
        "filters": 2,
        "kernel_size": 2,
        "units": 2,
        "rank": 2,
        "size": 2,
        "height": 2,
        "width": 2,
        "factor": 1,
    }
    numbers |= {"rate": 0.1, "pool_size": 2, "output_size": 2, "num_bins": 2, "num_tokens": 2, "input_dim": 3, "n": 2}
    numbers |= {"output_dim": 2, "head_dim": 2, "num_query_heads": 2, "num_key_value_heads": 2, "num_heads": 2}
    numbers |= {"key_dim": 2, "stddev": 0.1, "scale": 2.0, "dims": (2, 1), "target_shape": (2,), "axes": 1, "groups": 1}
    numbers |= {"equation": "ab,bc->ac", "output_shape": 2, "activation": "relu", "height_factor": 0.1, "shape": (2,)}
    numbers |= {"width_factor": 0.1, "layer": layers.LSTM(2), "cell": layers.LSTMCell(2)}
    numbers |= {"cells": [layers.GRUCell(2)]}
    plain = []
    for kind in trusted._list():
        if not issubclass(kind, layers.Layer) or issubclass(
            kind, (keras.Model, layers.TimeDistributed, layers.InputLayer)
        ):
            continue  # What is in TimeDistributed is looked at when that is built.
        layer = kind(**{name: numbers[name] for name in _needed(kind) if name in numbers})
        plain.append(trusted._holds_nothing_of_a_script(layer))
    assert len(plain) > 110
    assert all(plain)


SCORES, FLAT = tf.TensorSpec([None, 4]), tf.TensorSpec([None])


def like(spec):
    return tf.compat.v1.placeholder(spec.dtype, spec.shape)


def with_value_by_row(loss, spec):
    with tf.Graph().as_default():
        return trusted.has_value_by_row(loss, like(spec))


def adding_by_row(metric, spec):
    with tf.Graph().as_default():
        return trusted.adds_by_row(metric, like(spec))


def test_losses_and_metrics_are_trusted_along_the_last_of_several_axes_only():
    assert with_value_by_row(losses.MeanSquaredError(), SCORES)
    assert with_value_by_row(losses.CosineSimilarity(), SCORES)
    assert not with_value_by_row(losses.MeanSquaredError(), FLAT)
    assert not with_value_by_row(losses.CosineSimilarity(axis=0), SCORES)
    assert not with_value_by_row(losses.CosineSimilarity(axis=-2), SCORES)
    assert not with_value_by_row(losses.Dice(), SCORES)
    assert not with_value_by_row(type("Huber", (losses.Huber,), {})(), SCORES)
    assert adding_by_row(metrics.AUC(), FLAT)
    assert adding_by_row(metrics.MeanMetricWrapper(losses.mean_squared_error), SCORES)
    assert not adding_by_row(metrics.MeanSquaredError(), FLAT)
    assert not adding_by_row(metrics.Precision(top_k=2), FLAT)
    assert not adding_by_row(metrics.CosineSimilarity(axis=0), SCORES)
    assert not adding_by_row(metrics.PearsonCorrelation(), SCORES)

    @functools.wraps(losses.mean_squared_error)
    def named(y, p):
        return tf.reduce_max((y - p) ** 2, 0)

    assert not adding_by_row(metrics.MeanMetricWrapper(named), SCORES)
    assert not adding_by_row(metrics.MeanMetricWrapper(functools.partial(losses.cosine_similarity, axis=0)), SCORES)


def test_what_calls_a_function_by_row_in_a_loop_is_left_to_each_replica():
    for name in ("LSTM with an activation by row", "a cell by row", "TimeDistributed of a model"):
        x = keras.Input((5, 4))
        model = keras.Model(x, TRUSTED[name]()(x))
        model.compile("sgd", "mse")
        y = tf.zeros((8, *model.output.shape[1:]))
        assert not Tries(model).of(model.train_step, (tf.zeros((8, 5, 4)), y)).opened


STEPS, FEATURES = 5, 4
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(11, STEPS, FEATURES)).astype("float32")
Y = RANDOM.normal(size=(11, STEPS, 3)).astype("float32")
MIXED = {
    "Dense": lambda: [layers.Dense(3, activation=over)],
    "Softmax": lambda: [layers.Dense(3), layers.Softmax(axis=-3)],
    "TimeDistributed": lambda: [layers.Dense(3), layers.TimeDistributed(layers.Lambda(over))],
    "LSTM by row": lambda: [layers.LSTM(3, activation=own, return_sequences=True)],
    "LSTM": lambda: [layers.LSTM(3, activation=over, return_sequences=True)],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", batteries.rows(MIXED, "LSTM"))
def test_a_function_of_a_scripts_in_keras_s_layer_has_one_devices_numbers(four_devices, name):
    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((STEPS, FEATURES)), *MIXED[name]()])
            model.compile(
                keras.optimizers.SGD(0.5), losses.CosineSimilarity(axis=0), metrics=[metrics.CosineSimilarity(axis=0)]
            )
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
        history = model.fit(data, epochs=2, shuffle=False, verbose=0).history
        return np.concatenate(
            [*history.values(), *map(np.ravel, model.get_weights()), np.ravel(model.predict(data, verbose=0))]
        )

    one = trained(tf.distribute.get_strategy())
    np.testing.assert_allclose(trained(strategies.create("mirrored", devices=four_devices[:2])), one, atol=5e-6)
