"""The samples of the guide on trackers and tuners: each records once, though two workers train."""

import importlib.util
import re

import processes
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]


def sample(folder, package):
    """Writes the sample that imports a package, and skips where it isn't installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} isn't here: scripts/test-all installs it")
    page = (processes.ROOT / "docs/guides/trackers.md").read_text(encoding="utf-8")
    samples = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (text,) = (text for text in samples if f"import {package}\n" in text)
    (folder / "sample.py").write_text(text, encoding="utf-8")


def test_weights_and_biases(tmp_path, monkeypatch):
    sample(tmp_path, "wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    ended = processes.launch(tmp_path, "sample.py")
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    (run,) = tmp_path.glob("wandb/offline-run-*")
    assert list(run.glob("*.wandb"))
    assert re.search(r"worker:0 \| .*wandb.* epoch/val_accuracy 0\.\d+", ended.stdout)
    assert not re.search(r"worker:1 \| .*wandb", ended.stdout)


def test_mlflow(tmp_path, monkeypatch):
    sample(tmp_path, "mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    ended = processes.launch(tmp_path, "sample.py")
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    (metric,) = tmp_path.glob("mlruns/*/*/metrics/val_accuracy")
    assert [line.split()[2] for line in metric.read_text().splitlines()] == ["0", "1", "2"]
    (replicas,) = tmp_path.glob("mlruns/*/*/params/replicas")
    assert replicas.read_text() == "2"


def test_keras_tuner(tmp_path):
    sample(tmp_path, "keras_tuner")
    ended = processes.python(tmp_path, "sample.py")
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert len(list(tmp_path.glob("tuned/*/trial_*"))) == 3
    assert "'units':" in ended.stdout
