"""Damaged, half-written and unwritable checkpoints: none is loaded, and a whole one always is."""

import pathlib
import random
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from toolkit.errors import CheckpointError
from toolkit.support import files
from toolkit.training import Checkpoint, CheckpointStore

ARRAYS, MANIFEST = "arrays.safetensors", "manifest.json"
DAMAGES = 200


def save(store, step, **more):
    """Random numbers, so that no part of a checkpoint is like another's, or all zeros."""
    numbers = np.random.default_rng(step)
    arrays = {f"w{n}": numbers.normal(size=(n + 1, 40)).astype(np.float32) for n in range(4)}
    path = store.save(Checkpoint(step=step, arrays=arrays, metadata={"position": {"epoch": step}, **more}))
    return path, arrays


def truncate(draw, path, before):
    file = path / draw.choice((ARRAYS, MANIFEST))
    data = file.read_bytes()
    file.write_bytes(data[: draw.randrange(len(data) - 1)])  # Without its last newline a manifest says the same.


def flip(draw, path, before):
    file = path / draw.choice((ARRAYS, MANIFEST))
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def delete(draw, path, before):
    (path / draw.choice((ARRAYS, MANIFEST))).unlink()


def swap(draw, path, before):
    """The arrays of the two are exchanged: neither is whole any more, so the third is to be used."""
    mine, theirs = (path / ARRAYS).read_bytes(), (before / ARRAYS).read_bytes()
    (path / ARRAYS).write_bytes(theirs)
    (before / ARRAYS).write_bytes(mine)
    return "both"


def old_manifest(draw, path, before):
    shutil.copy(before / MANIFEST, path / MANIFEST)


def whole_old_one(draw, path, before):
    """The earlier one under the later one's name: each file fits the other."""
    shutil.rmtree(path)
    shutil.copytree(before, path)


def zero(draw, path, before):
    file = path / draw.choice((ARRAYS, MANIFEST))
    data = bytearray(file.read_bytes())
    start = draw.randrange(len(data) - 8)
    block = data[start : start + draw.choice((8, 64, 512))]
    data[start : start + len(block)] = bytes(len(block))
    file.write_bytes(data)


@pytest.mark.slow
def test_of_200_damaged_ones_none_is_loaded_and_the_one_before_is(tmp_path, caplog):
    draw = random.Random(20)
    kinds = [truncate, flip, delete, swap, old_manifest, whole_old_one, zero]
    store = CheckpointStore(tmp_path / "checkpoints")
    found = 0
    for number in range(DAMAGES):
        shutil.rmtree(store.directory, ignore_errors=True)
        caplog.clear()
        saved = {step: save(store, step) for step in (10, 20, 30)}
        kind = kinds[number % len(kinds)]
        both = kind(draw, saved[30][0], saved[20][0]) == "both"
        loaded = store.load()
        whole = 10 if both else 20
        assert loaded.step == whole, f"{number}: {kind.__name__}"
        assert all(np.array_equal(loaded.arrays[name], array) for name, array in saved[whole][1].items())
        assert "step-00000030 is damaged" in caplog.text
        assert ("step-00000020 is damaged" in caplog.text) is both
        found += 1
    assert found == DAMAGES


