"""The copy of a run directory: what counts of it, who goes on from it, and that training doesn't notice it."""

import json
import logging
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import batteries
import fsspec
import keras
import limits
import numpy as np
import pytest

from toolkit.errors import CheckpointError, RunDirectoryError, StoppedBySignal
from toolkit.observe import report
from toolkit.training import Checkpoint, CheckpointStore, Run, state
from toolkit.training.copying import Copy, Times
from toolkit.training.directory import RunDirectory, choose

pytestmark = pytest.mark.slow  # Each run has a process that copies.
ROOT = pathlib.Path(__file__).parents[2]
ARRAYS, MANIFEST = "arrays.safetensors", "manifest.json"
PATIENCE = 30


TIMES = Times(beat=0.2, silence=1.0, patience=20.0, impatience=3.0, look=0.2, pause=2.0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(Copy.__init__, "__kwdefaults__", {"times": TIMES})


@pytest.fixture(params=["s3", pytest.param("file", marks=pytest.mark.long)])
def url(request, tmp_path):
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket').url}/some/run"
    return f"file://{tmp_path}/it's a copy/run"


class Place:
    """What stands at a URL, seen by another client."""

    def __init__(self, url):
        self.files, self.root = fsspec.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)

    def names(self):
        self.files.invalidate_cache()
        found = self.files.find(self.root) if self.files.exists(self.root) else []
        return sorted(path[len(self.root.rstrip("/")) + 1 :] for path in found)

    def checkpoints(self, folder="checkpoints"):
        parts = [name.split("/") for name in self.names()]
        return [each[1] for each in parts if each[0] == folder and each[2] == MANIFEST]

    def path(self, name):
        return f"{self.root}/{name}"


def vanish(copy):
    """The process that copies ends as the run's does, by kill -9."""
    if copy._process is not None:
        copy._over = True
        copy._process.kill()
        assert copy._gone(PATIENCE)


class Opened:
    """A run directory with its copy, as `Run` opens them; `save` writes a checkpoint."""

    def __init__(self, path, url, *, resume="auto", recipe="mine", keep=3):
        self.closed = False
        self.copy = Copy(url, keep=keep)
        path, resumes = choose(path, recipe=recipe, resume=resume, copy=self.copy)
        self.directory = RunDirectory(path, recipe=recipe, resume=resumes, copy=self.copy)
        self.directory.record_config({"seed": 1})
        self.store = CheckpointStore(self.directory.checkpoints, keep=keep, saved=self.copy.wake)
        self.copy.start()

    def save(self, step, **more):
        arrays = {"w": np.random.default_rng(step).normal(size=(200, 60))}
        self.store.save(Checkpoint(step=step, arrays=arrays, metadata={"at": step}), **more)

    def copied(self):
        """Waits until all is."""
        self.copy.wake()
        deadline = time.monotonic() + limits.patient(PATIENCE)
        while self.copy._done < self.copy._wanted:
            assert time.monotonic() < deadline
            assert not self.copy._over
            time.sleep(0.01)

    def close(self):
        """Ends as a run does."""
        if not self.closed:
            self.closed = True
            self.copy.finish(PATIENCE)
            self.directory.close()

    def vanish(self):
        """The machine is gone, with its disk."""
        self.closed = True
        vanish(self.copy)
        self.directory.close()
        shutil.rmtree(self.directory.path)


@pytest.fixture
def opened(tmp_path):
    """Opens a run directory on a machine of its own, by name; whatever is open is closed at the end."""
    every = []

    def open_one(machine, url, **more):
        every.append(Opened(tmp_path / machine / "run", url, **more))
        return every[-1]

    yield open_one
    for each in reversed(every):
        each.close()


