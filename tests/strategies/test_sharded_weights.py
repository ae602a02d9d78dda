"""Fully sharded weights: the numbers of one device, with a part of each weight on each replica."""

import contextlib
import importlib.util
import pathlib
import shutil

import batteries
import keras
import numpy as np
import pytest
import tensorflow as tf

import toolkit
from toolkit import strategies
from toolkit.errors import StrategyError
from toolkit.strategies.mesh import layout_of

PROGRAM = pathlib.Path(__file__).parents[1] / "multiprocess" / "sharded_weights.py"
specification = importlib.util.spec_from_file_location("sharded_weights_program", PROGRAM)
program = importlib.util.module_from_spec(specification)
specification.loader.exec_module(program)


def create(devices, **more):
    return strategies.create("mirrored", devices=devices, **{"weights": "sharded", **more})


_ALONE = {}


def alone(case):
    if case not in _ALONE:
        _ALONE[case] = program.found(*program.trained(tf.distribute.get_strategy(), case))
    return _ALONE[case]


def same(case, found, tolerance=1e-10):
    wanted = alone(case)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=tolerance, atol=tolerance, err_msg=f"{case} {key}")


HARDEST = ("own/adamw", "gan/adamw", "int8/each")
FROZEN = ("lora", "int8")
CASES = [f"{each}/{optimizer}" for each in program.MODELS if each not in FROZEN for optimizer in ("sgd", "adamw")]
CASES += [f"dense/{optimizer}" for optimizer in ("each", "accumulating", "lamb")] + ["lora/each", "int8/each"]


@pytest.mark.slow
@pytest.mark.parametrize("case", batteries.rows(CASES, list(HARDEST)))
def test_a_model_has_one_devices_numbers(four_devices, case):
    model, seen, after = program.trained(create(four_devices[:2]), case)
    assert len(seen) == 20
    if case.startswith("int8"):
        largest = [max(layer.weights, key=lambda each: np.prod(each.shape)) for layer in model.layers[1:4]]
        assert all(layout_of(each).used_whole for each in largest)
        assert [each.shards[0].dtype for each in largest] == [tf.float64, tf.int8, tf.int8]
    else:
        assert any(layout_of(each).used_whole for each in model.trainable_variables)
    same(case, program.found(model, seen, after), 1e-5 if case.startswith(FROZEN) else 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("case", batteries.rows(["dense/adamw", "vit/adamw"], "dense/adamw"))
def test_four_replicas_and_two_groups_of_two_have_one_devices_numbers(four_devices, case):
    for shards in (None, 2):
        model, seen, after = program.trained(create(four_devices, shards=shards), case)
        (weight, *_) = [each for each in model.trainable_variables if layout_of(each).used_whole]
        elements = int(np.prod(weight.shape))
        assert [shard.shape for shard in weight.shards] == [(-(-elements // (shards or 4)),)] * 4
        same(case, program.found(model, seen, after))


@pytest.mark.slow
@pytest.mark.long
def test_a_step_that_runs_without_a_graph_has_one_devices_numbers(four_devices):
    same("dense/adamw", program.found(*program.trained(create(four_devices[:2]), "dense/adamw", run_eagerly=True)))


@pytest.mark.slow
@pytest.mark.long
def test_several_steps_in_one_call_and_xla_have_one_devices_numbers(four_devices):
    for compiling in ({"steps_per_execution": 5}, {"jit_compile": True}):  # With XLA, dropout draws other numbers.
        one, many = (
            program.found(*program.trained(strategy, "dense/adamw", **compiling))
            for strategy in (tf.distribute.get_strategy(), create(four_devices[:2]))
        )
        for key in sorted(many)[1:]:  # Of several steps in one call, the logs are those of the last.
            np.testing.assert_allclose(many[key], one[key], rtol=1e-9, atol=1e-10, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_mixed_precision_gathers_16_bits_and_has_replicated_weights_numbers(four_devices, scaled):
    def trained(**more):
        keras.utils.set_random_seed(1)
        strategy = strategies.create("mirrored", devices=four_devices[:2], **more)
        keras.config.set_dtype_policy("mixed_float16" if scaled else "mixed_bfloat16")
        try:
            with strategy.scope():
                layers = [keras.layers.Dense(64, activation="relu") for _ in range(3)]
                model = keras.Sequential([keras.Input((48,)), *layers, keras.layers.Dense(4, dtype="float32")])
                optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
                if scaled:
                    optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**26)
                model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        finally:
            keras.config.set_dtype_policy("float32")
        history = model.fit(program.VECTORS, program.LABELS, batch_size=8, epochs=3, shuffle=False, verbose=0)
        return [np.array(history.history["loss"]), *model.get_weights()], model.optimizer

    (wanted, one), (found, many) = trained(), trained(weights="sharded")
    for first, second in zip(found, wanted, strict=True):
        np.testing.assert_allclose(first, second, rtol=2e-3, atol=2e-4)
    if scaled:  # Some steps have overflowed, and were left out by all replicas.
        assert int(one.iterations.numpy()) == int(many.iterations.numpy()) < 15


@pytest.mark.slow
def test_gradients_of_shards_that_a_loop_of_ones_own_changes_are_refused(four_devices):
    strategy = create(four_devices[:2])
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((48,)), keras.layers.Dense(64), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    x = tf.constant(program.VECTORS[:8], tf.float32)

    def step(change):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x[:4]) ** 2) / 8.0
        optimizer.apply(change(tape.gradient(loss, model.trainable_variables)), model.trainable_variables)

    def clip_first(gradients):
        gathered = strategies.batch_gradients(gradients, model.trainable_variables)
        assert gathered[0].shape == (48, 64)
        return tf.clip_by_global_norm(gathered, 0.5)[0]

    before = model.get_weights()
    tf.function(lambda: strategy.run(step, args=(clip_first,)))()
    moved = np.sqrt(sum(np.sum((new - old) ** 2) for new, old in zip(model.get_weights(), before, strict=True)))
    assert moved == pytest.approx(0.1 * 0.5, rel=1e-4)

    def double(gradients):
        return [2 * each for each in gradients]

    with pytest.raises(StrategyError, match="each replica has a shard, but it was changed.*batch_gradients"):
        tf.function(lambda: strategy.run(step, args=(double,)), autograph=False)()


@pytest.mark.slow
def test_what_a_weight_reads_as_is_the_whole_everywhere(four_devices):
    strategy = create(four_devices)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(51, name="it")])
    kernel = model.get_layer("it").kernel
    keras.utils.set_random_seed(1)
    plain = keras.Sequential([keras.Input((50,)), keras.layers.Dense(51, name="it")])
    assert np.array_equal(plain.get_weights()[0], kernel.numpy())  # One device's initial value.
    assert kernel.shards[0].shape == (638,)
    x = np.eye(50, dtype="float32")
    np.testing.assert_allclose(model(x), plain(x), rtol=1e-6)
    values = strategy.experimental_local_results(strategy.run(lambda: kernel * 1.0))
    assert all(np.array_equal(each, kernel.numpy()) for each in values)
    model.set_weights([each + 1 for each in plain.get_weights()])
    np.testing.assert_allclose(model(x), plain(x) + 2.0, rtol=1e-5)
    strategy.run(lambda: kernel.assign(kernel * 2.0))
    np.testing.assert_allclose(kernel.numpy(), 2 * (plain.get_weights()[0] + 1), rtol=1e-6)


