"""A worker that hangs in Python while the others wait for it in a collective is named, with its line."""

import re
import signal
import time

import processes
import pytest

SCRIPT = """
import json, os, time
import numpy, keras, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


class Stuck(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and me == 1:
            {how}


with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(numpy.ones((400, 3)), numpy.ones((400, 1)), batch_size=4, verbose=2, callbacks=[Stuck()])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["time.sleep(1000)", "import ctypes; ctypes.PyDLL(None).sleep(1000)"])
def test_it_is_named(tmp_path, how):
    (tmp_path / "train.py").write_text(SCRIPT.format(how=how))
    began = time.monotonic()
    done = processes.launch(tmp_path, "--stall_timeout=8", "--grace=2", "train.py", limit=120)
    assert done.returncode == 1
    assert re.search(
        r"Not in the collective that the others wait in: worker:1 at train.py, line \d+, in on_train_batch_end\.",
        done.stderr,
    ), done.stderr[-2000:]
    (log,) = tmp_path.glob("runs/*/worker-0.log")
    assert "most recent call first" in log.read_text()
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_named_within_the_heartbeats_timeout(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(how="pass").replace("verbose=2", "epochs=1000, verbose=2"))
    job = processes.Job(tmp_path, ["--workers=2", "--heartbeat_timeout=4", "--grace=2"], ["train.py"])
    try:
        job.until(r"Epoch 2/")
        stopped = job.kill("worker:1", signal.SIGSTOP)
        assert job.wait(limit=60) != 0
    finally:
        job.process.kill()
        job.process.wait()
    assert "worker:1 failed first: it was stopped by a signal, SIGSTOP or the like" in job.text
    assert time.monotonic() - stopped < 4 + 8