def test_a_machine_with_an_empty_disk_goes_on_from_the_newest_checkpoint_of_the_copy(url, opened):
    first = opened("a", url)
    (first.directory.path / "best.keras").write_bytes(b"best")
    (first.directory.path / "tensorboard/train").mkdir(parents=True)
    (first.directory.path / "tensorboard/train/events.v2").write_bytes(b"events")
    os.mkfifo(first.directory.path / "pipe")
    (first.directory.path / ".hidden").touch()
    for step in (5, 10, 15, 20):
        first.save(step)
        first.copied()
    whole = first.store.load()
    place = Place(url)
    assert place.checkpoints() == ["step-00000010", "step-00000015", "step-00000020"] == first.store.names()
    others = {name for name in place.names() if not name.startswith("checkpoints/")}
    assert others == {"best.keras", "run.json", "tensorboard/train/events.v2", "writer.json"}
    first.vanish()
    second = opened("b", url)
    assert second.store.names() == ["step-00000020"]
    found = second.store.load()
    assert found.metadata == whole.metadata
    assert found.arrays["w"].tobytes() == whole.arrays["w"].tobytes()
    assert (second.directory.path / "best.keras").read_bytes() == b"best"
    assert (second.directory.path / "tensorboard/train/events.v2").read_bytes() == b"events"
    second.save(25)
    second.copied()
    assert place.checkpoints() == ["step-00000015", "step-00000020", "step-00000025"], "as many as here"
    if url.startswith("file"):
        assert len(list(pathlib.Path(place.root, "checkpoints").iterdir())) == 3, "no empty directories"
    second.close()
    assert "writer.json" not in place.names()


def test_a_checkpoint_without_its_manifest_does_not_count_and_goes_with_the_next(url, opened):
    first = opened("a", url)
    first.save(5)
    first.copied()
    first.vanish()
    place = Place(url)
    place.files.pipe_file(place.path("writer.json"), b"{")  # Half of it was written, and its writer vanished.
    place.files.makedirs(place.path("checkpoints/step-00000010"), exist_ok=True)
    place.files.pipe_file(place.path(f"checkpoints/step-00000010/{ARRAYS}"), b"half")
    second = opened("b", url)
    assert second.store.names() == ["step-00000005"]
    second.save(15)
    second.copied()
    assert not any("00000010" in name for name in place.names())
    assert place.checkpoints() == ["step-00000005", "step-00000015"]