def test_no_variable_holds_a_whole_weight_while_a_layer_is_made(four_devices):
    shapes = []

    def noting(next_creator, **kwargs):
        variable = next_creator(**kwargs)
        shapes.append(tuple(variable.shape))
        return variable

    with tf.variable_creator_scope(noting), create(four_devices).scope():
        keras.layers.Dense(51).build((None, 50))
    assert (638,) in shapes
    assert (50, 51) not in shapes


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"weights": "sharded"}, {"weights": "replicated"}])
def test_a_layer_that_was_made_frozen_trains_when_it_no_longer_is(four_devices, how):
    x = np.random.default_rng(0).normal(size=(24, 50))

    def trained(scope):
        keras.utils.set_random_seed(1)
        with scope:
            layers = [keras.layers.Dense(51, trainable=False), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((50,)), *layers])
            before = layers[0].kernel.numpy()
            layers[0].trainable = True
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0)
        return before, layers[0].kernel.numpy()

    (_, wanted), (before, found) = trained(contextlib.nullcontext()), trained(create(four_devices, **how).scope())
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert np.abs(found - before).max() > 1e-3


def test_an_initial_value_is_one_devices_by_keras_initializers_and_by_ones_own(four_devices):
    draws = keras.random.SeedGenerator(3)
    initializers = {
        **{name: name for name in ("random_uniform", "truncated_normal", "he_normal", "lecun_uniform", "orthogonal")},
        "seeded": keras.initializers.RandomNormal(seed=7),
        "with a state": keras.initializers.RandomNormal(seed=draws),
        "a function": lambda shape, dtype: tf.random.uniform(shape, dtype=dtype),
        "zeros": "zeros",
    }

    def values(scope):
        keras.utils.set_random_seed(1)
        draws.state.assign([3, 0])
        with scope:
            layers = [keras.layers.Dense(51, kernel_initializer=each) for each in initializers.values()]
            for layer in layers:
                layer.build((None, 50))
        return [layer.kernel.numpy() for layer in layers]

    wanted, found = values(contextlib.nullcontext()), values(create(four_devices).scope())
    for name, one, other in zip(initializers, wanted, found, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


@pytest.mark.parametrize(
    ("more", "found"),
    [({"weights": "all"}, "weights='all'"), ({"local": strategies.LocalSteps(every=4)}, "weights='sharded'")],
)
def test_what_goes_with_no_weights_in_shards_is_refused(four_devices, more, found):
    with pytest.raises(StrategyError, match=found):
        strategies.create("mirrored", devices=four_devices, **{"weights": "sharded", **more})


def test_a_message_says_once_how_much_is_in_shards(four_devices, caplog):
    with create(four_devices).scope():
        layers = [keras.layers.Embedding(100, 64), keras.layers.Flatten(), keras.layers.Dense(64)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile("sgd", "mse")
    with caplog.at_level("INFO"):
        for _ in range(2):
            model._maybe_symbolic_build(data_batch=(np.zeros((8, 4)), np.zeros((8, 64))))
    (said,) = [each.message for each in caplog.records if "kept in shards" in each.message]
    assert "65.5 kB of 91.4 kB of weights are kept in shards, 16.4 kB on each of 4 replicas" in said
    assert "embeddings" in said


def step_graph(model, x, y):
    """The graph of a model's traced step, in which all replicas are."""
    graphs = []

    class Noting(keras.layers.Layer):
        def call(self, x):
            graphs.append(tf.compat.v1.get_default_graph())
            return x

    noting = keras.Sequential([model, Noting()])
    noting.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    noting.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    return graphs[-1]


@pytest.mark.slow
def test_a_weight_is_gathered_when_its_layers_input_is_there_and_again_for_its_gradient(four_devices):
    """And no operation of the backward pass keeps what the forward pass has gathered, or made of it."""
    strategy = create(four_devices[:2])
    with strategy.scope():
        layers = [keras.layers.Dense(64, activation="tanh", name=name) for name in ("one", "two", "three")]
        model = keras.Sequential([keras.Input((5, 64)), *layers])
        graph = step_graph(model, np.ones((8, 5, 64), "float32"), np.ones((8, 5, 64), "float32"))
    operations = graph.get_operations()
    gathers = [each for each in operations if each.type == "Pack" and each.outputs[0].shape == (2, 2048)]
    assert len(gathers) == 2 * (3 + 3 - 1), "on each replica; no gradient needs the first layer's weights"
    activations = [each for each in operations if each.type == "Tanh"]
    gradients = [each for each in operations if each.type == "TanhGrad"]
    forward = [each for each in gathers if not any(gradient in program.needed_by(each) for gradient in gradients)]
    assert len(forward) == 2 * 3
    for gather in forward:
        made, products = [gather], 0
        while made:
            for reader in (each for tensor in made.pop().outputs for each in tensor.consumers()):
                assert not any(gradient in program.needed_by(reader) for gradient in gradients), reader.name
                made += [reader] if reader.type in ("Reshape", "IdentityN", "Transpose", "Identity") else []
                products += reader.type in ("MatMul", "BatchMatMulV2")
        assert products == 1
    waiting = [sum(each in program.needed_by(gather) for each in activations) for gather in forward]
    assert sorted(waiting) == [0, 0, 2, 2, 4, 4]  # Both replicas' inputs, as both hand out their shards.


@pytest.mark.slow
def test_weights_of_8_bits_are_gathered_as_they_are_and_again_for_gradients(four_devices):
    with create(four_devices[:2]).scope():
        layers = [keras.layers.Dense(64, activation="tanh") for _ in range(3)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        for layer in layers:
            layer.quantize("int8")
        graph = step_graph(model, np.ones((8, 64), "float32"), np.ones((8, 64), "float32"))
    gathers = [each for each in graph.get_operations() if each.type == "Pack" and each.outputs[0].shape == (2, 2048)]
    assert {each.outputs[0].dtype for each in gathers} == {tf.int8}
    again = [each for each in gathers if any(other.type == "TanhGrad" for other in program.needed_by(each))]
    assert (len(gathers) - len(again), len(again)) == (2 * 3, 2 * 2)


def small(strategy):
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(64, activation="tanh", name="first"), keras.layers.Dense(4, name="last")]
        model = keras.Sequential([keras.Input((48,)), *layers], name="small")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(0.003, use_ema=True, ema_overwrite_frequency=3), loss, jit_compile=False)
    return model


@pytest.mark.slow
def test_a_run_goes_on_with_as_many_replicas_with_others_and_with_replicated_weights(four_devices, tmp_path):
    data = {"x": program.VECTORS.astype("float32"), "y": program.LABELS, "batch_size": 8, "shuffle": False}

    def part(directory, strategy, epochs):
        model = small(strategy)
        with toolkit.training.Run(directory, recipe="small", resume=directory.exists()) as run:
            run.fit(model, **data, epochs=epochs)
        return [*model.get_weights(), *(keras.ops.convert_to_numpy(each) for each in model.optimizer.variables)]

    whole = part(tmp_path / "whole", create(four_devices[:2]), 4)
    alone = part(tmp_path / "alone", tf.distribute.get_strategy(), 4)
    part(tmp_path / "first", create(four_devices[:2]), 2)
    strategies_after = {
        "same": create(four_devices[:2]),
        "more": create(four_devices),
        "replicated": strategies.create("mirrored", devices=four_devices[:2]),
    }
    for name, strategy in strategies_after.items():
        shutil.copytree(tmp_path / "first", tmp_path / name)
        for mine, theirs, ones in zip(part(tmp_path / name, strategy, 4), whole, alone, strict=True):
            np.testing.assert_allclose(mine, ones, rtol=1e-5, atol=1e-6, err_msg=name)
            assert name != "same" or np.array_equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.long
def test_weights_are_swapped_with_their_averages(four_devices):
    def trained(strategy):
        model = small(strategy)
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        given = {"batch_size": 8, "epochs": 3, "verbose": 0, "shuffle": False, "callbacks": [swap]}
        model.fit(program.VECTORS.astype("float32"), program.LABELS, **given)
        return model.get_weights()

    for mine, ones in zip(trained(create(four_devices)), trained(tf.distribute.get_strategy()), strict=True):
        np.testing.assert_allclose(mine, ones, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_an_optimizer_in_a_branch_takes_whole_gradients(four_devices):
    class Sometimes(keras.Model):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=data[1], y_pred=self(data[0], training=True))
            gradients = tape.gradient(loss, self.trainable_variables)

            def apply():
                self.optimizer.apply(gradients, self.trainable_variables)
                return 0

            tf.cond(tf.linalg.global_norm(gradients) > 0.05, apply, lambda: 0)
            return {"loss": loss}

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            given = keras.Input((48,))
            model = Sometimes(given, keras.layers.Dense(4)(keras.layers.Dense(64, activation="tanh")(given)))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
        model.fit(program.VECTORS.astype("float32"), program.LABELS, batch_size=8, verbose=0, shuffle=False)
        return model.get_weights()

    for mine, ones in zip(trained(create(four_devices[:2])), trained(tf.distribute.get_strategy()), strict=True):
        np.testing.assert_allclose(mine, ones, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_files_hold_whole_weights_and_are_loaded_with_any_layout(four_devices, tmp_path):
    model = small(create(four_devices))
    model.fit(program.VECTORS.astype("float32"), program.LABELS, batch_size=8, verbose=0, shuffle=False)
    wanted = model.get_weights()
    model.save(tmp_path / "it.keras")
    model.save_weights(tmp_path / "it.weights.h5")
    model.export(tmp_path / "exported", verbose=False)
    x = program.VECTORS[:4].astype("float32")
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(x), model(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(StrategyError, match=r"Use model\.export"):
        tf.saved_model.save(model, str(tmp_path / "saved"))
    for strategy in (create(four_devices[:3]), create(four_devices, shards=2), tf.distribute.get_strategy()):
        with strategy.scope():
            again = keras.models.load_model(tmp_path / "it.keras")
        assert all(map(np.array_equal, again.get_weights(), wanted))
        slots = zip(again.optimizer.variables, model.optimizer.variables, strict=True)
        assert all(np.array_equal(*map(keras.ops.convert_to_numpy, pair)) for pair in slots)
        again = small(strategy)
        with strategy.scope():
            again.optimizer.build(again.trainable_variables)
        again.load_weights(tmp_path / "it.weights.h5")
        assert all(map(np.array_equal, again.get_weights(), wanted))
        assert layout_of(again.layers[0].kernel).used_whole == (strategy is not tf.distribute.get_strategy())
