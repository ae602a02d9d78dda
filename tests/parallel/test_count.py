"""Counted operations against TensorFlow's own profiler, and what can't be counted."""

import dataclasses

import batteries
import keras
import pytest
import tensorflow as tf

from toolkit import models
from toolkit.errors import ModelError
from toolkit.parallel import Setting, costs
from toolkit.parallel.plan.step_cost import REPLICATED, exchanges

L = keras.layers


def profiled(function, *shapes):
    graph = tf.function(function).get_concrete_function(*[tf.TensorSpec(shape, tf.float32) for shape in shapes]).graph
    options = tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
    options["output"] = "none"
    return tf.compat.v1.profiler.profile(graph, options=options).total_float_ops


def by_name(model):
    return {cost.name: cost for cost in costs(model)}


LAYERS = {
    "dense": (L.Dense(7), (5,)),
    "dense of rows": (L.Dense(7), (3, 5)),
    "conv1d": (L.Conv1D(6, 3), (10, 4)),
    "conv": (L.Conv2D(6, 3, strides=2), (11, 9, 4)),
    "conv, transposed": (L.Conv2DTranspose(6, 3, strides=2, padding="same"), (8, 8, 4)),
    "depthwise": (L.DepthwiseConv2D(3, depth_multiplier=2), (8, 8, 4)),
    "separable": (L.SeparableConv2D(6, 3), (8, 8, 4)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_operations_are_those_that_tensorflow_counts(kind):
    layer, shape = LAYERS[kind]
    model = keras.Sequential([keras.Input(shape), layer])
    (cost,) = costs(model)
    assert cost.forward == pytest.approx(profiled(model, (1, *shape)), rel=0.01)


def test_what_the_profiler_counts_otherwise():
    # It sees nothing of groups, which Keras compiles, and counts what dilation leaves out.
    grouped = keras.Sequential([keras.Input((8, 8, 4)), L.Conv2D(6, 3, padding="same", groups=2, use_bias=False)])
    dilated = keras.Sequential([keras.Input((11, 9, 4)), L.Conv2D(6, 3, dilation_rate=2, use_bias=False)])
    assert costs(grouped)[0].forward == 2 * (8 * 8 * 6) * (3 * 3 * 2)
    assert costs(dilated)[0].forward == 2 * (7 * 5 * 6) * (3 * 3 * 4)


def test_backward_of_a_network_is_what_tensorflow_counts():
    settings = {"padding": "same", "use_bias": False}
    convolutions = [L.Conv2D(8, 3, **settings), L.Conv2D(16, 3, **settings)]
    dense = [L.Dense(32, use_bias=False), L.Dense(10, use_bias=False)]
    model = keras.Sequential([keras.Input((16, 16, 3)), *convolutions, L.Flatten(), *dense])

    def train(x):
        with tf.GradientTape() as tape:
            y = model(x)
        return tape.gradient(y, [variable.value for variable in model.trainable_variables])

    found = costs(model)
    # The graph also has the gradient of the pictures, which nobody reads, and which isn't run.
    unread = found[0].forward
    counted = sum(cost.operations for cost in found) + unread
    assert counted == pytest.approx(profiled(train, (1, 16, 16, 3)), rel=0.01)


def test_the_first_trained_layer_passes_no_gradient_on():
    found = by_name(models.build("small_cnn"))
    assert found["trunk/conv1"].backward == found["trunk/conv1"].forward
    assert found["trunk/conv2"].backward == 2 * found["trunk/conv2"].forward
    assert not found["trunk/conv1"].passes_gradient


def test_parameters_are_all_of_the_models():
    model = models.build("alexnet")
    assert sum(cost.parameters + cost.state for cost in costs(model)) == model.count_params()


def test_a_layer_that_can_take_split_features_is_found_across_models_within():
    found = by_name(models.build("alexnet", dropout=0.5))
    assert found["head/fc2"].takes_split_from == "head/fc1"
    assert found["head/fc1"].takes_split_from is None
    # Softmax needs all of the features.
    plain = [keras.Input((4,)), L.Dense(8, name="a"), L.Softmax(), L.Dense(3, name="b")]
    assert by_name(keras.Sequential(plain))["b"].takes_split_from is None
    # Somebody else reads them.
    inputs = keras.Input((4,))
    a = L.Dense(8, name="a")(inputs)
    model = keras.Model(inputs, L.Add()([L.Dense(8, name="b")(a), a]))
    assert by_name(model)["b"].takes_split_from is None
    assert by_name(keras.Model(inputs, [a, L.Dense(8, name="b")(a)]))["b"].takes_split_from is None


class Odd(L.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],))

    def call(self, x):
        return x * self.scale


