"""One battery over all strategies: the same numbers as one device, from the first step to the checkpoint.

A strategy joins by a row in CASES.
"""

import keras
import numpy as np
import pytest

from toolkit import models, strategies
from toolkit.data import Batches, shapes
from toolkit.training import state

STEPS, BATCH = 20, 32
CASES = {
    "mirrored on 1": ("mirrored", 1),
    "mirrored on 2": ("mirrored", 2),
    "mirrored on 4": ("mirrored", 4),
}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=5e-4),
    "adam": lambda: keras.optimizers.Adam(1e-3),
}


class StepLosses(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.reset_metrics()

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


@pytest.fixture(scope="module")
def examples():
    return shapes.load(train=600, test=203)


def compiled(strategy, optimizer="sgd"):
    keras.utils.set_random_seed(11)
    with strategy.scope():
        model = models.build("small_cnn")
        model.compile(
            OPTIMIZERS[optimizer](), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
        )
    return model


def trained(name, devices, examples, optimizer):
    strategy = strategies.create(name, devices=devices)
    batches = Batches(examples=examples, strategy=strategy, global_batch_size=BATCH, seed=2)
    model = compiled(strategy, optimizer)
    losses = StepLosses()
    model.fit(batches.train(), steps_per_epoch=STEPS, callbacks=[losses], verbose=0, shuffle=False)
    return model, batches, losses.losses


_reference = {}


@pytest.fixture
def reference(four_devices, examples):
    """Plain Keras on one device, trained once for each optimizer."""

    def get(optimizer):
        if optimizer not in _reference:
            _reference[optimizer] = trained("one_device", ("CPU:0",), examples, optimizer)
        return _reference[optimizer]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_one_device(case, optimizer, reference, four_devices, examples):
    name, replicas = CASES[case]
    plain, plain_batches, plain_losses = reference(optimizer)
    model, batches, losses = trained(name, four_devices[:replicas], examples, optimizer)

    assert np.max(np.abs(np.subtract(losses, plain_losses))) < 1e-5
    for mine, theirs in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(
            keras.ops.convert_to_tensor(mine), keras.ops.convert_to_tensor(theirs), atol=5e-4, err_msg=mine.path
        )
    expected = plain.evaluate(plain_batches.test(), verbose=0, return_dict=True)
    found = model.evaluate(batches.test(), verbose=0, return_dict=True)
    assert found == pytest.approx(expected, abs=2e-3)
    # 203 examples, each counted once: the accuracy is a whole number of 203rds.
    assert found["accuracy"] * 203 == pytest.approx(round(found["accuracy"] * 203), abs=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_comes_back_under_any_other(case, four_devices, examples):
    name, replicas = CASES[case]
    model, batches, _ = trained(name, four_devices[:replicas], examples, "adam")
    saved = state.capture(model)
    for devices in (four_devices[:1], four_devices[:2]):
        other = compiled(strategies.create("auto", devices=devices), "adam")
        state.restore(other, saved)
        again = state.capture(other)
        assert list(again) == list(saved)
        assert all(np.array_equal(again[key], saved[key]) for key in saved)
        assert int(other.optimizer.iterations.numpy()) == STEPS


def test_replicas_hold_the_same_weights(four_devices, examples):
    model, _, _ = trained("mirrored", four_devices, examples, "sgd")
    for variable in model.weights:
        copies = [copy.numpy() for copy in variable.value.values]
        assert all(np.array_equal(copy, copies[0]) for copy in copies), variable.path


def test_evaluate_and_predict_agree_with_plain_keras_on_every_example(four_devices, examples):
    plain = compiled(strategies.create("one_device", devices=("CPU:0",)))
    model = compiled(strategies.create("mirrored", devices=four_devices[:3]))
    state.restore(model, state.capture(plain))
    np.testing.assert_allclose(
        model.predict(examples.test_images, batch_size=30, verbose=0),
        plain.predict(examples.test_images, batch_size=30, verbose=0),
        atol=1e-5,
    )
