"""Ray Train: the guide's script on a real Ray of two workers, one of which is killed; and `RayReport` elsewhere."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile

import keras
import numpy as np
import processes
import psutil
import pytest

import toolkit
from toolkit.errors import RequestError

on_ray = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray isn't here: pip install -e '.[ray]'"),
]
# Put before the guide's script: its second worker ends itself once, in the third epoch, and Ray keeps to two cores.
KILLED = """
import os, pathlib, signal
import keras
import ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=TEMPORARY)

class Dies(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        from ray.train import get_context
        died = pathlib.Path(DIED)
        if self._epoch == 2 and batch == 40 and get_context().get_world_rank() == 1:
            if not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
"""


def script(folder, temporary, *, killed):
    page = (processes.ROOT / "docs/guides/ray.md").read_text(encoding="utf-8")
    text = re.search(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1]
    begin = KILLED.replace("DIED", repr(str(folder / "died"))).replace("TEMPORARY", repr(temporary))
    if killed:
        text = text.replace("callbacks=[", "callbacks=[Dies(), ")
    text += '    import json\n    print("RESULT", json.dumps(result.metrics))\n    ray.shutdown()\n'
    (folder / "train_on_ray.py").write_text(begin + text, encoding="utf-8")


def run(folder, *, killed):
    """Returns what Ray was told of the last epoch, and the summary of the run."""
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="ray") as temporary:  # Names of Ray's sockets must be short.
        return _run(folder, temporary, killed=killed)


def _run(folder, temporary, *, killed):
    script(folder, temporary, killed=killed)
    environment = {**os.environ, "PYTHONPATH": str(processes.ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with (folder / "out").open("wb") as out:
        started = subprocess.Popen(
            [sys.executable, "train_on_ray.py"],
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = started.wait(timeout=300)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            children = psutil.Process(started.pid).children(recursive=True) if started.poll() is None else []
            for process in (*children, started):
                process.kill()
            started.wait()
    said = (folder / "out").read_text(errors="replace")
    assert code == 0, said[-6000:]
    told = json.loads(re.search(r"^RESULT (.*)$", said, re.MULTILINE)[1])
    return told, json.loads((folder / "shared/runs/mine/summary.json").read_text())


class TestOnRay:
    pytestmark = on_ray

    @pytest.mark.timeout(700)
    def test_a_killed_worker_that_ray_starts_again_ends_with_the_same_weights(self, tmp_path):
        told, whole = run(tmp_path / "whole", killed=False)
        assert told["epoch"] == 5
        assert told["loss"] == pytest.approx(whole["loss"], rel=1e-5)
        assert whole["replicas"] == 2
        told_again, again = run(tmp_path / "killed", killed=True)
        assert (tmp_path / "killed/died").exists()
        assert again["resumed_from_step"] > 0
        assert again["weights_sha256"] == whole["weights_sha256"]
        assert told_again["loss"] == told["loss"]

    @pytest.mark.timeout(300)
    def test_models_that_train_apart_are_named(self, tmp_path):
        with tempfile.TemporaryDirectory(prefix="ray") as temporary:
            script(tmp_path, temporary, killed=False)
            path = tmp_path / "train_on_ray.py"
            text = path.read_text().replace("toolkit.strategies.create()", "tf.distribute.get_strategy()")
            path.write_text("import tensorflow as tf\n" + text.replace("max_failures=3", "max_failures=0"))
            ended = processes.python(tmp_path, "train_on_ray.py", limit=200)
        assert ended.returncode == 1
        assert "Ray has started 2 workers to train together, but the model is built in" in ended.stdout + ended.stderr


@pytest.mark.slow
def test_it_is_refused_where_ray_did_not_start_the_process():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(RequestError, match=r"isn't a worker of Ray Train|pip install 'ray\[train\]'"):
        model.fit(np.zeros((4, 2)), np.zeros((4, 1)), verbose=0, callbacks=[toolkit.training.RayReport()])


def test_a_negative_number_of_epochs_is_refused():
    with pytest.raises(RequestError, match=r"RayReport\(every=-1\)"):
        toolkit.training.RayReport(every=-1)
