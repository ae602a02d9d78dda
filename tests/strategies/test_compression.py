"""PowerSGD: its factors, what is kept of them, and mistakes. The history in tests/strategies/golden is NumPy's."""

import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import StrategyError
from toolkit.strategies import GradientExchange
from toolkit.strategies.step.compressed import Compressed
from toolkit.strategies.step.powersgd import _orthonormal, matrix_shape, shrinks
from toolkit.training import state

GOLDEN = pathlib.Path(__file__).parent / "golden" / "powersgd.json"
RANK_2 = GradientExchange(compression="powersgd", rank=2)


def two_layers(strategy, optimizer=None):
    """A linear network 12 -> 16 -> 12, of which both kernels are compressed at rank 2."""
    with strategy.scope():
        layers = [
            keras.layers.Input((12,)),
            keras.layers.Dense(16, name="first"),
            keras.layers.Dense(12, name="second"),
        ]
        model = keras.Sequential(layers)
        model.compile(optimizer or keras.optimizers.SGD(0.002, momentum=0.5), "mse")
    return model


def rights_of(model):
    return [each for name, each in Compressed.state(model.optimizer).items() if name.endswith("/right")]


@pytest.mark.slow
def test_forty_steps_are_those_that_numpy_makes(four_devices):
    golden = json.loads(GOLDEN.read_text())
    strategy = strategies.create("mirrored", devices=four_devices[:2], gradients=RANK_2)
    model = two_layers(strategy)
    model.set_weights([np.array(each, "float32") for each in golden["begin"]])
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    for variable, value in zip(rights_of(model), golden["right"], strict=True):
        variable.assign(np.array(value, "float32"))
    x, y = (np.array(golden[name], "float32") for name in ("x", "y"))
    model.fit(x, y, batch_size=golden["batch"], epochs=golden["epochs"], shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 40
    for mine, theirs in zip(model.get_weights(), golden["end"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "matrix"), [((3, 3, 64, 128), (576, 128)), ((10, 4), (10, 4)), ((8, 4, 2), (8, 8)), ((7,), (7, 1))]
)
def test_a_kernel_is_a_matrix_of_the_least_border(shape, matrix):
    assert sum(matrix_shape(shape)) == sum(matrix)


def test_a_gradient_of_a_lower_rank_than_the_factors_is_sent_exactly():
    """What is left of a column that the others span is rounding error: it must be made orthogonal to them, too."""
    random = np.random.default_rng(0)
    for rank in (1, 3, 4):
        gradient = (random.normal(size=(30, rank)) @ random.normal(size=(rank, 20))).astype("float32")
        columns = _orthonormal(gradient @ random.normal(size=(20, 6)).astype("float32")).numpy()
        np.testing.assert_allclose(columns.T @ columns, np.eye(6), atol=1e-5)
        np.testing.assert_allclose(columns @ (columns.T @ gradient), gradient, atol=1e-4)
    assert np.isfinite(_orthonormal(tf.zeros([30, 6]))).all()


def test_what_would_not_shrink_is_sent_as_it_is():
    assert shrinks((576, 128), 4)
    assert not shrinks((8, 8), 2)
    assert not shrinks((128,), 1)


def test_a_summary_says_so(four_devices):
    strategy = strategies.create("mirrored", devices=four_devices[:2], gradients=RANK_2)
    assert strategies.describe(strategy)["compression"] == "powersgd, rank 2"


def trained(strategy, model, *, epochs=4):
    x = np.random.default_rng(2).normal(size=(32, 12)).astype("float32")
    y = (x @ np.linspace(-1, 1, 144).reshape(12, 12)).astype("float32")
    losses = model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0).history["loss"]
    return losses, model.get_weights()


