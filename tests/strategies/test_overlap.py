"""Which exchanges travel together, and what waits for what in the graph of a step."""

import keras
import numpy as np
import processes
import pytest
import tensorflow as tf

from toolkit.strategies.step import overlap


@pytest.mark.parametrize(
    ("sizes", "limit", "packs"),
    [
        ([], 8, []),
        ([1, 2, 3], 0, [[0, 1, 2]]),
        ([1, 2, 3], 100, [[0, 1, 2]]),
        ([5, 5, 5], 8, [[0, 1], [2]]),
        ([1, 9, 1, 9], 8, [[1], [3], [0, 2]]),  # The large ones don't wait, and nobody waits for them.
        ([8], 8, [[0]]),
    ],
)
def test_tensors_are_packed_in_the_order_in_which_they_are_known(sizes, limit, packs):
    assert overlap.packed(sizes, limit) == packs


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("asked", [0, 1])
def test_one_core_has_two_threads_unless_someone_said_how_many(monkeypatch, cores, asked):
    said = []
    monkeypatch.delenv("TF_NUM_INTEROP_THREADS", raising=False)
    monkeypatch.setattr(overlap.os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: asked)
    monkeypatch.setattr(tf.config.threading, "set_inter_op_parallelism_threads", said.append)
    overlap.let_exchanges_begin()
    assert said == ([2] if (cores, asked) == (1, 0) else [])


def test_threads_asked_for_by_the_environment_are_kept(monkeypatch):
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "1")
    monkeypatch.setattr(overlap.os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr(tf.config.threading, "set_inter_op_parallelism_threads", lambda _: pytest.fail("set"))
    overlap.let_exchanges_begin()


ALONE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import tensorflow as tf
import toolkit
os.environ["TF_CONFIG"] = '{"cluster": {"worker": ["127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}'
toolkit.strategies.create("multi_worker", local=LOCAL)
print("THREADS", tf.config.threading.get_inter_op_parallelism_threads())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("local", "threads"), [("None", 2), ("toolkit.strategies.LocalSteps(every=4)", 0)])
def test_one_core_has_two_threads_only_where_each_step_exchanges(tmp_path, local, threads):
    (tmp_path / "alone.py").write_text(ALONE.replace("LOCAL", local))
    ended = processes.python(tmp_path, "alone.py", limit=60)
    assert f"THREADS {threads}\n" in ended.stdout, ended.stdout + ended.stderr


def network(kind):
    inputs = keras.Input((8, 8, 3) if kind != "attention" else (8, 6))
    if kind == "dense":
        x = keras.layers.Dense(4)(keras.layers.Dense(5, activation="relu")(keras.layers.Flatten()(inputs)))
    elif kind == "conv":
        x = keras.layers.Conv2D(5, 3, activation="relu")(keras.layers.Conv2D(4, 3)(inputs))
    else:
        x = keras.layers.MultiHeadAttention(2, 3)(
            keras.layers.LayerNormalization()(keras.layers.Dense(6)(inputs)), inputs
        )
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x)))


def traced(model, *, ordered):
    """Returns gradients of a model as a function of its inputs, and the function's graph."""

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        found = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        if ordered:
            overlap.weights_first([*found, tf.constant(1.0)])
        return found

    concrete = gradients.get_concrete_function(tf.TensorSpec((2, *model.input_shape[1:])))
    return concrete, concrete.graph


@pytest.mark.parametrize("kind", ["dense", "conv", "attention"])
def test_a_weights_gradient_goes_before_its_inputs_with_the_same_numbers(kind):
    keras.utils.set_random_seed(1)
    model = network(kind)
    x = tf.random.stateless_normal((2, *model.input_shape[1:]), (1, 2))
    (plain, before), (ordered, after) = (traced(model, ordered=ordered) for ordered in (False, True))
    waits = {each.name: {one.name for one in each.control_inputs} for each in after.get_operations()}
    new = {
        (each.name, one)
        for each in before.get_operations()
        for one in waits[each.name] - {same.name for same in each.control_inputs}
    }
    assert new, "nothing waits for a weight's gradient"
    for one, other in zip(plain(x), ordered(x), strict=True):
        np.testing.assert_array_equal(one, other)
    # Every layer but the first has a gradient of its input, which waits for that of its weights.
    later = {name for name, _ in new}
    kinds = {"dense": "MatMul", "conv": "Conv2DBackpropInput", "attention": "BatchMatMulV2"}
    assert any(after.get_operation_by_name(name).type == kinds[kind] for name in later)


def test_constants_of_an_outer_function_are_left_alone():
    x = tf.ones((2, 3))
    weight = tf.Variable(tf.ones((3, 3)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.matmul(x, weight))
    eager = tape.gradient(loss, weight)

    @tf.function
    def outer():
        overlap.weights_first([eager, tf.linalg.matmul(eager, eager)])
        return eager + 1.0

    np.testing.assert_array_equal(outer(), np.full((3, 3), 3.0))
    overlap.weights_first([eager])  # Outside of any graph there is no order.


@pytest.mark.parametrize("kept", [True, False])
def test_what_has_a_state_keeps_its_order(monkeypatch, kept):
    """A variable that is assigned and then scales the gradients: TensorFlow orders both when the trace ends."""
    if not kept:
        monkeypatch.setattr(overlap, "_stateful_before", lambda _: {})
    keras.utils.set_random_seed(1)
    model, scale = network("dense"), tf.Variable(0.0)

    def step(x, *, ordered):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        found = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        scale.assign(0.9 * scale + 0.1 * loss)
        found = [gradient / (1.0 + scale) for gradient in found]
        if ordered:
            overlap.weights_first(found)
        return found

    x = tf.random.stateless_normal((2, *model.input_shape[1:]), (1, 2))
    if not kept:
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="cycle"):
            tf.function(step)(x, ordered=True)
        return
    seen = []
    for ordered in (False, True):
        scale.assign(0.0)
        seen.append([gradient.numpy() for gradient in tf.function(step)(x, ordered=ordered)])
    for one, other in zip(*seen, strict=True):
        np.testing.assert_array_equal(one, other)
