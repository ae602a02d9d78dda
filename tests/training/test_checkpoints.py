import hashlib
import json
import os
import shutil
import threading
import tracemalloc
import weakref

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from toolkit.errors import CheckpointError, RunDirectoryError
from toolkit.training import Checkpoint, CheckpointStore, Run, arrays_file
from toolkit.training.arrays import Arrays, Later
from toolkit.training.checkpoints import Writing

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


def test_one_array_at_a_time_is_in_memory_while_a_checkpoint_is_written_and_read(tmp_path):
    alive = []

    def made(name):
        assert not any(each() is not None for each in alive), "the array before it is still there"
        array = np.full((1000,), float(name))
        alive.append(weakref.ref(array))
        return array

    kinds = {"shape": (1000,), "dtype": np.dtype(float)}
    arrays = Arrays({str(name): Later(read=lambda name=name: made(name), **kinds) for name in range(5)})
    store = CheckpointStore(tmp_path)
    path = store.save(Checkpoint(step=1, arrays=arrays, metadata={}))
    assert len(alive) == 5
    loaded = store.load()
    shutil.rmtree(path)  # As another process may do while this one reads.
    tracemalloc.start()
    try:
        for name, array in loaded.arrays.items():
            assert array.tolist() == [float(name)] * 1000
            del array
        assert tracemalloc.get_traced_memory()[1] < 3 * 8 * 1000 + 64_000
    finally:
        tracemalloc.stop()


def test_other_programs_read_the_arrays_by_the_library_of_their_format(tmp_path):
    written = load_file(save(CheckpointStore(tmp_path), 1) / "arrays.safetensors")
    assert set(written) == set(ARRAYS)
    for name, array in written.items():
        assert (array.tobytes(), array.shape) == (ARRAYS[name].tobytes(), ARRAYS[name].shape)


@pytest.mark.parametrize("offsets", [[0, 99_999], [-8, 0], [8, 0], [0, 4], ["0", "8"], [0]], ids=str)
def test_a_header_that_lies_is_damaged_although_its_checksum_is_right(tmp_path, offsets):
    from toolkit.training import checkpoints

    store = CheckpointStore(tmp_path)
    save(store, 1)
    path = store.save(Checkpoint(step=2, arrays={"w": np.zeros(1)}, metadata={}))
    file, manifest = path / "arrays.safetensors", json.loads((path / "manifest.json").read_text())
    header = json.dumps({"w": {"dtype": "F64", "shape": [1], "data_offsets": offsets}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    del manifest["manifest_sha256"]
    manifest["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest["manifest_sha256"] = checkpoints._manifest_sum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert store.load().step == 1


@pytest.mark.parametrize("fails_at", [None, 0, 2])
def test_what_all_processes_read_together_is_read_to_its_end_by_the_thread_that_trains(tmp_path, monkeypatch, fails_at):
    read = []

    def made(number):
        read.append((number, threading.current_thread() is threading.main_thread()))
        return np.full((3,), float(number))

    def together(number):
        return Later(shape=(3,), dtype=np.dtype(float), read=lambda: made(number), together=True)

    put = arrays_file.raw
    written = []

    def full(array):
        written.append(array)
        if len(written) - 1 == fails_at:
            raise OSError(28, "No space left on device")
        return put(array)

    monkeypatch.setattr(arrays_file, "raw", full)
    arrays = Arrays.joined({"own": np.ones(1, "int8")}, Arrays({str(number): together(number) for number in range(4)}))
    store = CheckpointStore(tmp_path)
    writing = Writing(store, Checkpoint(step=1, arrays=arrays, metadata={}), end_of_epoch=False)
    assert read == [(number, True) for number in range(4)]
    if fails_at is None:
        writing.finish()
        assert [store.load().arrays[str(number)][0] for number in range(4)] == [0, 1, 2, 3]
    else:
        with pytest.raises(OSError, match="No space left"):
            writing.finish()
        assert not store.names()


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
