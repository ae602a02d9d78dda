"""XLA compiles a step's arithmetic on each replica, the exchange stays outside, and the numbers are one device's."""

import contextlib
import sys

import batteries
import keras
import numpy as np
import pytest
import recorded
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import config, kernels

from toolkit import strategies
from toolkit.strategies.step import xla

L = keras.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(47, 16)).astype("float32")  # Of 16 at a time, 15 are left for the last: 8 and 7.
Y = RANDOM.integers(0, 10, len(X))
WEIGHT = RANDOM.uniform(0.2, 2, len(X)).astype("float32")
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
GPUS = ["/job:worker/replica:0/task:0/device:GPU:0", "/job:worker/replica:0/task:0/device:GPU:1"]


def dense(*more):
    return keras.Sequential([keras.Input((16,)), L.Dense(32, "relu"), *more, L.Dense(10, dtype="float32")])


def conv():
    layers = [L.Reshape((4, 4, 1)), L.Conv2D(4, 3, activation="relu"), L.Flatten(), L.Dense(10)]
    return keras.Sequential([keras.Input((16,)), *layers])


def words(*more):
    as_words = L.Lambda(lambda v: keras.ops.cast(keras.ops.abs(v) * 2, "int32"))
    return keras.Sequential([keras.Input((16,)), as_words, L.Embedding(40, 4, mask_zero=True), *more, L.Dense(10)])


class Own(keras.Model):
    """Clips gradients in a step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.1)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class Counting(L.Layer):
    """Counts how often it is traced."""

    traced = 0

    def call(self, x):
        type(self).traced += 1
        return 2 * x


def own():
    given = keras.Input((16,))
    return Own(given, L.Dense(10)(L.Dense(32, "tanh")(given)))


def trained(build, strategy=None, *, jit=False, optimizer=None, weights=False, policy="float32", **more):
    """What a model has learnt, evaluated and predicted, and the model."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    try:
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = build()
            made = optimizer() if optimizer else keras.optimizers.SGD(0.05, momentum=0.9)
            model.compile(made, **{"loss": CROSSENTROPY, "metrics": ["accuracy"], "jit_compile": jit} | more)
    finally:
        keras.config.set_dtype_policy("float32")
    data = tf.data.Dataset.from_tensor_slices((X, Y, WEIGHT) if weights else (X, Y)).batch(16)
    history = model.fit(
        data, validation_data=None if isinstance(model, Own) else data, epochs=2, verbose=0, shuffle=False
    )
    seen = [np.asarray(values) for values in history.history.values()]
    return model, [*seen, model.predict(X, verbose=0), *model.get_weights()]


def two(devices, **options):
    return strategies.create("mirrored", devices=devices[:2], **options)


def compiled(model):
    """The names of what XLA compiles in the graphs of a model's steps, and the types of operations in it."""
    names, types = set(), set()
    for function in _functions(model.train_function.step):
        for concrete in function._list_all_concrete_functions():
            library = {each.signature.name: each for each in concrete.graph.as_graph_def().library.function}
            pieces = [each for each in library.values() if each.attr["_XlaMustCompile"].b]
            names |= {each.signature.name.removeprefix("__inference_").rpartition("_")[0] for each in pieces}
            types |= {node.op for each in pieces for node in each.node_def}
    return names, types


def _functions(function):
    """Yields each `tf.function` among what a function has in its closure."""
    if isinstance(function, polymorphic_function.Function):
        yield function
        return
    inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for each in inner:
        if callable(each) and getattr(each, "__name__", "") in ("function", "multi_step_on_iterator"):
            yield from _functions(each)


