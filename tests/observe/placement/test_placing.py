"""Layers on devices of their own, outside of a strategy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import models
from toolkit.errors import DeviceError, ModelError, StrategyError
from toolkit.observe.placement import device, observe, place


def model():
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(16, activation="relu", name="first"), keras.layers.Dense(4, name="second")]
    return keras.Sequential([keras.Input((8,)), *layers])


X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")


def test_weights_and_their_operations_are_where_the_rule_says(four_devices):
    plain = model()
    placed = place(plain, {"second": "CPU:2"})
    assert [v.value.device[-5:] for v in placed.weights] == ["CPU:0", "CPU:0", "CPU:2", "CPU:2"]
    seen = observe(placed, tf.constant(X)).operations
    for layer, where in (("/first", "CPU:0"), ("/second", "CPU:2")):
        assert {each.ran[-5:] for each in seen if each.ran and layer in each.name} == {where}
    np.testing.assert_array_equal(placed.predict(X, verbose=0), plain.predict(X, verbose=0))


@pytest.mark.slow
def test_training_is_that_of_the_plain_model_and_slots_lie_beside_their_weights(four_devices):
    plain = model()
    placed = place(plain, lambda layer: {"first": "CPU:3", "second": "/CPU:1"}[layer.name])
    for each in (plain, placed):
        each.compile("adam", "mse")
        each.fit(X, X[:, :4], batch_size=8, epochs=2, shuffle=False, verbose=0)
    for mine, theirs in zip(placed.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
    slots = [v.value.device[-5:] for v in placed.optimizer.variables if "kernel" in v.path]
    assert sorted(slots) == ["CPU:1", "CPU:1", "CPU:3", "CPU:3"]


def test_it_is_saved_as_the_plain_model(four_devices, tmp_path):
    placed = place(model(), {"second": "CPU:2"})
    placed.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict(X, verbose=0), placed.predict(X, verbose=0))


def test_a_model_within_is_placed_as_one_layer(four_devices):
    placed = place(models.build("small_cnn"), {"head": "CPU:1"})
    head = placed.get_layer("head")
    assert {v.value.device[-5:] for v in head.weights} == {"CPU:1"}
    assert {v.value.device[-5:] for v in placed.get_layer("trunk").weights} == {"CPU:0"}


def test_a_device_that_is_not_there_is_answered_with_those_that_are(four_devices):
    with pytest.raises(DeviceError, match="'GPU:3', but the logical devices of this process are CPU:0, CPU:1, CPU:2, "):
        place(model(), {"second": "GPU:3"})
    assert device("cpu:1") == device("/device:CPU:1") == "/device:CPU:1"


def test_a_layer_that_is_not_there(four_devices):
    with pytest.raises(ModelError, match="the layers of .* are first, second. Did you mean first"):
        place(model(), {"frist": "CPU:1"})


def test_models_that_cannot_be_taken_apart(four_devices):
    class Own(keras.Model):
        def call(self, x):
            return x

    own = Own()
    own(X)
    with pytest.raises(ModelError, match="neither functional nor Sequential"):
        place(own, {})
    with pytest.raises(ModelError, match="isn't built"):
        place(keras.Sequential([keras.layers.Dense(2)]), {})


def test_what_was_adapted_stays_so(four_devices):
    normalization = keras.layers.Normalization(name="n")
    normalization.adapt(np.arange(12.0).reshape(4, 3))
    plain = keras.Sequential([keras.Input((3,)), normalization, keras.layers.Dense(1, name="d")])
    given = np.ones((2, 3), np.float32)
    for rule in ({"d": "CPU:1"}, {"n": "CPU:2"}):
        np.testing.assert_array_equal(place(plain, rule)(given), plain(given))


def test_compile_keeps_xla_away_where_keras_would_choose_it(four_devices, monkeypatch):
    placed = place(model(), {"second": "CPU:2"})
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: [gpu])
    placed.compile("adam", "mse")
    assert not placed.jit_compile
    with pytest.raises(ModelError, match="XLA compiles for one device"):
        placed.compile("adam", "mse", jit_compile=True)
    placed.compile(optimizer=None, loss="mse")


@pytest.mark.slow
def test_slots_lie_beside_their_weights_under_loss_scaling_too(four_devices):
    placed = place(model(), {"second": "CPU:2"})
    placed.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
    placed.fit(X, X[:, :4], batch_size=16, verbose=0)
    slots = [v.value.device[-5:] for v in placed.optimizer.inner_optimizer.variables if "kernel" in v.path]
    assert sorted(slots) == ["CPU:0", "CPU:0", "CPU:2", "CPU:2"]


@pytest.mark.parametrize("rule", ["CPU:1", None, 5])
def test_rules_that_are_none(four_devices, rule):
    with pytest.raises(ModelError, match="it gives a device for no layer"):
        place(model(), rule)


@pytest.mark.parametrize("name", ["0", ":0", "CPU", 1, "GPU:0:1"])
def test_devices_that_are_none(four_devices, name):
    with pytest.raises(DeviceError, match="the logical devices of this process are"):
        place(model(), {"second": name})


def test_not_under_a_strategy(four_devices):
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope(), pytest.raises(StrategyError, match="parallelize"):
        place(model(), {})