@pytest.mark.long
def test_of_damaged_ones_the_one_before_is_taken_and_a_new_one_replaces_them(url, opened, caplog):
    first = opened("a", url)
    for step in (5, 10):
        first.save(step)
        first.copied()
    first.vanish()
    place = Place(url)
    data = bytearray(place.files.cat_file(place.path(f"checkpoints/step-00000010/{ARRAYS}")))
    data[len(data) // 2] ^= 1
    place.files.pipe_file(place.path(f"checkpoints/step-00000010/{ARRAYS}"), bytes(data))
    second = opened("b", url)
    assert "step-00000010 is damaged" in caplog.text
    assert second.store.names() == ["step-00000005"]
    second.save(10)
    second.copied()
    second.vanish()
    assert opened("c", url).store.load().step == 10


def test_a_disk_that_is_behind_is_brought_forward_and_one_that_is_ahead_is_copied(url, opened, tmp_path):
    first = opened("a", url)
    first.save(5)
    first.copied()
    shutil.copytree(first.directory.path, tmp_path / "kept")
    for step in (10, 15):
        first.save(step)
    first.copied()
    first.vanish()
    shutil.copytree(tmp_path / "kept", tmp_path / "b/run")
    second = opened("b", url)
    assert second.store.names() == ["step-00000005", "step-00000015"]
    vanish(second.copy)
    second.save(20)
    second.close()
    third = opened("b", url)
    third.copied()
    assert Place(url).checkpoints() == ["step-00000010", "step-00000015", "step-00000020"]


@pytest.mark.long
def test_each_call_of_fit_has_its_own_checkpoints_in_the_copy(url, opened):
    first = opened("a", url, keep=1)
    first.save(5, end_of_epoch=True)
    tuned = CheckpointStore(first.directory.path / "checkpoints-2", keep=1, saved=first.copy.wake)
    for step in (1, 2):
        tuned.save(Checkpoint(step=step, arrays={}, metadata={}))
    first.copied()
    first.vanish()
    second = opened("b", url, keep=1)
    assert second.store.names() == ["step-00000005-end"]
    assert CheckpointStore(second.directory.path / "checkpoints-2").names() == ["step-00000002"]


@pytest.mark.long
@pytest.mark.parametrize("url", ["s3"], indirect=True)
def test_names_that_lead_elsewhere_are_not_brought(url, opened, tmp_path):
    first = opened("a", url)
    first.save(5)
    first.copied()
    first.vanish()
    place = Place(url)
    place.files.pipe_file(f"{place.root}/../outside", b"x")
    place.files.pipe_file(f"{place.root}/a/../../outside", b"x")
    second = opened("b", url)
    assert second.store.names() == ["step-00000005"]
    assert not list(tmp_path.rglob("outside"))


# Whose place it is.


@pytest.mark.long
def test_an_earlier_runs_copy_is_not_overwritten(url, opened, tmp_path):
    first = opened("a", url)
    first.save(5)
    first.copied()
    first.vanish()
    before = Place(url).names()
    with pytest.raises(RunDirectoryError, match="copy of an earlier run, which would be overwritten. Add --resume"):
        opened("b", url, resume=False)
    with pytest.raises(RunDirectoryError, match="it holds a run of mine, and this is other. Name another place"):
        opened("c", url, recipe="other")
    with pytest.raises(CheckpointError, match="holds? no checkpoint|no such directory"):
        opened("d", f"{url}-other", resume=True)
    kept = opened("e", f"{url}-third")
    kept.save(7)
    kept.close()
    with pytest.raises(RunDirectoryError, match="the copy of another run than"):
        opened("e", url)
    assert Place(url).names() == before
    assert not list((tmp_path / "b/run").glob("*.json"))


def test_a_second_run_at_one_place_is_told_who_copies_there(url, opened):
    first = opened("a", url)
    first.save(5)
    first.copied()
    with pytest.raises(RunDirectoryError, match=rf"process {os.getpid()} on \S+ copies its run there. Wait for that"):
        opened("b", url)
    first.save(10)
    first.copied()
    first.vanish()
    assert opened("c", url).store.load().step == 10, "a process that has vanished is waited for, and then no more"


@pytest.mark.long
def test_who_was_taken_for_vanished_copies_no_more_and_its_run_goes_on(url, opened, caplog):
    first = opened("a", url)
    first.save(5)
    first.copied()
    place = Place(url)
    late = place.files.cat_file(place.path("writer.json"))
    first.copy._process.send_signal(signal.SIGSTOP)
    second = opened("b", url)
    place.files.pipe_file(place.path("writer.json"), late)  # It was stopped just before it said that it runs.
    second.save(10)
    second.copied()
    first.save(7)
    first.copy._process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + limits.patient(PATIENCE)
    while not first.copy._over:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "is no longer copied to" in caplog.text
    assert "copies its run there now" in caplog.text
    first.close()
    assert Place(url).checkpoints() == ["step-00000005", "step-00000010"]


@pytest.mark.parametrize(
    ("place", "module", "remedy"),
    [
        ("s3://bucket/run", "s3fs", r'Install it: pip install "tf-strategy-toolkit\[s3\]"'),
        ("gs://bucket/run", "gcsfs", r'Install it: pip install "tf-strategy-toolkit\[gcs\]"'),
        ("az://bucket/run", "adlfs", "Install it: pip install adlfs"),
        ("sftp://host/run", "paramiko", "paramiko.* Install that package with pip"),
        ("nonsense://bucket/run", "nothing", "fsspec knows no nonsense://"),
    ],
)
def test_a_place_that_nothing_installed_can_read_is_a_sentence(tmp_path, monkeypatch, place, module, remedy):
    (tmp_path / f"{module}.py").write_text("raise ImportError('it is not installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RunDirectoryError, match=rf"copy_to={place} is where this run is copied, but .*{remedy}"):
        Run(tmp_path / "run", copy_to=place)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("within", ["", "/copy", "/.."])
def test_the_run_directory_is_no_place_for_its_copy(tmp_path, within):
    with pytest.raises(RunDirectoryError, match="the run directory is .* Name a place outside of it"):
        Run(tmp_path / "some/run", copy_to=f"file://{tmp_path}/some/run{within}")


# A network that fails.


def test_a_bucket_that_refuses_is_a_sentence_at_the_start(bucket, opened):
    bucket.network.refuses = True
    with pytest.raises(RunDirectoryError, match="it can't be used .*(Denied|Forbidden).*Check its name"):
        opened("a", f"{bucket.url}/run")
    bucket.network.refuses = False
    with pytest.raises(RunDirectoryError, match="bucket"):
        opened("a", "s3://no-such-bucket/run")
    opened("a", f"{bucket.url}/run")


def test_with_a_checkpoint_on_the_disk_a_bucket_that_refuses_is_a_warning(bucket, opened, caplog):
    url = f"{bucket.url}/run"
    first = opened("a", url)
    first.save(5)
    first.copied()
    first.close()
    caplog.set_level(logging.INFO, logger="toolkit")
    bucket.network.refuses = True
    again = opened("a", url)
    assert "can't be read" in caplog.text
    again.save(10)
    deadline = time.monotonic() + limits.patient(PATIENCE)
    while "is tried again" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    bucket.network.refuses = False
    again.copied()
    assert Place(url).checkpoints() == ["step-00000005", "step-00000010"]
    assert "is complete again" in caplog.text


@pytest.mark.parametrize("fault", batteries.rows(["refuses", "slow", "cut"], "cut"))
def test_training_waits_for_no_copy_and_the_end_only_for_a_while(tmp_path, bucket, monkeypatch, caplog, fault):
    """The end waits for TOOLKIT_GRACE seconds; the copy holds what was whole before."""
    caplog.set_level(logging.INFO, logger="toolkit")
    monkeypatch.setenv("TOOLKIT_GRACE", "2")

    class Fault(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                deadline = time.monotonic() + limits.patient(PATIENCE)
                while "step-00000004-end" not in Place(bucket.url + "/run").checkpoints():
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                network = bucket.network
                network.refuses, network.delay = fault == "refuses", 60.0 if fault == "slow" else 0.0
                network.cut = 3000 if fault == "cut" else None

    trained, run = fit(tmp_path / "a", f"{bucket.url}/run", callbacks=[Fault()], width=4000)
    assert run.summary["epochs"] == 3
    assert "The copy in" in caplog.text
    assert "isn't complete" in caplog.text
    assert "Waiting up to 1 s for the copy" in caplog.text
    if fault == "cut":
        assert bucket.network.cuts
    if fault == "refuses":
        assert "failed (" in caplog.text
    vanish(run._copy)
    bucket.network.refuses, bucket.network.delay, bucket.network.cut = False, 0.0, None
    monkeypatch.setenv("TOOLKIT_GRACE", "60")
    again, run = fit(tmp_path / "b", f"{bucket.url}/run", resume="auto", width=4000)
    assert run.summary["resumed_from_step"] == 4
    assert same(again, trained)


# Whole trainings.


class Die(keras.callbacks.Callback):
    def __init__(self, step, wait=lambda: None):
        super().__init__()
        self.wait, self.count = wait, [step]

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == self.count[0]:
            self.wait()
            os.kill(os.getpid(), signal.SIGTERM)


def fit(path, url, *, callbacks=(), resume=False, width=8, copies=True):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(width, "relu"), keras.layers.Dropout(0.5)])
    model.add(keras.layers.Dense(1))
    model.compile("adam", "mse")
    x = np.random.default_rng(1).normal(size=(32, 5)).astype("float32")
    more = {"copy_to": url} if copies else {}
    with Run(path, recipe="mine", resume=resume, checkpoint_steps=3, best="loss", **more) as run:
        run.fit(model, x, x[:, :1], batch_size=8, epochs=3, callbacks=list(callbacks))
    return state.capture(model), run


def same(one, other):
    return list(one) == list(other) and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.smoke
def test_a_run_whose_machine_vanished_ends_elsewhere_with_the_weights_of_an_undisturbed_one(tmp_path, url):
    undisturbed, _ = fit(tmp_path / "whole", url, copies=False)
    with pytest.raises(StoppedBySignal):
        fit(tmp_path / "a", url, callbacks=[Die(7)])
    place = Place(url)
    assert "step-00000007" in place.checkpoints()
    assert "summary.json" in place.names()
    shutil.rmtree(tmp_path / "a")
    weights, run = fit(tmp_path / "b", url, resume="auto")
    assert run.summary["resumed_from_step"] == 7
    assert same(weights, undisturbed)
    assert {"model.keras", "history.csv", "best.keras", "summary.json"} <= set(place.names())
    assert "report.html" not in place.names()
    report.write_after(run)
    assert "report.html" in place.names()
    for name in ("history.csv", "summary.json", "model.keras", "report.html"):
        assert place.files.cat_file(place.path(name)) == (tmp_path / "b" / name).read_bytes()


KILLED = """
import pathlib, sys
import numpy as np
from toolkit.training import Checkpoint, CheckpointStore
from toolkit.training.copying import Copy, Times
from toolkit.training.directory import RunDirectory, choose

folder, url = pathlib.Path(sys.argv[1]), sys.argv[2]
copy = Copy(url, keep=2, times=Times(beat=0.1, silence=0.5, look=0.1))
path, resumes = choose(folder, recipe="mine", resume="auto", copy=copy)
directory = RunDirectory(path, recipe="mine", resume=resumes, copy=copy)
directory.record_config({})
store = CheckpointStore(directory.checkpoints, keep=2, saved=copy.wake)
copy.start()
number = store.load().metadata["number"] if resumes else 0
print("resumed", number, flush=True)
numbers = np.random.default_rng(0).normal(size=(64, 1024))
while True:
    number += 1
    arrays = {"numbers": numbers, "number": np.array(number)}
    store.save(Checkpoint(step=number, arrays=arrays, metadata={"number": number}))
    (path / "best.keras").write_text(str(number))
    wanted = copy._wanted
    while copy._done < wanted:
        pass
    print("copied", number, flush=True)
"""


@pytest.mark.long
def test_after_each_of_20_kills_in_the_midst_of_copying_the_last_copy_counts(tmp_path, url):
    """kill -9 at any moment, and the disk goes too: the next machine has what was last copied, or the one after."""
    draw, copied, halves = random.Random(4), 0, 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    for kill in range(20):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / f"machine-{kill}"), url],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        lines = []
        for line in process.stdout:
            lines.append(line.split())
            if lines[-1][0] == "copied":
                time.sleep(draw.random() * 0.2)
                process.kill()
                break
        rest, errors = process.communicate(timeout=60)
        assert lines, errors
        lines += [line.split() for line in rest.splitlines()]
        assert lines[0][0] == "resumed"
        assert copied <= int(lines[0][1]) <= copied + 1, (kill, copied, lines[0], errors)
        assert lines[-1][0] == "copied", errors
        copied = int(lines[-1][1])
        shutil.rmtree(tmp_path / f"machine-{kill}")
        place = Place(url)
        folders = {name.split("/")[1] for name in place.names() if name.startswith("checkpoints/")}
        halves += folders != set(place.checkpoints())
        assert 1 <= len(place.checkpoints()) <= 3
        json.loads(place.files.cat_file(place.path("run.json")))
    assert copied >= 20
    assert halves or url.startswith("file"), "the kills should strike while something is being copied"
