"""Nobody but owner and group may write what a run leaves, whatever the umask is; and no umask is loosened."""

import contextlib
import os
import stat
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from toolkit.support import files
from toolkit.training import Checkpoint, CheckpointStore, Run, follow
from toolkit.training.directory import RunDirectory


@contextlib.contextmanager
def masked(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        assert os.umask(before) == mask, "the umask is the user's again"


def looser_than(folder, forbidden):
    """The paths under a folder, and itself, that have one of these bits."""
    found = [folder, *folder.rglob("*")]
    return [str(path) for path in found if stat.S_IMODE(path.lstat().st_mode) & forbidden]


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "forbidden"), [(0o000, 0o002), (0o022, 0o022), (0o077, 0o077)])
def test_a_whole_run(tmp_path, mask, forbidden):
    with masked(mask):
        with Run(tmp_path / "above" / "run", recipe="test") as run:
            run.record_config(seed=1)
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            run.fit(model, np.ones((8, 2)), np.ones((8, 1)), batch_size=4)
        data = tf.data.Dataset.from_tensors((np.ones((4, 2)), np.ones((4, 1))))
        evaluating = keras.models.clone_model(model)
        evaluating.compile("sgd", "mse")
        os.utime(run.path / "summary.json", (2**33, 2**33))  # As if the run ended while the evaluator follows.
        follow(run.path, evaluating, data, recipe="test")
    names = {path.name for path in (tmp_path / "above" / "run").rglob("*")}
    assert {"model.keras", "summary.json", "history.csv", "manifest.json", "evaluation.csv", "train"} <= names
    assert looser_than(tmp_path / "above", forbidden) == []


def test_directory_and_checkpoints_without_a_run(tmp_path):
    with masked(0):
        RunDirectory(tmp_path / "a" / "run", recipe="test").close()
        CheckpointStore(tmp_path / "b" / "c").save(Checkpoint(step=1, arrays={"x": np.ones(3)}, metadata={}))
    assert looser_than(tmp_path / "a", 0o002) == looser_than(tmp_path / "b", 0o002) == []


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--log_dir=logs/mine"]])
def test_the_launchers_logs_but_not_the_users_own_files(tmp_path, flags):
    (tmp_path / "train.py").write_text("import sys; open('own', 'w'); sys.exit(3)")
    with masked(0):
        done = subprocess.run(
            [sys.executable, "-m", "toolkit", "launch", "--workers=2", *flags, "train.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            timeout=60,
        )
    assert done.returncode == 3
    logs = tmp_path / ("logs" if flags else "runs")
    assert {"worker-0.log", "events.jsonl", "failure.json"} <= {path.name for path in logs.rglob("*")}
    assert looser_than(logs, 0o002) == []
    assert looser_than(tmp_path, 0o002)[-1].endswith("own"), "a task keeps the user's umask"


def test_the_umask_is_put_back_after_an_error():
    with masked(0o001), contextlib.suppress(ValueError), files.guarded():
        assert os.umask(0o003) == 0o003
        raise ValueError


def test_threads_that_overlap_leave_the_umask_as_it_was():
    before = os.umask(0o022)
    try:
        first_in, second_out = threading.Event(), threading.Event()

        def outer():
            with files.guarded():
                first_in.set()
                second_out.wait(10)

        thread = threading.Thread(target=outer)
        thread.start()
        first_in.wait(10)
        with files.guarded():
            second_out.set()
            thread.join()
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