KILLED = """
import os, pathlib, random, signal, sys, time
import numpy as np
from toolkit.training import Checkpoint, CheckpointStore

folder, kills, same = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "same"
assert "tensorflow" not in sys.modules
store, draw = CheckpointStore(folder), random.Random(3)
numbers = np.random.default_rng(0).normal(size=(64, 1024))

def write(told, number):
    while True:
        number += 1
        arrays = {"numbers": numbers, "number": np.array(number)}
        store.save(Checkpoint(step=1 if same else number, arrays=arrays, metadata={"number": number}))
        os.write(told, b"%d\\n" % number)

number, written, aside = 0, 0, 0
for kill in range(kills):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        write(writing, number)
    os.close(writing)
    with open(reading) as lines:
        first = lines.readline()  # It is in its loop: now at any moment.
        time.sleep(draw.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = [int(line) for line in (first + lines.read()).split()]
    found = store.load()
    number = found.metadata["number"]
    assert int(found.arrays["number"]) == number and np.array_equal(found.arrays["numbers"], numbers)
    assert told[-1] <= number <= told[-1] + 1, (kill, told[-1], number)
    written += len(told)
    aside += any(entry.name.startswith(".") for entry in folder.iterdir())
store.save(Checkpoint(step=10**6, arrays={}, metadata={}))
left = [entry.name for entry in folder.iterdir() if entry.name.startswith((".", "damaged"))]
assert not left, left
print(f"{kills} of {kills} kills, {written} checkpoints reported, {aside} kills in the midst of something")
"""


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["growing", "same"])
def test_after_each_of_100_kills_in_the_midst_of_saving_the_last_one_is_there(tmp_path, steps):
    """The last that was reported as written, or the next, that wasn't yet; also if it is the same step again."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "checkpoints"), "100", steps],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=pathlib.Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "100 of 100 kills" in done.stdout
    struck = int(re.search(r"(\d+) kills in the midst", done.stdout)[1])
    assert struck > 30, f"the kills should strike while something is being done: {done.stdout}"


def test_one_that_was_to_be_replaced_counts_until_it_is(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    save(store, 4, of="first")
    rename = pathlib.Path.rename

    def killed(self, target):
        if self.name.startswith(".writing-"):
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as broken:
        broken.setattr(pathlib.Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save(store, 4, of="second")
    assert store.names() == ["step-00000004"]
    assert store.newest(after=0).metadata["of"] == "first"
    assert store.load().metadata["of"] == "first"
    save(store, 4, of="third")
    assert store.load().metadata["of"] == "third"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000004"]


def test_files_and_directories_are_synced_before_what_stands_on_them_is_renamed(tmp_path, monkeypatch):
    events = []
    sync, rename = files.os.fsync, pathlib.Path.rename

    def note_sync(descriptor):
        events.append(("sync", pathlib.Path(f"/proc/self/fd/{descriptor}").readlink().name))
        sync(descriptor)

    def note_rename(self, target):
        events.append(("rename", self.name))
        return rename(self, target)

    monkeypatch.setattr("os.fsync", note_sync)
    monkeypatch.setattr(pathlib.Path, "rename", note_rename)
    save(CheckpointStore(tmp_path / "run" / "checkpoints"), 1)
    aside = ".writing-step-00000001"
    assert events == [
        ("sync", "run"),
        ("sync", tmp_path.name),
        ("sync", ARRAYS),
        ("sync", f".{MANIFEST}.writing"),
        ("sync", aside),  # The directory's entries, after the manifest's own rename.
        ("rename", aside),
        ("sync", "checkpoints"),
    ]


DISKS = """
import os, pathlib, subprocess, sys
import numpy as np
from toolkit.training import Checkpoint, CheckpointStore

disk = pathlib.Path(sys.argv[1])
store = CheckpointStore(disk / "checkpoints")
def save(step, size=1000):
    arrays = {"w": np.random.default_rng(step).normal(size=size)}
    try:
        store.save(Checkpoint(step=step, arrays=arrays, metadata={}))
    except OSError as error:
        print(step, "failed:", error)
    print("loads", store.load().step, sorted(entry.name for entry in store.directory.iterdir()))
save(1)
save(2, size=100_000)
with open(disk / "ballast", "wb", buffering=0) as file:
    try:
        while True: file.write(bytes(512))
    except OSError:
        pass
save(3)
(disk / "ballast").unlink()
save(4)
subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
save(5)
subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
save(6)
"""


@pytest.mark.first
@pytest.mark.slow
def test_a_full_and_a_read_only_disk_cost_the_checkpoint_and_no_other(tmp_path):
    mount = 'mount -t tmpfs -o size=400k tmpfs "$1" && exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, DISKS],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=pathlib.Path(__file__).parents[2],
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    lines = done.stdout.splitlines()
    name = "step-0000000{}".format
    assert [line for line in lines if line.startswith("loads")] == [
        f"loads 1 {[name(1)]}",
        f"loads 1 {[name(1)]}",
        f"loads 1 {[name(1)]}",
        f"loads 4 {[name(1), name(4)]}",
        f"loads 4 {[name(1), name(4)]}",
        f"loads 6 {[name(1), name(4), name(6)]}",
    ], done.stdout + done.stderr
    for step, words in ((2, "No space left"), (3, "No space left"), (5, "Read-only file system")):
        assert any(line.startswith(f"{step} failed: ") and words in line for line in lines), done.stdout


def test_a_checkpoint_of_another_step_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    path, _ = save(store, 5)
    path.rename(tmp_path / "step-00000009")
    with pytest.raises(CheckpointError, match="is that of step 5"):
        store.load()
