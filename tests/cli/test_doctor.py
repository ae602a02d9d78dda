"""`toolkit doctor` as it is typed."""

import json
import os
import re
import subprocess
import sys

import processes
import pytest

from toolkit.devices.setup import DeviceRequest
from toolkit.observe.doctor import training


def doctor(folder, *flags, limit=100, **environment):
    return subprocess.run(
        [sys.executable, "-m", "toolkit", "doctor", *flags],
        env={**os.environ, "PYTHONPATH": str(processes.ROOT), "HOME": str(folder), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit,
    )


@pytest.mark.slow
def test_a_failure_ends_with_1_and_its_cure_on_a_line(tmp_path):
    done = doctor(tmp_path, KERAS_BACKEND="jax")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    (number,) = [n for n, line in enumerate(lines) if line.startswith("failure KERAS_BACKEND: KERAS_BACKEND=jax")]
    assert lines[number + 1].strip() == "unset KERAS_BACKEND"
    assert lines[-1].startswith("1 failure, ")


@pytest.mark.slow
def test_json_says_the_same(tmp_path):
    done = doctor(tmp_path, "--json", KERAS_BACKEND="jax")
    said = json.loads(done.stdout)
    assert done.returncode == 1
    assert not said["healthy"]
    assert {"check", "level", "found", "cure"} == set(said["findings"][0])


@pytest.mark.slow
def test_a_directory_that_is_gone_and_a_file_without_end(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    code = (
        "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, [sys.executable, '-m', 'toolkit', 'doctor'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=gone,
        env={**os.environ, "PYTHONPATH": str(processes.ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "can't be used" in done.stderr
    done = doctor(tmp_path, "--cluster=/dev/zero")
    assert done.returncode == 2
    assert "more than 10,000,000 characters" in done.stderr


@pytest.mark.slow
def test_help_imports_nothing_heavy(tmp_path):
    done = doctor(tmp_path, "--help", limit=20, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    assert not [name for name in ("tensorflow", "keras", "rich", "numpy") if f" {name}\n" in done.stderr]


@pytest.mark.long
@pytest.mark.slow
def test_self_test_trains_resumes_and_agrees(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    done = doctor(tmp_path, "--self_test", "--json", limit=280)
    assert not list((tmp_path / "state").rglob("*.json")), "its job is in the user's list"
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    for check in ("one device", "two replicas", "resume", "two processes"):
        assert findings[check]["level"] == "ok", findings[check]
    assert "GB/s" in findings["two processes"]["found"]
    assert re.search(r"; at most \d+ MB of tensors in memory", findings["two processes"]["found"])
    assert findings["resume"]["found"].endswith("the same weights, bit for bit")


@pytest.mark.parametrize(
    ("name", "gpus", "asked"),
    [
        ("mirrored", 0, {"gpus": 2}),
        ("mirrored", 1, {"gpus": 2, "split": 2, "memory": 0.8}),
        ("multi_worker", 1, {"gpus": 1, "emulate": "always"}),
        ("multi_worker", 2, {"gpus": 1, "emulate": "auto"}),
    ],
)
def test_the_self_test_splits_a_machines_only_gpu(name, gpus, asked):
    assert training.asked(name, 2, gpus) == asked
    DeviceRequest(**asked)  # It raises where two exclude each other.