class Conv2D(L.Conv2D):
    """One's own, of a known name."""


class Looped(L.Layer):
    def call(self, x):
        return tf.while_loop(lambda n, _: n < 3, lambda n, y: (n + 1, 2 * y), [0, x])[1]


class Hidden(L.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(lambda y: 2 * y, [x], tf.float32), x.shape)


def test_layers_of_ones_own_are_counted_as_keras_own_are():
    settings = {"kernel_initializer": "zeros", "padding": "same"}
    parts = [keras.Input((8, 8, 3)), Conv2D(4, 3, name="mine", **settings), L.Conv2D(4, 3, name="keras", **settings)]
    found = by_name(keras.Sequential([*parts, L.Lambda(lambda x: 2 * x, name="function"), Odd(name="odd")]))
    assert found["mine"].forward == 2 * 8 * 8 * 4 * 27 + 8 * 8 * 4
    assert found["keras"].forward == 2 * 8 * 8 * 4 * 36 + 8 * 8 * 4
    assert not found["mine"].splits
    assert "can't be split" in found["mine"].note
    assert (found["function"].forward, found["function"].backward) == (8 * 8 * 4, 8 * 8 * 4)
    assert found["odd"].parameters == 4
    assert found["odd"].forward == 8 * 8 * 4


@pytest.mark.parametrize("kind", [Looped, Hidden])
def test_what_the_graph_does_not_show_is_not_guessed(kind):
    found = by_name(keras.Sequential([keras.Input((4,)), L.Dense(4), kind(name="hidden")]))
    assert found["hidden"].operations is None
    assert "isn't known" in found["hidden"].note


def test_recurrent_layers_are_counted_by_formula():
    found = by_name(keras.Sequential([keras.Input((5, 3)), L.Bidirectional(L.LSTM(8), name="both"), L.Dense(2)]))
    assert found["both"].forward == 2 * (2 * 5 * 4 * 8 * (3 + 8))
    assert found["both"].parameters == 2 * 4 * 8 * (3 + 8 + 1)
    cells = L.RNN([L.LSTMCell(4), L.GRUCell(4)])
    unknown = by_name(keras.Sequential([keras.Input((5, 3)), L.Bidirectional(cells, name="stacked")]))
    assert unknown["stacked"].operations is None


