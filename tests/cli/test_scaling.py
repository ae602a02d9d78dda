"""`toolkit scaling`, with a program that writes a summary as a recipe does, and with a recipe."""

import json
import os
import signal
import subprocess
import sys
import time

import limits
import processes
import psutil
import pytest

FAKE = """
import json, pathlib, sys
given = dict(part.lstrip("-").split("=", 1) for part in sys.argv[1:])
replicas, batch = int(given["gpus"]), int(given.get("global_batch_size", 64))
if given.get("fail") == str(replicas):
    print("error: it can't be done, but nothing. Do this.", file=sys.stderr)
    sys.exit(int(given["code"]))
out = pathlib.Path(given["run_dir"]); out.mkdir(parents=True)
(out / "summary.json").write_text(json.dumps({
    "recipe": "fake", given.get("rate", "examples") + "_per_second": 1000 * replicas ** 0.5, "global_batch_size": batch,
    "emulated": "emulated" in given,
    "devices": ["GPU:0"], "given": given,
    "step": {"milliseconds": 10.0, "compute": 5.0, "communication": 4.0, "input": 0.5, "other": 0.5}}))
"""


def scaling(folder, *arguments, limit=60):
    (folder / "fake.py").write_text(FAKE)
    return subprocess.run(
        [sys.executable, "-m", "toolkit", "scaling", *arguments],
        env={**os.environ, "PYTHONPATH": f"{processes.ROOT}{os.pathsep}{folder}", "COLUMNS": "80"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit,
    )


def summary(folder, replicas):
    return json.loads((folder / f"out/replicas-{replicas}-round-1/summary.json").read_text())


@pytest.mark.slow
def test_strong_scaling_keeps_the_batch_and_ends_with_table_chart_and_verdict(tmp_path):
    done = scaling(tmp_path, "--replicas=1,4", "--out=out", "-m", "fake", "--data=it's")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[1:2] == ["64"]]
    assert rows == [
        ["1", "64", "1,000", "64.0", "1.00", "100%", "50%", "40%", "5%"],
        ["4", "64", "2,000", "32.0", "2.00", "50%", "50%", "40%", "5%"],
    ]
    assert "communication limits the speed (40% of a step)" in done.stdout
    assert max(map(len, done.stdout.split("4 replicas are")[0].splitlines())) <= 80
    assert (tmp_path / "out/scaling.png").stat().st_size > 5000
    assert "2 runs compared" in (tmp_path / "out/report.html").read_text()
    given = summary(tmp_path, 4)["given"]
    assert (given["data"], given["epochs"], given["steps_per_epoch"]) == ("it's", "1", "60")
    assert "global_batch_size" not in given


@pytest.mark.slow
def test_weak_scaling_grows_the_batch_from_the_first_size(tmp_path):
    flags = ("--replicas=2,4", "--weak", "--rounds=2", "--out=out", "--json")
    done = scaling(tmp_path, *flags, "-m", "fake", "--global_batch_size=32", "--epochs=3")
    found = json.loads(done.stdout)
    assert [size["global_batch"] for size in found["sizes"]] == [32, 64]
    assert json.loads((tmp_path / "out/scaling.json").read_text()) == found
    assert (tmp_path / "out/replicas-4-round-2").is_dir()
    assert summary(tmp_path, 4)["given"]["epochs"] == "3"


@pytest.mark.slow
def test_replicas_that_share_cores_get_no_verdict_on_their_speed(tmp_path):
    done = scaling(tmp_path, "--replicas=1,4", "--out=out", "-m", "fake", "--emulated=1", "--rate=images")
    assert done.returncode == 0, done.stderr
    assert "share the same CPU cores" in done.stdout
    assert "times as fast" not in done.stdout
    found = json.loads((tmp_path / "out/scaling.json").read_text())
    assert found["serial_share"] is None
    assert [size["examples_per_second"] for size in found["sizes"]] == [1000, 2000]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--replicas=1,2"], "the recipe is missing"),
        (["--replicas=one", "-m", "fake"], "isn't a list of numbers"),
        (["--replicas=2,1", "-m", "fake"], "they don't grow"),
        (["--replicas=0,1", "-m", "fake"], "whole numbers from 1"),
        (["--replicas=1", "--kind=gpus", "-m", "fake"], "Choose one of mirrored, workers"),
        (["--replicas=1", "--rounds=0", "-m", "fake"], "--rounds=0"),
        (["--replicas=1", "--weak", "--strong", "-m", "fake"], "not allowed with"),
        (["--replicas=1", "-m", "fake", "--gpus=2"], "gives it --gpus itself"),
        (["--replicas=1", "--out=fake.py", "-m", "fake"], "can't be written"),
        (
            ["--replicas=1,2", "-m", "fake", "--fail=2", "--code=2"],
            "the recipe ends with: it can't be done, but nothing. Do this",
        ),
    ],
)
def test_mistakes_are_answered(tmp_path, arguments, said):
    done = scaling(tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "said"),
    [("nope", "No module named"), ("recipes.nope", "No module named"), ("os", "left no summary.json")],
)
def test_what_is_no_recipe_is_said(tmp_path, module, said):
    done = scaling(tmp_path, "--replicas=1", "--out=out", "-m", module)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


@pytest.mark.slow
def test_earlier_figures_are_not_taken_for_new_ones(tmp_path):
    assert scaling(tmp_path, "--replicas=1", "--out=out", "-m", "fake").returncode == 0
    before = (tmp_path / "out/scaling.json").read_text()
    done = scaling(tmp_path, "--replicas=1", "--out=out", "-m", "os")
    assert done.returncode == 2
    assert "it holds runs of an earlier measurement" in done.stderr
    assert (tmp_path / "out/scaling.json").read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_whatever_ends_it_no_recipe_goes_on(tmp_path, number, code):
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit", "scaling", "--replicas=1", "-m", "slow"],
        env={**os.environ, "PYTHONPATH": f"{processes.ROOT}{os.pathsep}{tmp_path}"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + limits.patient(30)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    recipe = psutil.Process(int((tmp_path / "pid").read_text()))
    process.send_signal(number)
    process.communicate(timeout=40)
    assert process.returncode == code
    psutil.wait_procs([recipe], timeout=10)
    assert not recipe.is_running() or recipe.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_recipe_that_fails_ends_with_1_and_the_end_of_its_log(tmp_path):
    done = scaling(tmp_path, "--replicas=1", "-m", "fake", "--fail=1", "--code=1")
    assert done.returncode == 1
    assert "exit code 1" in done.stderr
    assert "it can't be done" in done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_a_recipe_on_two_workers(tmp_path):
    flags = ("--data=shapes", "--steps_per_epoch=20", "--global_batch_size=32")
    done = scaling(
        tmp_path, "--replicas=2", "--kind=workers", "--json", "-m", "recipes.cifar_multi_worker", *flags, limit=150
    )
    assert done.returncode == 0, done.stderr
    (size,) = json.loads(done.stdout)["sizes"]
    assert (size["replicas"], size["global_batch"], size["emulated"]) == (2, 32, True)
    assert size["step"]["communication"] > 0
