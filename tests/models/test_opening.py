"""A model by its name, by a function, and from a file; and what none of them is."""

import sys

import keras
import numpy as np
import pytest

from toolkit.errors import ModelError
from toolkit.models import open_model
from toolkit.training import Run

SOURCE = """
import keras
def build(): return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)], name="mine")
def needs(size): return None
def other(): return 5
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "some_models", raising=False)
    (tmp_path / "some_models.py").write_text(SOURCE)
    return tmp_path


def test_a_name_a_function_and_a_file(here):
    assert open_model("small_cnn").name == "small_cnn"
    model = open_model("some_models:build")
    assert model.name == "mine"
    path = here / "a b's.keras"
    model.save(path)
    assert open_model(str(path)).name == "mine"


def test_a_file_that_would_run_code_is_not_opened(here):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x)])
    model.save(here / "code.keras")
    with pytest.raises(ModelError, match="would run Python code in the file"):
        open_model("code.keras")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing", "there is no model of that name, and it is neither"),
        ("absent.keras", "there is no such file"),
        ("some_models.py", "it isn't a .keras file"),
        ("absent_module:build", "absent_module"),
        ("some_models:absent", "some_models.py has no absent; its functions are build, needs, other. Name a function"),
        ("some_models:builds", r"has no builds; .*Did you mean build\? Name a function"),
        ("some_models:needs", "takes no arguments"),
        ("some_models:other", "it gives a int"),
    ],
)
def test_what_is_no_model_is_said(here, text, says):
    with pytest.raises(ModelError, match=says):
        open_model(text)


@pytest.mark.parametrize("text", ["some_script:build", "some_script.py:build"])
def test_a_script_is_not_run_to_say_that_it_has_no_such_function(here, text, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (here / "some_script.py").write_text("def make(): pass\nopen('ran', 'w').close()\n")
    with pytest.raises(ModelError, match="some_script.py has no build; its functions are make"):
        open_model(text)
    assert not (here / "ran").exists()


def test_a_name_that_is_made_as_a_module_runs_is_found(here):
    (here / "some_makers.py").write_text(SOURCE + "globals()['later'] = build\n")
    assert open_model("some_makers:later").name == "mine"


def test_half_a_file_is_said(here):
    open_model("some_models:build").save(here / "whole.keras")
    whole = (here / "whole.keras").read_bytes()
    (here / "half.keras").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="isn't a .keras file"):
        open_model("half.keras")


def test_a_function_of_a_file_is_called(tmp_path, monkeypatch):
    (tmp_path / "my net.py").write_text(
        "import keras\ndef build_model(units=3):\n"
        "    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])\n"
    )
    monkeypatch.setattr("sys.path", [*sys.path])
    assert open_model(f"{tmp_path}/my net.py:build_model").output_shape == (None, 3)


def test_a_function_that_takes_weights_downloads_none(monkeypatch):
    made = []

    def network(weights="imagenet"):
        made.append(weights)
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    monkeypatch.setattr(keras.applications, "MobileNetV2", network)
    open_model("keras.applications:MobileNetV2")
    assert made == [None]


TRAINS = """
import argparse
import keras, numpy as np
argparse.ArgumentParser().parse_args()
def build():
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    made.compile("adam", "mse")
    return made
def train():
    build().fit(np.ones((8, 4)), np.ones((8, 3)), verbose=0)
net = build()
try:
    net.fit(np.ones((8, 4)), np.ones((8, 3)), verbose=0)
except Exception:
    pass
open("trained", "w")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["build", "net"])
def test_a_script_without_a_main_guard_is_not_trained(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "a_script.py").write_text(TRAINS)
    assert open_model(f"a_script.py:{name}").output_shape == (None, 3)
    assert not (tmp_path / "trained").exists()
    with pytest.raises(ModelError, match="but it trains a model. Name a function that makes one and returns it"):
        open_model("a_script.py:train")
    made = open_model(f"a_script.py:{name}")
    assert made.fit(np.ones((8, 4)), np.ones((8, 3)), verbose=0).history["loss"], "fit is itself again"


@pytest.mark.slow
def test_a_run_of_the_script_leaves_no_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    run = "from toolkit.training import Run\nnet = build()\nwith Run() as run: run.fit(net, None)\n"
    (tmp_path / "with_run.py").write_text(TRAINS.partition("net = ")[0] + run)
    assert open_model("with_run.py:build", stop_at=[(Run, "__init__")]).output_shape == (None, 3)
    assert not (tmp_path / "runs").exists()
