"""Files and callbacks of several workers, with faults that two processes hardly have (multiprocess/test_fit.py)."""

import re

import keras
import pytest

from toolkit.errors import StrategyError
from toolkit.strategies.exchange import mesh
from toolkit.strategies.fit import adapt, callbacks, models
from toolkit.strategies.processes import shared_files


@pytest.fixture
def adapted(monkeypatch):
    """Keras's classes as they are adapted for models of several processes, for this test only."""
    monkeypatch.setattr(keras.callbacks.CallbackList, "set_model", keras.callbacks.CallbackList.set_model)
    monkeypatch.setattr(mesh, "made_here", lambda _: True)
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
    assert seen[0].name.endswith(".weights.h5")
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

    monkeypatch.setattr(shared_files.TrackableSaver, "save", shared_files.TrackableSaver.save)
    shared_files.adapt_checkpoints()
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


def test_a_checkpoint_callback_may_be_given_to_a_second_fit(adapted, tmp_path, monkeypatch):
    """One that ended in an exception has left it quiet on a worker that isn't chief: for the next, it is the user's."""
    model = worker(monkeypatch, chief=False)
    saving = keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"))
    for _ in range(2):
        given = keras.callbacks.CallbackList([saving], model=model)
        assert saving.save_freq == callbacks._NEVER
    callbacks._unquieten(given)
    assert saving.save_freq == "epoch"
    saving.save_freq = 7
    with pytest.raises(StrategyError, match="save every 7 batches"):
        callbacks._check_frequencies([saving], "it is a test")