CASES = {
    "a conv net": (conv, {}),
    "layer norm and dropout": (lambda: dense(L.LayerNormalization(), L.Dropout(0.0)), {}),
    "a masked LSTM": (lambda: words(L.LSTM(4)), {}),
    "an embedding, Adam": (lambda: words(L.Flatten()), {"optimizer": lambda: keras.optimizers.Adam(0.01)}),
    "regularised, clipped, averaged": (
        lambda: dense(L.Dense(8, kernel_regularizer="l2")),
        {"optimizer": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1, use_ema=True)},
    ),
    "sample weights": (dense, {"weights": True}),
    "mixed_float16": (dense, {"policy": "mixed_float16"}),
    "several steps in one call": (dense, {"steps_per_execution": 2}),
    "accumulated": (dense, {"optimizer": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", batteries.rows(CASES, "mixed_float16"))
def test_the_numbers_are_one_devices(four_devices, case):
    build, how = CASES[case]
    (_, one), (model, many) = trained(build, **how), trained(build, two(four_devices), jit=True, **how)
    assert compiled(model)[0] == ({"train_step"} if "accumulated" in case else {"train_step", "update"})
    near = 4e-3 if "policy" in how else 2e-6
    for expected, found in zip(one, many, strict=True):
        np.testing.assert_allclose(found, expected, atol=near, rtol=near)


SCALED = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=1024.0)  # noqa: E731
ADAM = lambda: keras.optimizers.Adam(0.01)  # noqa: E731
OPTIONS = {
    "local steps, a scaled loss": (SCALED, {"local": strategies.LocalSteps(every=2)}),
    "state in shards": (ADAM, {"optimizer_state": "sharded"}),
    "compressed": (ADAM, {"gradients": strategies.GradientExchange(compression="powersgd", start_step=2)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", batteries.rows(OPTIONS, []))
def test_options_of_the_strategy_hold(four_devices, way):
    optimizer, options = OPTIONS[way]
    plain, with_xla = (
        trained(dense, two(four_devices, **options), jit=jit, optimizer=optimizer)[1] for jit in (False, True)
    )
    for expected, found in zip(plain, with_xla, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.slow
def test_arithmetic_and_update_are_compiled_once_for_each_number_of_examples(four_devices, caplog):
    Counting.traced = 0
    model, _ = trained(lambda: dense(Counting()), two(four_devices), jit=True)
    names, types = compiled(model)
    assert names == {"train_step", "update"}
    assert "MatMul" in types
    assert not any("Collective" in each or "AddN" in each for each in types)
    traced = Counting.traced
    model.fit(X, Y, batch_size=16, epochs=1, verbose=0)
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    again = Counting.traced
    assert again - traced <= traced, "arrays are other data than a data set; no epoch is"
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    assert Counting.traced == again
    assert "without XLA" not in caplog.text


@pytest.mark.slow
def test_what_exchanges_in_the_forward_pass_is_left_out_and_named(four_devices, caplog):
    build = lambda: dense(L.BatchNormalization(synchronized=True, name="norm"))  # noqa: E731
    (_, one), (model, many) = trained(build), trained(build, two(four_devices), jit=True)
    assert compiled(model)[0] == {"update"}
    assert caplog.text.count("train_step is computed without XLA") == 1
    assert "replicas exchange something in" in caplog.text
    assert "norm" in caplog.text
    for expected, found in zip(one, many, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=2e-6)


def dice(labels, predictions):
    labels = tf.one_hot(tf.cast(labels, tf.int32), 10)
    return 1.0 - 2.0 * tf.reduce_sum(labels * predictions) / tf.reduce_sum(labels + predictions)


@pytest.mark.long
def test_a_loss_of_the_whole_batch_leaves_layers_compiled(four_devices, caplog):
    how = {"loss": dice, "metrics": None}
    (_, one), (model, many) = trained(dense, **how), trained(dense, two(four_devices), jit=True, **how)
    names, _ = compiled(model)
    assert "update" in names
    assert any("layer" in name for name in names), names
    assert "train_step is computed without XLA as a whole, but layer by layer where it can be" in caplog.text
    for expected, found in zip(one, many, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.slow
def test_a_step_of_ones_own_has_its_layers_compiled(four_devices, caplog):
    how = {"metrics": None}
    (_, one), (model, many) = trained(own, **how), trained(own, two(four_devices), jit=True, **how)
    names, _ = compiled(model)
    assert {"forward_layer", "backward_layer"} <= {each.removeprefix("__") for each in names} or "layer" in names, names
    assert "without XLA" not in caplog.text
    for expected, found in zip(one, many, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=2e-6)


def test_what_xla_cannot_compile_is_no_piece():
    doubled = tf.function(lambda x: tf.py_function(lambda values: 2 * values, [x], tf.float32))
    graph = doubled.get_concrete_function(tf.TensorSpec([3])).graph
    with pytest.raises(xla._NoPieceError, match="XLA can't compile EagerPyFunc"):
        xla._check(graph, differentiated=False)


@pytest.mark.parametrize(
    ("devices", "hosts", "chosen"),
    [
        (GPUS, [], True),
        (GPUS, ["here", "here"], True),
        (GPUS[:1], ["here", "there"], False),
        (["CPU:0", "CPU:1"], [], False),
        ([GPUS[0], "CPU:0"], [], False),
    ],
)
def test_auto_is_xla_where_all_replicas_are_gpus_of_one_host(devices, hosts, chosen):
    assert xla.chooses(devices, hosts) is chosen


@pytest.mark.parametrize(("name", "replicas"), [("one_device", 1), ("mirrored", 1), ("mirrored", 2)])
def test_auto_is_as_keras_has_it_without_a_strategy(four_devices, monkeypatch, name, replicas):
    made = strategies.create(name, devices=four_devices[:replicas])

    def choice(given="auto"):
        model = dense()
        model.compile("sgd", "mse", jit_compile=given)
        return model.jit_compile

    with made.scope():
        assert [choice(), choice(True), choice(False)] == [False, True, False]
    gpus = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: gpus)
    assert choice()
    with made.scope():
        assert [choice(), choice(False)] == [replicas == 1, False]
    monkeypatch.setattr(config, "is_op_determinism_enabled", lambda: True)
    with made.scope():
        assert not choice()


BUILD = {"version": "2.21.0", "cuda_version": "12.5.1", "cuda_compute_capabilities": ["sm_60", "sm_80", "compute_90"]}


@pytest.mark.parametrize(
    ("cards", "hosts", "chosen", "reason"),
    [
        ([recorded.A100, recorded.H200], [], True, ""),
        ([recorded.RTX_5090, recorded.H200], [], False, "GPU 0 (NVIDIA GeForce RTX 5090, compute capability 12.0): "),
        ([recorded.H200, recorded.A100, recorded.RTX_5090], [], True, ""),  # The third is nobody's.
        ([recorded.H200, recorded.A100, recorded.RTX_5090], ["here", "here"], False, "GPU 2 ("),
        ([recorded.LAPTOP, recorded.A100], [], True, ""),  # It doesn't say its capability.
        ([{**recorded.LAPTOP, "capability": [5, 0]}, recorded.A100], ["here", "here"], True, ""),
        ([], [], True, ""),  # A GPU that isn't NVIDIA's.
    ],
)
def test_auto_is_not_xla_where_it_cannot_compile_for_a_card(
    four_devices, monkeypatch, caplog, cards, hosts, chosen, reason
):
    monkeypatch.setitem(sys.modules, "pynvml", recorded.nvml(*cards))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU") for number in range(len(cards) or 2)]
    made = two(four_devices)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: gpus)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda *_: gpus)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda _: None)
    monkeypatch.setattr(xla, "_places", lambda _: (GPUS, hosts))
    monkeypatch.setattr(xla, "build_info", lambda: BUILD)
    xla._warn.cache_clear()
    with made.scope():
        for _ in range(2):
            model = dense()
            model.compile("sgd", "mse")
            assert model.jit_compile is chosen
        model.compile("sgd", "mse", jit_compile=True)
        assert model.jit_compile is True
    messages = [record.getMessage() for record in caplog.records if "XLA" in record.getMessage()]
    assert len(messages) == (not chosen)
    assert all(reason in message and "can't compile for it" in message for message in messages)


def test_tensorflow_lists_what_xla_can_compile():
    assert callable(kernels.get_registered_kernels_for_op)
    assert xla._compilable("MatMul")
    assert not xla._compilable("EagerPyFunc")


@pytest.mark.slow
@pytest.mark.parametrize(("jit", "times"), [(True, 1), (False, 0)])
def test_a_long_first_step_is_said(four_devices, monkeypatch, caplog, jit, times):
    caplog.set_level("INFO")
    monkeypatch.setattr(xla, "_LONG", -1.0)
    with two(four_devices).scope():
        model = dense()
        model.compile("sgd", CROSSENTROPY, jit_compile=jit)
    for _ in range(2):
        model.fit(X, Y, batch_size=16, verbose=0)
    assert caplog.text.count("The first step took") == times