# Of one picture of 224 pixels: weights and, in G, multiply-adds. Keras's table of applications has the weights;
# multiply-adds: Simonyan and Zisserman by count (15.47), He et al. 3.8 (3.86 with stride in the first 1 x 1),
# Sandler et al. 0.30, Tan and Le 0.39.
PUBLISHED = {
    "VGG16": (138_357_544, 15.47),
    "ResNet50": (25_636_712, 3.86),
    "MobileNetV2": (3_538_984, 0.30),
    "EfficientNetB0": (5_330_571, 0.386),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", batteries.rows(PUBLISHED, "MobileNetV2"))
def test_totals_are_those_of_published_tables(name):
    found = costs(getattr(keras.applications, name)(weights=None))
    weights, multiply_adds = PUBLISHED[name]
    assert sum(cost.parameters + cost.state for cost in found) == weights
    assert sum(cost.multiply_adds for cost in found) / 1e9 == pytest.approx(multiply_adds, rel=0.01)
    assert all(cost.operations is not None for cost in found)


def test_a_layer_that_is_called_twice_is_said():
    inputs = keras.Input((8,))
    shared = L.Dense(8, name="shared")
    found = by_name(keras.Model(inputs, shared(shared(inputs))))
    assert not found["shared"].splits
    assert "several times" in found["shared"].note
    assert found["shared"].multiply_adds == 2 * 64


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = [L.Dense(3, activation="relu", name="one"), L.Dense(2, name="two")]

    def call(self, x):
        return self.dense[1](self.dense[0](x)) + 1.0


def subclassed():
    model = Subclassed()
    model(tf.zeros([1, 2]))
    return model


def test_a_model_joined_in_python_is_counted_as_one_of_a_graph():
    found, same = by_name(subclassed()), keras.Sequential([keras.Input((2,)), *subclassed().dense])
    for cost in costs(same):
        # What "two" returns isn't the model's result there.
        memory = {name: getattr(cost, name) for name in ("kept", "inside", "passed", "working")}
        assert dataclasses.replace(found[cost.name], **memory) == cost
    assert found["two"].takes_split_from == "one"
    assert next(found[name] for name in found if name.startswith("subclassed")).forward == 2, (
        "what it computes by itself"
    )


class Penalty(L.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x**2))
        return x


def test_a_model_is_left_as_it_is():
    dense = L.Dense(8, activity_regularizer="l2")
    model = keras.Sequential([keras.Input((4,)), dense, Penalty(), L.BatchNormalization(), L.Dropout(0.5)])
    before = [weight.copy() for weight in model.get_weights()]
    costs(model)
    assert model.losses == []
    assert all((mine == was).all() for mine, was in zip(model.get_weights(), before, strict=True))


class Several(keras.Model):
    def __init__(self):
        super().__init__()
        self.one, self.other = L.Dense(3, name="one"), L.Dense(3, name="other")

    def call(self, a, b=None):
        return self.one(a) + self.other(b)


class Named(Several):
    def build(self, a_shape, b_shape):
        self.one.build(a_shape)
        self.other.build(b_shape)


class InList(Several):
    def call(self, x):
        return super().call(*x)


class InDict(Several):
    def call(self, x):
        return super().call(x["a"], x["b"])


def test_a_model_joined_in_python_is_called_as_it_was_before():
    a, b = tf.zeros([1, 2]), tf.zeros([1, 5])
    named, in_list, in_dict = Named(), InList(), InDict()
    named(a, b=b)
    in_list([a, b])
    in_dict({"a": a, "b": b})
    for model in (named, in_list, in_dict):
        found = by_name(model)
        assert (found["one"].multiply_adds, found["other"].multiply_adds) == (6, 15)
    several = Several()
    several(a, b=b)
    with pytest.raises(ModelError, match="fails: .* for layer 'other'"):  # Keras remembers nothing of b.
        costs(several)


class Raises(keras.Model):
    def build(self, shape):
        self.built = True

    def call(self, x):
        raise ValueError("not today")


def raising():
    model = Raises(name="mine")
    model.build((None, 3))
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: keras.Sequential([L.Dense(3)]), "it isn't built"),
        (raising, "'mine' .* the call fails: not today"),
        (lambda: 5, "this is a int"),
    ],
)
def test_a_model_that_cannot_be_counted_is_refused(model, says):
    with pytest.raises(ModelError, match=says):
        costs(model())


@pytest.mark.parametrize(
    ("settings", "statistics", "counted"),
    [
        ({}, "batch", 2),
        ({}, "replica", 0),
        ({"synchronized": True}, "replica", 2),
        ({"trainable": False}, "batch", 0),
    ],
)
def test_what_a_normalisation_exchanges(settings, statistics, counted):
    (cost,) = costs(keras.Sequential([keras.Input((8, 8, 5)), L.BatchNormalization(**settings)]))
    setting = Setting(replicas=2, global_batch=8, batch_statistics=statistics)
    found = [each for each in exchanges(cost, REPLICATED, setting) if each.kind == "activations"]
    assert [each.received for each in found] == [8 * (2 * 5 + 1)] * counted, "float64, a message each way"
