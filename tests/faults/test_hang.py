"""A worker that hangs or is stopped while the others wait for it in a collective is noticed and named."""

import os
import re
import signal
import time

import faulty
import limits
import processes
import pytest

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = """
import json, os, time
import numpy, keras, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


class Stuck(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and me == 1:
            print("stuck at", time.time(), flush=True)
            {how}


with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(numpy.ones((400, 3)), numpy.ones((400, 1)), batch_size=4, verbose=2, callbacks=[Stuck()])
"""
STALL = 8


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("what", "how"),
    [
        pytest.param("hang in Python", "time.sleep(1000)", marks=pytest.mark.first),
        ("hang in C that holds the interpreter lock", "import ctypes; ctypes.PyDLL(None).sleep(1000)"),
    ],
    ids=["python", "c"],
)
def test_a_hang_is_named_with_its_line(tmp_path, what, how, measured):
    (tmp_path / "train.py").write_text(SCRIPT.format(how=how))
    done = processes.launch(tmp_path, f"--stall_timeout={STALL}", "--log_dir=logs", "train.py", limit=120)
    seconds = time.time() - float(re.search(r"stuck at ([\d.]+)", done.stdout)[1])
    measured(f"{what} of worker:1, --stall_timeout={STALL}", seconds_to_group_down=seconds)
    assert done.returncode == 1
    assert re.search(
        r"The others wait for worker:1, which is at train\.py, line \d+, in on_train_batch_end\.",
        done.stderr,
    ), done.stderr[-2000:]
    assert "most recent call first" in next((tmp_path / "logs").glob("launch-*/worker-0.log")).read_text()
    limits.keep(seconds, STALL + faulty.within(15))


PIPELINE = """
import json, os, time
import numpy, keras, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def load(number):
    if number == 40 and me == 1:
        print("stuck at", time.time(), flush=True)
        {how}
    return numpy.float32([1, 2, 3])


def whole(number):
    x = tf.numpy_function(load, [number], tf.float32)
    path = tf.where((number == 40) & (me == 1), "slow file", "file")
    return tf.ensure_shape(x, (3,)) + tf.cast(tf.strings.length(tf.io.read_file(path)), tf.float32), 1.0


with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit({data}, verbose=2)
"""


MAPPED = "tf.data.Dataset.range(400).map(whole).batch(4)"
GENERATED = "((numpy.stack([load(n) for n in range(4 * m, 4 * m + 4)]), numpy.ones(4)) for m in range(100))"


@pytest.mark.parametrize(
    ("data", "how", "said"),
    [
        (MAPPED, "time.sleep(1000)", r"The input of worker:1 is at train.py, line \d+, in load\."),
        (MAPPED, "pass", r"The input of worker:1 is at \S*slow file\."),
        (GENERATED, "time.sleep(1000)", r"The others wait for worker:1, which is at train.py, line \d+, in load\."),
    ],
    ids=["a Python function", "a file", "a generator"],
)
def test_a_hang_of_the_input_pipeline_is_named(tmp_path, data, how, said, measured):
    (tmp_path / "train.py").write_text(PIPELINE.format(how=how, data=data))
    (tmp_path / "file").touch()
    if how == "pass":
        os.mkfifo(tmp_path / "slow file")
    else:
        (tmp_path / "slow file").touch()
    done = processes.launch(tmp_path, f"--stall_timeout={STALL}", "train.py", limit=120)
    seconds = time.time() - float(re.search(r"stuck at ([\d.]+)", done.stdout)[1])
    measured(f"hang of worker:1's input, --stall_timeout={STALL}", seconds_to_group_down=seconds)
    assert done.returncode == 1
    assert re.search(said, done.stderr), done.stderr[-3000:]
    limits.keep(seconds, STALL + faulty.within(15))


@pytest.mark.parametrize("heartbeat", [pytest.param(4, marks=pytest.mark.first), 15])
def test_a_worker_that_is_stopped_is_named_within_the_heartbeats_timeout(tmp_path, heartbeat, measured):
    (tmp_path / "train.py").write_text(SCRIPT.format(how="pass").replace("verbose=2", "epochs=1000, verbose=2"))
    job = processes.Job(tmp_path, ["--workers=2", f"--heartbeat_timeout={heartbeat}"], ["train.py"])
    try:
        job.until(r"Epoch 2/")
        stopped = job.kill("worker:1", signal.SIGSTOP)
        assert job.wait(limit=60) != 0
    finally:
        job.process.kill()
        job.process.wait()
    seconds = time.monotonic() - stopped
    measured(f"SIGSTOP of worker:1, --heartbeat_timeout={heartbeat}", seconds_to_group_down=seconds)
    assert "worker:1 failed first: it was stopped by a signal (SIGSTOP or the like)" in job.text
    limits.keep(seconds, heartbeat + faulty.within(10))
