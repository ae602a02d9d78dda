"""The multi-worker recipe, under the launcher and by hand."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import limits
import preloaded
import processes
import pytest

from toolkit.launch.agent.ports import ENVIRONMENT, HeldPorts

pytestmark = pytest.mark.slow

FLAGS = ["--data=shapes", "--steps_per_epoch=12", "--epochs=2", "--checkpoint_steps=5"]


def launched(folder, *flags, start=()):
    return preloaded.Popen(
        [
            sys.executable,
            "-m",
            "toolkit",
            "launch",
            "--show=all",
            "--workers=2",
            *start,
            "-m",
            "recipes.cifar_multi_worker",
            *flags,
        ],
        env={**os.environ, "PYTHONPATH": str(processes.ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def finish(process, limit=200):
    try:
        out, err = process.communicate(timeout=limit)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run from start to end: its output and its run directory."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, out, err = finish(launched(folder, *FLAGS, "--run_dir=run"))
    assert code == 0, out[-3000:] + err
    return out, folder / "run"


@pytest.mark.smoke
def test_both_workers_end_with_the_same_weights_and_metrics(undisturbed):
    out, run = undisturbed[0], undisturbed[1]
    hashes = re.findall(r"worker:(\d) \| Done: .*weights (\w+)", out)
    assert sorted(number for number, _ in hashes) == ["0", "1"]
    assert hashes[0][1] == hashes[1][1]
    assert summary(run)["weights_sha256"].startswith(hashes[0][1])
    epochs = re.findall(r"worker:\d \| epoch 2/2: (.*?), [\d,]+ examples", out)
    assert len(epochs) == 2
    # A worker that isn't chief keeps its history to itself: written to os.devnull, as root, it took that file's place.
    assert pathlib.Path(os.devnull).is_char_device()
    assert epochs[0] == epochs[1]


def test_only_the_chief_writes(undisturbed):
    out, run = undisturbed
    assert summary(run)["replicas"] == 2
    assert summary(run)["strategy"] == "multi_worker"
    assert summary(run)["command"][1:3] == ["-m", "recipes.cifar_multi_worker"]
    assert len((run / "history.csv").read_text().splitlines()) == 3
    assert len(list((run / "tensorboard" / "train").iterdir())) == 1
    assert "worker:1 | Done" in out
    assert "Everything is in the chief's run directory" in out


@pytest.mark.long
def test_only_the_chiefs_checkpoints_count(undisturbed, tmp_path):
    """Each in a folder of its own, started by hand, the worker's with newer ones: the chief hands its own over."""
    for name in ("chief", "worker"):
        shutil.copytree(undisturbed[1], tmp_path / name)
    oldest, *newer = sorted((tmp_path / "chief" / "checkpoints").glob("step-*"))
    for checkpoint in newer:
        shutil.rmtree(checkpoint)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "worker").rglob("*")}
    own = [[*FLAGS, "--resume", f"--run_dir={tmp_path / name}"] for name in ("chief", "worker")]
    with processes.group(["-m", "recipes.cifar_multi_worker"], own, tmp_path) as group:
        outputs = group.succeed(limit=200)
    step = int(re.search(r"step-0*(\d+)", oldest.name)[1])
    assert all(f"Resumed after step {step}: " in text for text in outputs)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "worker").rglob("*")} == before
    assert summary(tmp_path / "chief")["weights_sha256"] == summary(undisturbed[1])["weights_sha256"]


@pytest.mark.fault
def test_pods_of_a_manifest_train_and_go_on_when_they_are_started_again(undisturbed, tmp_path):
    """As Kubernetes starts them, all at once, and once more with the same command."""
    with HeldPorts() as held:
        cluster = json.dumps({"worker": [f"127.0.0.1:{held.free()}" for _ in range(2)]})
        environ = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(processes.ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
        environ |= {"TOOLKIT_CLUSTER": cluster, "TOOLKIT_RESUME": "1"}
        environ |= processes.threads(2)

        def pods(*flags):
            command = [sys.executable, "-m", "recipes.cifar_multi_worker", *FLAGS, *flags, "--run_dir=run"]
            return [
                subprocess.Popen(
                    command,
                    env={**environ, "JOB_COMPLETION_INDEX": str(index)},
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for index in range(2)
            ]

        first = pods()
        deadline = time.monotonic() + limits.patient(100)
        while not list((tmp_path / "run").glob("checkpoints/step-*5")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for pod in first:
            pod.kill()
            pod.communicate()
        ended = []
        for pod in pods():
            try:
                ended.append(pod.communicate(timeout=150)[0])
            finally:
                pod.kill()
                pod.wait()
    assert all("Resumed after step" in text for text in ended), ended
    assert summary(tmp_path / "run")["weights_sha256"] == summary(undisturbed[1])["weights_sha256"]


def test_without_a_cluster_it_says_how_to_start(recipe):
    done = recipe.run(name="cifar_multi_worker", limit=60)
    assert done.returncode == 2
    assert "toolkit launch --workers=2" in done.stderr


@pytest.mark.parametrize("addresses", [["127.0.0.1:23821", "localhost:23821"], ["127.0.0.1:99999", "127.0.0.1:5"]])
def test_a_wrong_cluster_ends_before_tensorflow_starts(recipe, addresses):
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}}
    began = time.monotonic()
    done = recipe.run(name="cifar_multi_worker", limit=60, TF_CONFIG=json.dumps(config))
    assert done.returncode == 2
    assert "read a cluster from TF_CONFIG" in done.stderr
    limits.keep(time.monotonic() - began, 10)
