"""Counted operations against TensorFlow's own profiler, and what can't be counted."""

import keras
import pytest
import tensorflow as tf

from toolkit import models
from toolkit.errors import ModelError
from toolkit.parallel import costs

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


def test_what_a_layer_of_ones_own_computes_is_not_guessed():
    parts = [keras.Input((8, 8, 3)), Conv2D(4, 3, name="mine"), L.Lambda(lambda x: 2 * x, name="function")]
    found = by_name(keras.Sequential([*parts, Odd(name="odd"), L.Flatten(), L.Dense(2)]))
    for name in ("mine", "function", "odd"):
        assert found[name].operations is None
        assert "isn't known" in found[name].note
    assert found["odd"].parameters == 4


def test_a_layer_that_is_called_twice_is_said():
    inputs = keras.Input((8,))
    shared = L.Dense(8, name="shared")
    found = by_name(keras.Model(inputs, shared(shared(inputs))))
    assert found["shared"].units == 0
    assert "several times" in found["shared"].note


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = L.Dense(3)

    def call(self, x):
        return self.dense(x)


def subclassed():
    model = Subclassed()
    model(tf.zeros([1, 2]))
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: keras.Sequential([L.Dense(3)]), "it isn't built"),
        (subclassed, "stands in its code only"),
        (lambda: 5, "this is a int"),
    ],
)
def test_a_model_that_cannot_be_counted_is_refused(model, says):
    with pytest.raises(ModelError, match=says):
        costs(model())