@pytest.mark.long
def test_a_gradient_of_no_higher_rank_is_sent_whole(four_devices):
    def once(gradients):
        keras.utils.set_random_seed(3)
        strategy = strategies.create("mirrored", devices=four_devices[:2], gradients=gradients)
        model = two_layers(strategy)
        x, y = np.ones((2, 12), "float32"), np.ones((2, 12), "float32")
        x[1] *= np.arange(12)  # Of two examples.
        model.fit(x, y, batch_size=2, epochs=1, verbose=0)
        return model.get_weights()

    for mine, theirs in zip(once(RANK_2), once(GradientExchange()), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("state_of", [pytest.param("replicated", marks=pytest.mark.long), "sharded"])
def test_it_trains_beside_a_clip_in_16_bits(four_devices, state_of):
    def losses(gradients):
        keras.utils.set_random_seed(3)
        options = {"gradients": gradients, "optimizer_state": state_of}
        strategy = strategies.create("mirrored", devices=four_devices[:2], **options)
        return trained(strategy, two_layers(strategy, keras.optimizers.Adam(0.01, global_clipnorm=1.0)), epochs=8)[0]

    mine, synchronous = losses(GradientExchange(compression="powersgd", rank=3, dtype="bfloat16")), losses(None)
    assert mine[-1] < 0.8 * mine[0]
    assert mine[-1] < 1.3 * synchronous[-1], (mine, synchronous)
    assert mine != synchronous


@pytest.mark.slow
def test_a_resumed_run_is_that_of_no_pause(four_devices):
    keras.utils.set_random_seed(3)
    strategy = strategies.create("mirrored", devices=four_devices[:2], gradients=RANK_2)
    model = two_layers(strategy)
    trained(strategy, model, epochs=2)
    arrays = state.capture(model)
    assert any(array.any() for name, array in arrays.items() if name.startswith("exchange/"))
    _, through = trained(strategy, model, epochs=2)
    again = two_layers(strategy)
    state.restore(again, arrays)
    _, resumed = trained(strategy, again, epochs=2)
    for mine, theirs in zip(resumed, through, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("per_call", [1, 2])
def test_it_begins_at_a_step(four_devices, per_call):
    def weights(gradients, epochs):
        keras.utils.set_random_seed(3)
        strategy = strategies.create("mirrored", devices=four_devices[:2], gradients=gradients)
        model = two_layers(strategy)
        model.steps_per_execution = per_call
        return trained(strategy, model, epochs=epochs)[1]

    later = GradientExchange(compression="powersgd", rank=2, start_step=4)
    for epochs, equal in ((1, True), (2, False)):  # Of four steps.
        pairs = zip(weights(later, epochs), weights(None, epochs), strict=True)
        assert all(np.array_equal(mine, theirs) for mine, theirs in pairs) == equal


@pytest.mark.slow
def test_rows_of_a_table_are_sent_as_they_are(four_devices):
    def weights(gradients):
        keras.utils.set_random_seed(3)
        with strategies.create("mirrored", devices=four_devices[:2], gradients=gradients).scope():
            layers = [keras.layers.Embedding(50, 40), keras.layers.Flatten(), keras.layers.Dense(30)]
            model = keras.Sequential([keras.layers.Input((2,)), *layers])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        numbers = np.arange(16).reshape(8, 2)
        model.fit(numbers, np.ones((8, 30), "float32"), batch_size=8, epochs=1, shuffle=False, verbose=0)
        return list(Compressed.state(model.optimizer)), model.get_weights()

    kept, mine = weights(RANK_2)
    _, theirs = weights(None)
    assert kept == ["0001/unsent", "0001/right"], "the kernel's, not the table's"
    np.testing.assert_allclose(mine[0], theirs[0], rtol=0, atol=1e-6)
    assert not np.allclose(mine[1], theirs[1], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "gradients"), [(2, None), (4, RANK_2)], ids=["not compressed", "four replicas"])
def test_another_compression_drops_what_was_kept_and_says_so(four_devices, caplog, count, gradients):
    strategy = strategies.create("mirrored", devices=four_devices[:2], gradients=RANK_2)
    model = two_layers(strategy)
    trained(strategy, model, epochs=1)
    plain = two_layers(strategies.create("mirrored", devices=four_devices[:count], gradients=gradients))
    state.restore(plain, state.capture(model))
    assert "hasn't been sent of earlier gradients, is dropped" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"compression": "topk"},
            "'topk', but there is no such choice. Choose one of none, powersgd",
        ),
        ({"compression": "powersgd", "rank": 0}, "rank=0, but it must be a whole number of at least 1"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(StrategyError, match=words):
        GradientExchange(**options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "optimizer", "words"),
    [
        (
            9,
            "SGD",
            "at rank 9, but no gradient gets smaller: the largest, of sequential.*/first/kernel, has the shape",
        ),
        (2, "Lamb", "with Lamb, but its update may depend on the whole layer's gradient"),
    ],
)
def test_what_makes_no_sense_is_refused(four_devices, rank, optimizer, words):
    gradients = GradientExchange(compression="powersgd", rank=rank)
    strategy = strategies.create("mirrored", devices=four_devices[:2], gradients=gradients)
    with pytest.raises(StrategyError, match=words):
        trained(strategy, two_layers(strategy, getattr(keras.optimizers, optimizer)()))


@pytest.mark.slow
def test_a_sum_that_is_not_finite_is_forgotten(four_devices):
    strategy = strategies.create("mirrored", devices=four_devices[:2], gradients=RANK_2)
    model = two_layers(strategy, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.02), initial_scale=1e38))
    trained(strategy, model, epochs=1)
    assert all(np.isfinite(variable.numpy()).all() for variable in Compressed.state(model.optimizer).values())
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    tf.debugging.assert_all_finite(model.weights[0], "a weight")
