import json
import os

import ml_dtypes
import numpy as np
import pytest

from toolkit.errors import CheckpointError, RunDirectoryError
from toolkit.training import Checkpoint, CheckpointStore, Run

ARRAYS = {
    "weight": np.arange(600, dtype=np.float32).reshape(20, 30),
    "step": np.array(7, np.int64),
    "seed": np.array([1, 2], np.uint32),
    "half": np.array([1.5, -2], ml_dtypes.bfloat16),
    "empty": np.zeros((0, 3), np.float16),
    "flag": np.array(True),
}


def save(store, step, **arguments):
    return store.save(Checkpoint(step=step, arrays=ARRAYS, metadata={"at": step}), **arguments)


def test_what_is_saved_comes_back(tmp_path):
    store = CheckpointStore(tmp_path / 'it\'s "here" too')
    save(store, 3)
    loaded = store.load()
    assert loaded.step == 3
    assert loaded.metadata == {"at": 3}
    assert list(loaded.arrays) == sorted(ARRAYS) or set(loaded.arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert loaded.arrays[name].dtype == array.dtype
        assert loaded.arrays[name].shape == array.shape
        assert loaded.arrays[name].tobytes() == array.tobytes()


def test_the_newest_are_kept_and_the_end_of_an_epoch_is_newer_than_its_last_step(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (5, 10):
        save(store, step)
    save(store, 10, end_of_epoch=True)
    assert store.names() == ["step-00000010", "step-00000010-end"]


@pytest.mark.parametrize(
    "make", [lambda path: CheckpointStore(path, keep=0), lambda path: Run(path, keep=-1, chief=False)]
)
def test_a_run_keeps_at_least_one(tmp_path, make):
    with pytest.raises(
        RunDirectoryError, match=r"keep=(0|-1) says how many checkpoints to keep, but .* Give keep=1 or more"
    ):
        make(tmp_path)


def damage_flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["arrays.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", [damage_flip, os.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_one_is_said_aloud_and_the_one_before_it_used(tmp_path, caplog, file, damage):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    damage(save(store, 2) / file)
    assert store.load().step == 1
    assert "step-00000002 is damaged" in caplog.text
    assert (tmp_path / "damaged-step-00000002").is_dir()


def test_one_that_was_being_replaced_when_its_process_was_killed_is_found_and_what_was_unfinished_goes(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    path = save(store, 2)
    path.rename(path.with_name(f".replaced-{path.name}"))  # As it is between the two renames.
    (tmp_path / ".writing-step-00000003").mkdir()
    assert store.load().step == 2
    save(store, 4)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        ".replaced-step-00000002", "step-00000001", "step-00000004"
    ]  # fmt: skip


def test_a_manifest_that_says_something_else_is_damaged(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    path = save(store, 2) / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "metadata": {**manifest["metadata"], "epoch": 7}}))
    assert store.load().step == 1
    assert "doesn't match its own SHA-256" in caplog.text
    assert store.names() == ["step-00000001"]


def test_nothing_whole_is_an_error_that_names_each(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        store.load()
    for step in (1, 2):
        damage_flip(save(store, step) / "arrays.safetensors")
    with pytest.raises(CheckpointError, match="step-00000002.*step-00000001"):
        store.load()
