"""What our strategies replace: functions of the process, and methods of objects that are made under one."""

import copy
import pickle
import re
import zipfile

import keras
import numpy as np
import processes
import pytest
import tensorflow as tf

from toolkit import strategies
from toolkit.strategies.upstream import table, wrapping
from toolkit.strategies.upstream.wrapping import attach

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
LOOK = """
import functools, sys, types
import keras, numpy as np, tensorflow as tf

def functions():
    found = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(("keras.src", "tensorflow.python")) or module is None:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, (types.FunctionType, functools.partial)):
                found[f"{name}:{key}"] = value
            elif isinstance(value, type) and value.__module__ == name:
                for own, function in list(vars(value).items()):
                    if isinstance(function, (types.FunctionType, functools.partial)):
                        found[f"{name}:{value.__qualname__}.{own}"] = function
    return found

before = functions()
import toolkit
kind, own = sys.argv[1], sys.argv[2:]
more = {"optimizer_state": "sharded"}

class Own(keras.Sequential):
    def train_step(self, data):  # It compares examples, so it sees the whole batch.
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2) + tf.reduce_max(self(x))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}

if kind == "mirrored":
    toolkit.devices.configure(gpus=2, emulate="always")
if kind == "parameter_server":
    more = {"parameter_server": toolkit.strategies.ParameterServerOptions(synchronous=True)}
strategy = toolkit.strategies.create(kind, **more)
with strategy.scope():
    model = (Own if own else keras.Sequential)([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", None if own else "mse", metrics=None if own else ["mae"])
model.fit(np.ones((8, 3), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0)
after = functions()
names = {key for key in before if key in after and after[key] is not before[key]}
names |= {key for key in after if getattr(after[key], "_toolkit", ())}  # By the launcher, before.
print("CHANGED", *sorted(names))
"""


def attached(thing):
    return {name for name, value in vars(thing).items() if getattr(value, "_toolkit", ())}


def compiled(strategy=None):
    with strategy.scope() if strategy else tf.distribute.get_strategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tasks"),
    [
        (["mirrored", "own train_step"], []),
        (["multi_worker"], ["--workers=2"]),
        (["parameter_server"], ["--chief", "--workers=1", "--ps=1"]),
    ],
)
def test_functions_that_are_replaced_for_a_process_are_in_the_table(tmp_path, kind, tasks):
    (tmp_path / "look.py").write_text(LOOK)
    launcher = ["-m", "toolkit", "launch", "--show=all", *tasks] if tasks else []
    ended = processes.python(tmp_path, *launcher, "look.py", *kind, limit=120)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    _, *names = re.search(r"CHANGED .*", ended.stdout)[0].split()
    known = {last(row.place) for row in table.rows("wrapped")}
    assert names
    assert {last(name) for name in names} <= known


def last(place):
    """Returns the name of a function or method."""
    return place.replace(":", ".").rpartition(".")[2]


@pytest.mark.smoke
@pytest.mark.slow
def test_under_other_strategies_keras_runs_as_it_is(four_devices):
    strategies.create("mirrored", devices=four_devices[:2])
    for strategy in (None, tf.distribute.MirroredStrategy(list(four_devices[:2]))):
        model = compiled(strategy)
        model.fit(X, Y, batch_size=4, verbose=0)
        for thing in (model, model.optimizer, *model.layers, *model.metrics):
            assert not attached(thing)


RAW = """
import tensorflow as tf
raw = tf.distribute.MultiWorkerMirroredStrategy()
import keras, numpy as np, toolkit
toolkit.strategies.create("mirrored", devices=["CPU:0"])
with raw.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(np.ones((8, 3)), np.ones((8, 1)), batch_size=4, verbose=0)
things = (model, model.optimizer, *model.layers, *model.metrics)
print("MINE", [name for thing in things for name, value in vars(thing).items() if getattr(value, "_toolkit", ())])
print("SAVED", tf.train.Checkpoint(v=tf.Variable(1.0)).save("kept/c"))
"""


@pytest.mark.slow
def test_tensorflows_own_strategy_of_workers_and_its_checkpoints_are_left_alone(tmp_path):
    ended = processes.python(tmp_path, "-c", RAW, limit=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.splitlines()[-2:] == ["MINE []", "SAVED kept/c-1"]


@pytest.mark.slow
def test_what_is_attached_goes_into_no_copy_and_no_file(four_devices, tmp_path):
    model = compiled(strategies.create("mirrored", devices=four_devices[:2]))
    model.fit(X, Y, batch_size=4, verbose=0)
    assert {"save", "make_train_function"} <= attached(model)
    assert {"_all_reduce_sum_gradients"} <= attached(model.optimizer)
    assert type(model) is keras.Sequential
    assert "toolkit" not in repr(model) + repr(model.optimizer)
    for other in (keras.models.clone_model(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not attached(other)
        assert not attached(other.optimizer) if other.compiled else True
        assert other.predict(X, verbose=0).shape == (8, 1)
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        assert all(b"toolkit" not in file.read(name) for name in file.namelist())
    np.testing.assert_allclose(
        keras.models.load_model(tmp_path / "model.keras").predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-6
    )


def test_an_object_has_a_method_of_its_own():
    class Greeter:
        def greet(self, name):
            """Says it."""
            return f"hello {name}"

    one, other = Greeter(), Greeter()
    for mark in ("!", "!", "?"):
        attach(one, greet=MARKS[mark])
    assert (one.greet("you"), other.greet("you")) == ("hello you!?", "hello you")
    assert one.greet.__doc__ == "Says it."
    assert (Greeter, "greet") in wrapping.attached_here


def exclaims(original, greeter, name):
    return original(greeter, name) + "!"


def asks(original, greeter, name):
    return original(greeter, name) + "?"


MARKS = {"!": exclaims, "?": asks}
