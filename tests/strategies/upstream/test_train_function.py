"""What stands around a step function, and in which order; no other file touches what Keras calls for a step."""

import ast
import itertools
import pathlib

import keras
import numpy as np
import pytest

import toolkit
from toolkit import strategies
from toolkit.errors import StrategyError
from toolkit.strategies.options import GradientExchange, LocalSteps
from toolkit.strategies.upstream import train_function
from toolkit.strategies.upstream.train_function import Around, StepFunction

ROOT = pathlib.Path(toolkit.__file__).parent
NAMES = {f"{kind}_function" for kind in ("train", "test", "predict")}
X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


class Model:
    """As much of a model as a step function needs."""

    train_function = None

    def make_train_function(self):
        self.train_function = self.train_function or (lambda batches: [*batches, "made"])


def noting(place):
    return lambda within, batches: within([*batches, place])


def compiled(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def touches(node):
    """Whether an expression names one of the attributes, as `getattr(model, f"{kind}_function")` does."""
    if isinstance(node, ast.JoinedStr):
        ends = isinstance(node.values[-1], ast.Constant) and node.values[-1].value == "_function"
        return ends and not isinstance(node.values[0], ast.Constant)
    return getattr(node, "attr", None) in NAMES or (isinstance(node, ast.Constant) and node.value in NAMES)


def test_no_other_file_touches_what_keras_calls():
    found = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if any(touches(node) for node in ast.walk(ast.parse(path.read_text())))
    }
    assert found == {"strategies/upstream/train_function.py"}


def test_the_order_is_the_lists_whoever_comes_first():
    for order in itertools.permutations(Around):
        model = Model()
        model.make_train_function()
        for place in order:
            train_function.put(model, "train", place, noting(place))
        assert model.train_function([]) == [*Around, "made"]


def test_one_that_is_put_where_another_stands_takes_its_place():
    model = Model()
    model.make_train_function()
    for layer in (noting("first"), noting("second")):
        train_function.put(model, "train", Around.AVERAGING, layer)
    assert model.train_function([]) == ["second", "made"]


def test_what_is_taken_out_leaves_the_others_and_in_the_end_what_was_there():
    model = Model()
    model.make_train_function()
    before = model.train_function
    for place in (Around.TIMING, Around.SKIPPING):
        function = train_function.put(model, "train", place, noting(place))
    function.put(Around.SKIPPING, None)
    assert model.train_function([]) == [Around.TIMING, "made"]
    function.put(Around.TIMING, None)
    assert model.train_function is before


def test_a_function_that_a_user_has_put_around_it_stays():
    model = Model()
    model.make_train_function()
    function = train_function.put(model, "train", Around.SKIPPING, noting("skipping"))
    model.train_function = users = lambda batches: function([*batches, "user's"])
    function.put(Around.SKIPPING, None)
    assert model.train_function is users
    assert users([]) == ["user's", "made"]


def test_a_layer_changes_what_stands_within_in_the_same_step():
    model, made = Model(), []

    def put_around(function):
        made.append(function)
        function.put(Around.TIMING, noting(len(made)))
        function.put(Around.SWITCHING, switch if len(made) == 1 else None)

    def switch(within, batches):
        model.train_function.make_again()
        return within(batches)

    train_function.make(model, "train", model.make_train_function, put_around)
    assert model.train_function([]) == [2, "made"]
    assert made == [model.train_function] * 2
    train_function.make(model, "train", model.make_train_function, put_around)  # Keras keeps it.
    assert len(made) == 2


def test_a_model_that_is_refused_has_no_function():
    model = Model()

    def refuse(function):
        raise StrategyError(asked="it", found="that", remedy="Leave it")

    with pytest.raises(StrategyError):
        train_function.make(model, "train", model.make_train_function, refuse)
    assert model.train_function is None


def test_what_makes_the_step_is_replaced_within_what_stands_around_it():
    model = Model()
    train_function.replace(model, train=lambda batches: [*batches, "sent"])
    train_function.put(model, "train", Around.SKIPPING, noting("skipping"))
    train_function.replace(model, train=lambda batches: [*batches, "sent again"])
    assert model.train_function([]) == ["skipping", "sent again"]
    train_function.replace(model, train=None)
    assert not train_function.is_made(model, "train")


@pytest.mark.slow
def test_keras_calls_it_keeps_it_and_drops_it(four_devices):
    model = compiled(strategies.create("mirrored", devices=four_devices[:2]))
    seen = []

    class Note(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            train_function.put(self.model, "train", Around.SKIPPING, self.note)

        def note(self, within, batches):
            seen.append(self.model.train_function)
            return within(batches)

    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[Note()])
    model.fit(X, Y, batch_size=4, verbose=0)
    assert [type(each) for each in seen] == [StepFunction] * 4
    assert len(set(map(id, seen))) == 1
    model.make_train_function(force=True)
    assert model.train_function is not seen[0]
    model.compile("sgd", "mse")
    assert [getattr(model, name) for name in NAMES] == [None] * 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "gradients"])
def test_from_some_step_on_a_step_that_changes_is_made_again_once(four_devices, kind):
    more = {
        "local": {"local": LocalSteps(every=2, start_step=3)},
        "gradients": {"gradients": GradientExchange(compression="powersgd", rank=1, start_step=3)},
    }[kind]
    with strategies.create("mirrored", devices=four_devices[:2], **more).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(32), keras.layers.Dense(32)])
        model.compile("sgd", "mse")
    steps, y = [], np.ones((8, 32), "float32")
    for _ in range(5):
        model.train_on_batch(X, y)
        steps.append(model.train_function.step)
    assert [steps.index(each) for each in steps] == [0, 0, 0, 3, 3]
    assert (Around.AVERAGING in model.train_function._layers) == (kind == "local")
