"""Layers that are split over replicas: the numbers of plain layers on one device, whatever else a layer has."""

import batteries
import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.errors import StrategyError
from toolkit.parallel import ShardedConv2D, ShardedDense

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(60, 6, 6, 3)).astype("float32")
Y = RANDOM.normal(size=(60, 3)).astype("float32")


def network(first=keras.layers.Dense, second=keras.layers.Dense, conv=keras.layers.Conv2D, **kwargs):
    """Sizes that neither 2 nor 3 nor 4 replicas divide."""
    return keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            conv(5, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            first(17, activation="sigmoid", bias_regularizer="l2", **kwargs),
            second(9, activation="relu", **kwargs),
            keras.layers.Dense(3),
        ]
    )


def given(kind, **fixed):
    return lambda *args, **kwargs: kind(*args, **fixed, **kwargs)


PAIR = {"first": given(ShardedDense, keep_split=True), "second": given(ShardedDense, split="inputs")}
NETWORKS = {
    "by outputs": {"first": ShardedDense, "second": ShardedDense},
    "by inputs": {"first": given(ShardedDense, split="inputs"), "second": given(ShardedDense, split="inputs")},
    "a pair": PAIR,
    "convolution": {"conv": ShardedConv2D},
}


def trained(strategy, optimizer=None, *, used=True, **parts):
    """Losses, weights and, where it is used, predictions; the last batch of each isn't shared equally."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = network(**parts)
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    # In one epoch: each epoch's iterator over several devices takes as long to make as the steps themselves.
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24).repeat(3)
    losses = []
    each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"]))
    model.fit(data, verbose=0, shuffle=False, callbacks=[each])
    found = [np.array(losses), *(w.numpy() for w in model.weights)]
    if used:
        found.append(np.array(model.evaluate(X[:49], Y[:49], verbose=0, batch_size=12)))
        found.append(model.predict(X[:31], verbose=0, batch_size=12))
    return found


def same(mine, theirs, tolerance=3e-6):
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=0)


_ALONE = {}


def alone(optimizer=None, **extra):
    """What plain layers on one device come to, trained once for all that is compared with it."""
    key = (optimizer, repr(extra))
    if key not in _ALONE:
        _ALONE[key] = trained(tf.distribute.get_strategy(), optimizer, **extra)
    return _ALONE[key]


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "shards"), batteries.rows([(2, None), (3, None), (4, 2)], (4, 2)))
@pytest.mark.parametrize("kind", batteries.rows(NETWORKS, "a pair"))
def test_the_numbers_are_those_of_plain_layers(four_devices, kind, replicas, shards):
    mirrored = strategies.create("mirrored", devices=four_devices[:replicas], shards=shards)
    same(trained(mirrored, **NETWORKS[kind]), alone())


OPTIMIZERS = {
    "AdamW, clipped": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.5),
    "Adam, each clipped, averaged": lambda: keras.optimizers.Adam(
        0.01, clipnorm=0.1, use_ema=True, ema_overwrite_frequency=2
    ),
    "Adam, accumulating, decaying": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2, weight_decay=0.01, global_clipnorm=0.5
    ),
    "RMSprop, cut": lambda: keras.optimizers.RMSprop(0.01, clipvalue=0.01),
    **{
        name: lambda name=name: getattr(keras.optimizers, name)(0.01)
        for name in ("Adadelta", "Adafactor", "Adagrad", "Adamax", "Ftrl", "Lamb", "Lion", "Muon", "Nadam")
    },
    "Lamb, clipped, averaged": lambda: keras.optimizers.Lamb(0.01, global_clipnorm=0.5, use_ema=True),
    "Adafactor, accumulating": lambda: keras.optimizers.Adafactor(0.01, gradient_accumulation_steps=2),
    "Muon, decaying": lambda: keras.optimizers.Muon(0.01, weight_decay=0.01, adam_weight_decay=0.02),
}
MACHINES = {"replicated": (2, None, {}), "split": (2, None, PAIR), "split in groups": (4, 2, PAIR)}


@pytest.mark.slow
@pytest.mark.parametrize("machine", batteries.rows(["split", "replicated", "split in groups"], "split"))
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=[] if "accumulating, dec" in name else pytest.mark.long) for name in OPTIMIZERS],
)
def test_optimizers_do_what_they_do_on_one_device(four_devices, optimizer, machine):
    if optimizer == "Muon, decaying" and keras.__version__.startswith("3.12."):
        pytest.skip("Muon of Keras 3.12 fails with weight_decay, on one device too")
    replicas, shards, parts = MACHINES[machine]
    mirrored = strategies.create("mirrored", devices=four_devices[:replicas], shards=shards)
    # A step of Lion is a sign, of Ftrl and Adadelta a quotient: rounding weighs more there.
    make = OPTIMIZERS[optimizer]
    same(trained(mirrored, make, used=False, **parts), alone(make, used=False), 3e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(
            {"kernel_regularizer": {"class_name": "L1L2", "config": {"l1": 0.01, "l2": 0.01}}}, marks=pytest.mark.long
        ),
        pytest.param(
            {"kernel_regularizer": {"class_name": "OrthogonalRegularizer", "config": {"factor": 0.01}}},
            marks=pytest.mark.long,
        ),
        {"kernel_constraint": "max_norm"},
        pytest.param({"kernel_constraint": "non_neg"}, marks=pytest.mark.long),
    ],
    ids=["sum", "whole", "norm", "elementwise"],
)
@pytest.mark.parametrize(
    ("replicas", "shards", "kind"),
    batteries.rows([(3, None, "by outputs"), (3, None, "a pair"), (4, 2, "a pair")], [(4, 2, "a pair")]),
)
def test_regularizers_and_constraints_are_of_the_whole(four_devices, replicas, shards, kind, extra):
    mirrored = strategies.create("mirrored", devices=four_devices[:replicas], shards=shards)
    same(trained(mirrored, used=False, **NETWORKS[kind], **extra), alone(used=False, **extra))


@pytest.mark.long
@pytest.mark.slow
def test_a_saved_model_is_whole_and_comes_back_at_another_number(four_devices, tmp_path):
    def model_on(count):
        keras.utils.set_random_seed(3)
        with strategies.create("mirrored", devices=four_devices[:count]).scope():
            model = network(**PAIR)
            model.compile("adam", "mse")
        return model

    first = model_on(4)
    first.fit(X[:48], Y[:48], batch_size=24, verbose=0)
    first.save(tmp_path / "m.keras")
    alone = keras.models.load_model(tmp_path / "m.keras")
    with strategies.create("mirrored", devices=four_devices[:2]).scope():
        second = keras.models.load_model(tmp_path / "m.keras")
    for variables in zip(first.variables, alone.variables, second.variables, strict=True):
        whole = [v.numpy() for v in variables]
        assert np.array_equal(whole[0], whole[1])
        assert np.array_equal(whole[0], whole[2])
    for ours in zip(first.optimizer.variables, alone.optimizer.variables, second.optimizer.variables, strict=True):
        whole = [np.asarray(v.numpy()) for v in ours]
        assert np.array_equal(whole[0], whole[1])
        assert np.array_equal(whole[0], whole[2])
    # And outside of any strategy the layers compute with what all replicas hold.
    np.testing.assert_allclose(first(X[:5]), alone(X[:5]), atol=1e-6)


def test_a_configuration_of_an_earlier_version_is_taken():
    config = {**ShardedDense(8, split="inputs").get_config(), "scheme": "b"}
    assert ShardedDense.from_config(config).split == "inputs"
    assert ShardedConv2D.from_config({**ShardedConv2D(8, 3).get_config(), "scheme": "a"}).filters == 8


def test_weights_taken_and_set_are_whole(four_devices):
    with strategies.create("mirrored", devices=four_devices[:3]).scope():
        model = network(**PAIR)
    weights = model.get_weights()
    assert weights[2].shape == (180, 17)
    model.set_weights([w + 1 for w in weights])
    assert all(np.array_equal(a, b + 1) for a, b in zip(model.get_weights(), weights, strict=True))


@pytest.mark.long
@pytest.mark.slow
def test_activations_are_exchanged_in_16_bits_where_asked(four_devices):
    mirrored = strategies.create("mirrored", devices=four_devices[:2])
    short = {"first": given(ShardedDense, exchange_dtype="bfloat16"), "second": ShardedDense}
    seen, exact = trained(mirrored, used=False, **short), alone()
    assert 1e-6 < np.max(np.abs(seen[0] - exact[0])) < 1e-2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ShardedDense(8, split="rows"), "split='rows'"),
        (lambda: ShardedDense(8, exchange_dtype="int8"), "int8"),
        (lambda: ShardedDense(8, activation="softmax", keep_split=True), "softmax"),
        (
            lambda: keras.Sequential([keras.Input((8,)), ShardedDense(3)]),
            "4 replicas, but its split axis has only 3 elements",
        ),
        (lambda: keras.Sequential([keras.Input((8, 8, 8)), ShardedConv2D(8, 3, groups=2)]), "groups"),
    ],
)
def test_what_can_not_be_is_said(four_devices, make, said):
    with strategies.create("mirrored", devices=four_devices).scope(), pytest.raises(StrategyError, match=said):
        make()


def between(*layers, units=12):
    inputs = keras.Input((6,))
    x = ShardedDense(units, keep_split=True, activation="relu")(inputs)
    for layer in layers:
        x = layer(x)
    return keras.Model(inputs, ShardedDense(3, split="inputs")(x))


def fitted(strategy, make):
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(X[:, 0, 0, :].repeat(2, 1)[:28], Y[:28], batch_size=7, verbose=0, shuffle=False)
    return [weight.numpy() for weight in model.weights]


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["Softmax", "UnitNormalization"])
def test_what_needs_all_features_does_not_stand_between_a_pair(four_devices, layer):
    strategy = strategies.create("mirrored", devices=four_devices[:2])
    with pytest.raises(StrategyError, match="needs all features of an example.*Leave keep_split out"):
        fitted(strategy, lambda: between(getattr(keras.layers, layer)()))


@pytest.mark.slow
def test_what_is_elementwise_does(four_devices):
    layers = keras.layers

    def make():
        return between(layers.Dropout(0.0), layers.LeakyReLU(0.1), layers.Rescaling(2.0), layers.Activation("gelu"))

    many = fitted(strategies.create("mirrored", devices=four_devices[:2]), make)
    same(many, fitted(tf.distribute.get_strategy(), make))


@pytest.mark.slow
def test_pairs_that_begin_before_others_end_are_told_apart(four_devices):
    """Their examples differ in number: those of a sequence's steps, and of sequences."""

    def make():
        steps, whole = keras.Input((6,)), keras.Input((6,))
        first = ShardedDense(12, keep_split=True, activation="relu")(keras.layers.Reshape((2, 3))(steps))
        second = ShardedDense(12, keep_split=True, activation="relu")(whole)
        first, second = ShardedDense(3, split="inputs")(first), ShardedDense(3, split="inputs")(second)
        return keras.Model([steps, whole], keras.layers.Add()([keras.layers.GlobalAveragePooling1D()(first), second]))

    def trained_on_both(strategy):
        keras.utils.set_random_seed(2)
        with strategy.scope():
            model = make()
            model.compile(keras.optimizers.SGD(0.1), "mse")
        x = X[:, 0, 0, :].repeat(2, 1)[:28]
        model.fit([x, -x], Y[:28], batch_size=7, verbose=0, shuffle=False)
        return [weight.numpy() for weight in model.weights]

    many = trained_on_both(strategies.create("mirrored", devices=four_devices[:2]))
    same(many, trained_on_both(tf.distribute.get_strategy()))
