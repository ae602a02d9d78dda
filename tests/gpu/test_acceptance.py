"""What has to hold on GPUs: `scripts/test -m gpu`, some five minutes. Where there is none, CPU devices stand in.

Each test says how many GPUs it needs, and is skipped where there are fewer. Those of one process may be logical ones of
one card; two workers need a card each, for NCCL.
"""

import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest

from toolkit import devices

ROOT = pathlib.Path(__file__).parent.parent.parent
CASES = pathlib.Path(__file__).parent / "acceptance.py"
PATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
ONLY_THERE = [pytest.param("GPU", marks=[pytest.mark.gpu, pytest.mark.slow])]
PLACES = [pytest.param("CPU", marks=[pytest.mark.long, pytest.mark.slow]), *ONLY_THERE]
# TF32 is off, and cuDNN may choose another algorithm for another batch.
NEAR = {"CPU": 1e-5, "GPU": 1e-3}


def needs(place, count, *, cards=1):
    """Skips where there are too few cards, each of which may be several logical GPUs."""
    found = len(devices.take().gpus) if place == "GPU" else count
    count = cards if place == "GPU" else count
    if found < count:
        pytest.skip(f"needs {count} GPU(s), and this machine has {found}")


def program(*command, folder, place, limit=300):
    environ = {**os.environ, "PYTHONPATH": PATH, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_DETERMINISTIC_OPS": "1"}
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if place == "CPU":
        environ["CUDA_VISIBLE_DEVICES"] = "-1"
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=limit, check=False)


def seen(case, strategy, count, place, folder):
    """What a case printed: of two workers, what the first did."""
    launcher = ["-m", "toolkit", "launch", "--show=all", f"--workers={count}"] if strategy == "multi_worker" else []
    done = program(*launcher, CASES, case, strategy, count, place, folder=folder, place=place)
    found = re.search(r"SEEN (\{\".*\})", done.stdout)
    assert found, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(found[1])


@functools.cache
def one(case, place):
    with tempfile.TemporaryDirectory() as folder:
        return seen(case, "one_device", 1, place, folder)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("count", [1, 2])
def test_as_many_devices_as_were_asked_for_are_seen_and_compute(place, count, tmp_path):
    needs(place, count)
    found = seen("sees", "one_device", count, place, tmp_path)
    assert found["asked"] == found["logical"] == found["ran"] == [f"{place}:{n}" for n in range(count)]


@pytest.mark.parametrize("place", ONLY_THERE)
def test_memory_grows_with_what_is_used(place, tmp_path):
    needs(place, 1)
    found = seen("grows", "one_device", 1, place, tmp_path)
    assert 256 <= found["taken"] < 3000, "nvidia-smi's MiB; CUDA's own context takes some hundred"


@pytest.mark.parametrize("place", ONLY_THERE)
def test_memory_stays_below_its_limit(place, tmp_path):
    needs(place, 1)
    found = seen("limited", "one_device", 1, place, tmp_path)
    assert found["taken"] < 1024 + 1000, "nvidia-smi's MiB; CUDA's own context takes some hundred"
    assert found["refused"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("case", "strategy", "near"),
    [
        ("trains", "mirrored", 1),
        ("trains", "multi_worker", 1),
        ("mixed", "mirrored", 1000),
        ("mixed", "multi_worker", 1000),
        ("sharded", "mirrored", 1),
        ("sharded", "multi_worker", 1),
    ],
)
def test_two_devices_train_as_one_does(place, case, strategy, near, tmp_path):
    needs(place, 2, cards=2 if strategy == "multi_worker" else 1)
    expected = one("trains" if case == "sharded" else case, place)
    found = seen(case, strategy, 2, place, tmp_path)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=near * NEAR[place])
    np.testing.assert_allclose(found["predicted"], expected["predicted"], atol=10 * near * NEAR[place])
    if strategy == "multi_worker":
        assert found["communication"] == ("nccl" if place == "GPU" else "ring")


@pytest.mark.parametrize("place", PLACES)
def test_compiled_by_xla_it_trains_the_same(place):
    needs(place, 1)
    plain, compiled = one("trains", place), one("compiled", place)
    np.testing.assert_allclose(compiled["losses"], plain["losses"], rtol=10 * NEAR[place])


def recipe(place, folder, *flags):
    emulate = "never" if place == "GPU" else "always"
    common = (
        f"--run_dir={folder / 'run'}",
        f"--emulate={emulate}",
        "--gpus=1",
        "--data=shapes",
        "--global_batch_size=16",
    )
    return ["-m", "recipes.cifar_mirrored", *common, "--steps_per_epoch=20", "--epochs=2", *flags]


@pytest.mark.parametrize("place", PLACES)
def test_a_profile_shows_the_device(place, tmp_path):
    needs(place, 1)
    done = program(*recipe(place, tmp_path, "--profile=3"), folder=ROOT, place=place)
    assert done.returncode == 0, done.stderr[-3000:]
    (profile,) = (tmp_path / "run").rglob("*.xplane.pb")
    assert (b"/device:GPU:0" in profile.read_bytes()) == (place == "GPU")


@pytest.mark.parametrize("place", PLACES)
def test_killed_and_resumed_it_ends_with_the_same_weights(place, tmp_path):
    needs(place, 1)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = program(*recipe(place, whole), folder=ROOT, place=place)
    assert done.returncode == 0, done.stderr[-3000:]
    flags = recipe(place, killed, "--checkpoint_steps=5")
    environ = {**os.environ, "PYTHONPATH": PATH, "TF_DETERMINISTIC_OPS": "1"}
    process = subprocess.Popen([sys.executable, *flags], cwd=ROOT, env=environ, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 200
        while not list(killed.glob("run/checkpoints/step-*")) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    done = program(*flags, "--resume", folder=ROOT, place=place)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Resumed after step" in done.stdout
    ends = [json.loads((folder / "run/summary.json").read_text())["weights_sha256"] for folder in (whole, killed)]
    assert ends[0] == ends[1]
