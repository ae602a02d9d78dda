"""A worker whose input is slow is named as the one that keeps the others waiting, by the launcher and in the report."""

import re

import processes
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

SCRIPT = """
import os, sys, time
import keras, numpy as np, tensorflow as tf
import toolkit

strategy = toolkit.strategies.create("multi_worker")
keras.utils.set_random_seed(1)


def slowly(x):
    time.sleep(0.02 * (os.environ["RANK"] == "1"))
    return x


def load(x, y):
    return tf.ensure_shape(tf.numpy_function(slowly, [x], tf.float32), x.shape), y


examples = np.ones((16 * 1600, 8), "float32"), np.ones((16 * 1600, 1), "float32")
data = tf.data.Dataset.from_tensor_slices(examples).batch(16).map(load)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
if sys.argv[1] == "run":
    with toolkit.training.Run("run") as run:
        run.fit(model, data)
    toolkit.observe.report.write_after(run)
else:
    model.fit(data, verbose=0)
"""


@pytest.mark.parametrize("kind", ["run", "fit"])
def test_it_is_named(tmp_path, kind):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = processes.launch(tmp_path, "train.py", kind)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    said = r"note: worker:1 keeps the others waiting for (\d+)% of their time: by its input, or by what it does"
    assert int(re.search(said, done.stdout)[1]) > 40
    if kind == "run":
        assert "worker:1 kept the others waiting for" in (tmp_path / "run" / "report.html").read_text()
