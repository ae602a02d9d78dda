"""The guide's script of one's own, as it stands: killed and started again, it ends with the same weights."""

import json
import os
import pathlib
import re
import sys
import time

import limits
import numpy as np
import preloaded
import processes
import pytest
import tensorflow as tf

pytestmark = pytest.mark.slow

GUIDE = (processes.ROOT / "docs/guides/resume.md").read_text()
SCRIPT = re.search(r"```py\n(import keras\n.*?write_after\(run\)\n)```", GUIDE, re.DOTALL)[1]
MOST_LINES = 20
EXAMPLES = 3000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with the script and its data."""
    made = tmp_path_factory.mktemp("own script")
    lines = SCRIPT.strip("\n").splitlines()
    assert len([line for line in lines if line]) <= MOST_LINES
    (made / "train.py").write_text("\n".join(lines))
    rows = np.random.default_rng(1).normal(size=(EXAMPLES, 9)).astype(np.float32)
    with tf.io.TFRecordWriter(str(made / "examples.tfrecord")) as file:
        for row in rows:
            file.write(tf.io.serialize_tensor(row).numpy())
    return made


def start(folder, place, workers):
    """Starts the script in a directory of its own, which holds the same data."""
    (folder / place).mkdir(exist_ok=True)
    for name in ("train.py", "examples.tfrecord"):
        if not (folder / place / name).exists():
            (folder / place / name).symlink_to(folder / name)
    output = (folder / place / "output").open("ab")
    launch = ["-m", "toolkit", "launch", "--show=all", f"--workers={workers}"] if workers > 1 else []
    with output:
        return preloaded.Popen(
            [sys.executable, *launch, "train.py"],
            cwd=folder / place,
            env={**os.environ, "PYTHONPATH": str(processes.ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=output,
            stderr=output,
        )


def finish(process, *, limit=250):
    try:
        return process.wait(timeout=limit)
    finally:
        process.kill()
        process.wait()


@pytest.mark.smoke
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_killed_and_started_again_it_ends_with_the_same_weights(folder, workers):
    whole, killed = f"whole {workers}", f"killed {workers}"
    assert finish(start(folder, whole, workers)) == 0, (folder / whole / "output").read_text()[-3000:]
    summary = json.loads((folder / whole / "runs/mine/summary.json").read_text())
    assert summary["replicas"] == workers
    assert {"loss", "mae", "val_loss", "val_mae"} <= set(summary)
    assert (folder / whole / "runs/mine/report.html").exists()
    process = start(folder, killed, workers)
    checkpoints = folder / killed / "runs/mine/checkpoints"
    deadline = time.monotonic() + limits.patient(200)
    # In the midst of the second epoch or later: 79 steps are one.
    while not any(int(path.name[5:13]) > 79 for path in checkpoints.glob("step-*")):
        assert time.monotonic() < deadline
        assert process.poll() is None, (folder / killed / "output").read_text()[-3000:]
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (folder / killed / "runs/mine/summary.json").exists(), "it was over before it was killed"
    assert finish(start(folder, killed, workers)) == 0, (folder / killed / "output").read_text()[-3000:]
    resumed = json.loads((folder / killed / "runs/mine/summary.json").read_text())
    assert resumed["resumed_from_step"] > 0
    assert resumed["weights_sha256"] == summary["weights_sha256"]
    for row, other in zip(figures(folder / killed), figures(folder / whole), strict=True):
        # The sums of two workers are added in another order where they are restored.
        assert row == (other if workers == 1 else pytest.approx(other, rel=1e-5))


def figures(place: pathlib.Path):
    """The rows of history.csv without what depends on the clock."""
    rows = (place / "runs/mine/history.csv").read_text().splitlines()[1:]
    return [[float(value) for value in row.split(",")[:6]] for row in rows]
