"""Files and callbacks of several workers, with faults that two processes hardly have (multiprocess/test_fit.py)."""

import collections
import contextlib
import json
import os
import pathlib
import re
import types

import keras
import pytest

from toolkit.errors import StrategyError
from toolkit.strategies import mesh
from toolkit.strategies.fit import adapt, callbacks, models
from toolkit.strategies.options import Options
from toolkit.strategies.processes import shared_files
from toolkit.strategies.upstream import replaced, table


@pytest.fixture
def adapted(monkeypatch):
    """Keras's classes as they are adapted for models of several processes, for this test only."""
    monkeypatch.setattr(keras.callbacks.CallbackList, "set_model", keras.callbacks.CallbackList.set_model)
    monkeypatch.setattr(mesh, "is_toolkit_strategy", lambda _: True)
    adapt.adapt_keras()


def worker(monkeypatch, *, chief):
    """A compiled model whose strategy has several processes, of which this is the chief or another."""
    for module in (callbacks, shared_files):
        monkeypatch.setattr(module, "processes", lambda _: 2)
    monkeypatch.setattr(callbacks, "is_chief", lambda _: chief)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    models.prepare(model)
    return model


@pytest.mark.parametrize("name", ["model.keras", "it's a.b.keras", "plain.weights.h5"])
def test_every_worker_saves_whole_files_and_leaves_nothing_beside_them(adapted, tmp_path, monkeypatch, name):
    model = worker(monkeypatch, chief=False)
    path = tmp_path / name
    path.write_text("an older one")
    (model.save_weights if name.endswith("h5") else model.save)(path)
    (model.load_weights if name.endswith("h5") else keras.models.load_model)(path)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_the_chief_replaces_a_file_whole_or_not_at_all(adapted, tmp_path, monkeypatch):
    model = worker(monkeypatch, chief=True)
    path = tmp_path / "some.weights.h5"
    model.save_weights(path)
    before = path.read_bytes()
    seen = []

    def failing(self, filepath, *args, **kwargs):
        seen.append(filepath)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        shared_files.save(failing, model, path)
    assert path.read_bytes() == before
    assert seen[0].name == path.name
    assert [p.name for p in tmp_path.iterdir()] == ["some.weights.h5"]


@pytest.mark.parametrize("name", ["some.weights.h5", "whole.keras"])
def test_a_save_that_fails_names_the_file_that_was_asked_for(adapted, tmp_path, monkeypatch, name):
    model = worker(monkeypatch, chief=True)
    path = tmp_path / "no such" / name
    with pytest.raises(OSError, match=re.escape(str(path))) as caught:
        (model.save_weights if name.endswith("h5") else model.save)(path)
    assert f".{name.partition('.')[0]}." not in str(caught.value)


def test_adapting_twice_changes_nothing(adapted):
    before = keras.Model.save
    adapt.adapt_keras()
    assert keras.Model.save is before


