"""`toolkit init`: the script that it writes runs as it is under every strategy, and is killed and resumed."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import limits
import numpy as np
import processes
import pytest
from safetensors.numpy import load_file
from slurm_cluster import lacking, slurm

from toolkit.cli.main import main

REASON = lacking()


def init(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["init", *map(str, arguments)])
    return ended.value.code


def weights(folder):
    *_, newest = sorted((folder / "runs" / "train").rglob("step-*/arrays.safetensors"))
    return {name: array for name, array in load_file(newest).items() if name.startswith("model/")}


def losses(folder):
    """Of each epoch, as history.csv has them."""
    heading, *rows = (line.split(",") for line in (folder / "runs/train/history.csv").read_text().splitlines())
    return [float(row[heading.index("loss")]) for row in rows]


def printed(text):
    """What a run says of its epochs, without speeds; workers say the same."""
    return list(dict.fromkeys(re.findall(r"epoch \d+/\d+: .*val_loss [\d.]+", text)))


def test_it_writes_both_and_never_over_what_is_there(tmp_path, capsys):
    folder = tmp_path / "it's mine"
    assert not init(folder, "--nodes=3", "--gpus_per_node=0", "--time=1-00:00:00")
    job = (folder / "job.sh").read_text()
    assert "--nodes=3\n" in job
    assert "--time=1-00:00:00\n" in job
    assert "gpus" not in job.partition("\n# One process")[0]
    assert subprocess.run(["bash", "-n", folder / "job.sh"], check=False, timeout=10).returncode == 0
    (folder / "train.py").write_text("mine")
    assert init(folder) == 2
    assert "train.py is there already" in capsys.readouterr().err
    assert (folder / "train.py").read_text() == "mine"
    assert not init(folder, "--force")
    assert "--gpus-per-node=4\n" in (folder / "job.sh").read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nodes=0"], "--nodes=0, but it must be at least 1"),
        (["--gpus_per_node=-1"], "--gpus_per_node=-1, but it must be at least 0"),
        (["/proc/no"], "it can't be written there"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(tmp_path)
    assert init(*flags) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder in which the script has run once, undisturbed."""
    folder = tmp_path_factory.mktemp("alone")
    init(folder)
    ended = processes.python(folder, "train.py")
    assert ended.returncode == 0, ended.stderr[-2000:]
    (folder / "out").write_text(ended.stdout)
    assert len(printed(ended.stdout)) == 5
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [("--workers=2",), processes.FEW], ids=["two workers", "parameter servers"])
def test_it_runs_as_it_is_under_every_strategy(alone, tmp_path, tasks):
    init(tmp_path)
    ended = processes.launch(tmp_path, "train.py", tasks=tasks)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert losses(tmp_path) == pytest.approx(losses(alone), abs=1e-5)
    assert printed(ended.stdout) == printed((alone / "out").read_text()), "one device's losses, also with its dropout"


@pytest.mark.slow
def test_killed_and_started_again_it_ends_with_the_same_weights(alone, tmp_path):
    init(tmp_path)
    script = tmp_path / "train.py"
    # So that there is time to kill it.
    calls = "callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: sleep(0.02))]"
    text = script.read_text().replace("run.fit(model, x, y,", f"run.fit(model, x, y, {calls},")
    script.write_text(f"from time import sleep\n{text}")
    environment = {**os.environ, "PYTHONPATH": str(processes.ROOT)}
    with subprocess.Popen(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL
    ) as run:
        processes.wait_for(lambda: list(tmp_path.glob("runs/**/step-00000100*/manifest.json")), run, limit=120)
        run.send_signal(signal.SIGKILL)
    init(tmp_path, "--force")
    ended = processes.python(tmp_path, "train.py")
    assert "Resumed after step" in ended.stdout
    mine, theirs = weights(tmp_path), weights(alone)
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(800)
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_its_job_trains_under_slurm_and_is_queued_again_when_its_time_is_up(tmp_path):
    """Slurm's shortest limit is a minute, so that the signal comes by scancel in the place of the time."""
    init(tmp_path, "--gpus_per_node=0")
    job, script = tmp_path / "job.sh", tmp_path / "train.py"
    text = (
        job.read_text()
        .replace("srun python", f"srun {sys.executable}")
        .replace("--cpus-per-task=8", "--cpus-per-task=1")
    )
    job.write_text(text)
    script.write_text(script.read_text().replace("EPOCHS = 5", "EPOCHS = 8"))
    environment = {"PYTHONPATH": str(processes.ROOT), "no_grpc_proxy": f"localhost,{os.uname().nodename}"}
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm(folder) as cluster:
        said = cluster.run("sbatch", f"--chdir={tmp_path}", f"--output={tmp_path}/out", str(job), **environment).stdout
        number = re.search(r"\d+", said)[0]

        def until(words, limit=250):
            deadline = time.monotonic() + limits.patient(limit)
            while words not in (out := (tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""):
                assert time.monotonic() < deadline, out[-3000:]
                time.sleep(0.2)

        until("epoch 2/8")
        cluster.run("scancel", "--signal=TERM", f"{number}.0")  # What --signal=TERM@120 sends.
        until("SIGTERM received: the run stops after this step")
        until("Resumed after step")
        until("epoch 8/8")
    assert len(losses(tmp_path)) == 8