def test_a_checkpoint_of_tensorflows_is_put_in_place_whole(tmp_path, monkeypatch):
    import tensorflow as tf

    saver, name = table.owner_and_name(table.row("TrackableSaver.save"))
    monkeypatch.setattr(saver, name, getattr(saver, name))
    monkeypatch.setattr(replaced.SAVE_CHECKPOINT, "_installed", False)
    replaced.SAVE_CHECKPOINT.answer(workers=shared_files.save_checkpoint)
    it = tf.train.Checkpoint(a=tf.Variable(3.0))
    path = it.save(tmp_path / "it")
    assert path == str(tmp_path / "it-1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "it-1.data-00000-of-00001", "it-1.index"]
    it.a.assign(4.0)
    manager = tf.train.CheckpointManager(it, str(tmp_path / "kept"), max_to_keep=1)
    manager.save()
    assert manager.save() == manager.latest_checkpoint
    it.a.assign(5.0)
    it.restore(manager.latest_checkpoint)
    assert it.a.numpy() == 4.0
    assert len(list((tmp_path / "kept").iterdir())) == 3
    it.restore(path)
    assert it.a.numpy() == 3.0


@pytest.mark.parametrize("name", ["some.weights.json", "some.weights.h5"])
@pytest.mark.filterwarnings("ignore:Saving sharded weights")
def test_weights_in_several_files_are_saved_under_the_names_that_were_asked_for(adapted, tmp_path, monkeypatch, name):
    model = worker(monkeypatch, chief=False)
    for _ in range(2):  # A second time beside the older ones.
        model.save_weights(tmp_path / name, max_shard_size=1.2e-8)
    model.load_weights(tmp_path / "some.weights.json")
    index = json.loads((tmp_path / "some.weights.json").read_text())
    shards = {each for found in index["weight_map"].values() for each in ([found] if isinstance(found, str) else found)}
    assert len(shards) > 1
    assert {p.name for p in tmp_path.iterdir()} == shards | {"some.weights.json"}


@pytest.mark.parametrize("name", ["model", "new/model", "model.v2/"])
def test_a_model_is_saved_to_a_directory_that_may_be_there(adapted, tmp_path, monkeypatch, name):
    model = worker(monkeypatch, chief=False)
    for _ in range(2):
        model.save(f"{tmp_path}/{name}", zipped=False)
    assert keras.models.load_model(f"{tmp_path}/{name}").count_params() == 4
    assert [p.name for p in (tmp_path / name).parent.iterdir()] == [pathlib.Path(name).name]


def test_a_worker_asks_before_it_overwrites_what_no_other_worker_has_just_written(adapted, tmp_path, monkeypatch):
    model = worker(monkeypatch, chief=False)
    path = tmp_path / "model.keras"
    for _ in range(2):  # The second finds the first one's file in its way.
        model.save(path, overwrite=False)
    os.utime(path, (1e9, 1e9))
    with monkeypatch.context() as patched:
        patched.setattr("builtins.input", lambda _: "n")
        model.save(path, False)
        assert path.stat().st_mtime == 1e9
        patched.setattr("builtins.input", lambda _: "y")
        model.save(path, overwrite=False)
    assert path.stat().st_mtime > 1e9


def test_every_callback_of_keras_is_known_to_write_or_not():
    """For one that this list lacks: what would all workers write or send, and what do they read for it?"""
    kinds = {name for name, kind in vars(keras.callbacks).items() if isinstance(kind, type)}
    known = callbacks._WRITERS.keys() | callbacks._NO_WRITERS
    assert kinds <= known
    assert known - kinds <= {"OrbaxCheckpoint"}, "older releases of Keras lack it"
    assert not callbacks._WRITERS.keys() & callbacks._NO_WRITERS


def test_a_callback_is_quiet_while_keras_calls_it_and_the_users_in_between(adapted, tmp_path, monkeypatch):
    """A `fit` that raises, or an `evaluate`, leaves it as the user made it."""
    model = worker(monkeypatch, chief=False)
    saving = keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"))
    seen = []
    looking = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(saving.save_freq))
    given = keras.callbacks.CallbackList([saving, looking], model=model)
    given.on_train_begin()
    given.on_epoch_begin(0)
    given.on_epoch_end(0, {"loss": 1.0})
    assert seen == [callbacks._NEVER]
    assert saving.save_freq == "epoch"
    assert not (tmp_path / "model.keras").exists()
    monkeypatch.setattr(saving, "on_epoch_end", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        given.on_epoch_end(1, {"loss": 1.0})
    assert saving.save_freq == "epoch"
    saving.save_freq = 7
    with pytest.raises(StrategyError, match="save every 7 batches"):
        callbacks._check_frequencies([saving], "it is a test")


def test_a_sharded_optimizer_is_not_saved_within_an_epoch(adapted, monkeypatch, tmp_path):
    """One worker alone would wait for the others' parts."""
    model = worker(monkeypatch, chief=True)
    monkeypatch.setattr(mesh, "is_toolkit_strategy", lambda _: True)
    monkeypatch.setattr(callbacks, "options_of", lambda _: Options(optimizer_state="sharded"))
    saving = keras.callbacks.ModelCheckpoint(str(tmp_path / "model.weights.h5"), save_weights_only=True, save_freq=2)
    with pytest.raises(StrategyError, match="the optimizer's state is sharded over processes"):
        keras.callbacks.CallbackList([saving], model=model)


class Posts(keras.callbacks.RemoteMonitor):
    """The user's own, which does more."""

    calls = 0

    def on_epoch_end(self, epoch, logs=None):
        self.calls += 1
        super().on_epoch_end(epoch, logs)


@pytest.mark.parametrize("chief", [True, False])
@pytest.mark.parametrize("kind", [keras.callbacks.RemoteMonitor, Posts])
def test_only_the_chief_posts(adapted, monkeypatch, chief, kind):
    posted = []
    monkeypatch.setattr("requests.post", lambda *args, **_: posted.append(args))
    monitor = kind("http://127.0.0.1:9")
    given = keras.callbacks.CallbackList([monitor], model=worker(monkeypatch, chief=chief))
    given.on_epoch_end(0, {"loss": 1.0})
    assert len(posted) == chief
    assert getattr(monitor, "calls", 1) == 1


class Checkpointer:
    """Stands for Orbax's."""

    def __init__(self):
        self.calls = []

    def save_checkpointables(self, step, payload):
        self.calls.append(step)

    def save_checkpointables_async(self, step, payload):
        self.calls.append(step)

    def close(self):
        self.calls.append("closed")


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("chief", [True, False])
def test_all_read_what_the_chief_gives_orbax(adapted, monkeypatch, background, chief):
    """multiprocess/test_fit.py has the true one."""
    kind = getattr(keras.callbacks, "OrbaxCheckpoint", None)
    if kind is None:
        pytest.skip("OrbaxCheckpoint of Keras 3.12 is missing")
    saving = kind.__new__(kind)  # Orbax needs JAX, and isn't installed everywhere.
    keras.callbacks.Callback.__init__(saving)
    ours = {"save_freq": "epoch", "save_best_only": False, "save_on_background": background, "save_weights_only": True}
    vars(saving).update(
        ours, monitor_op=max, checkpointer=Checkpointer(), _async_futures=[], _multihost_initialized=False
    )
    model = worker(monkeypatch, chief=chief)
    read = []
    monkeypatch.setattr(keras.Model, "get_state_tree", lambda *_, **__: read.append(1) or collections.defaultdict(dict))
    monkeypatch.setattr(
        "keras.src.callbacks.orbax_checkpoint.ocp", types.SimpleNamespace(Context=contextlib.nullcontext)
    )
    given = keras.callbacks.CallbackList([saving], model=model)
    given.on_train_begin()
    given.on_epoch_end(0, {})
    for future in saving._async_futures if not chief else ():
        assert future.result()
    given.on_train_end()
    assert len(read) == 1
    assert saving.checkpointer.calls == ([0, "closed"] if chief else ["closed"])
