"""The recipe as a user runs it: in a process of its own, by its flags."""

import ast
import csv
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import processes
import pytest

import toolkit.cli.flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = ("--gpus=2", "--steps_per_epoch=10", "--global_batch_size=64")
SHARED = {
    "gpus", "emulate", "visible_devices", "memory", "data", "data_dir", "epochs", "steps_per_epoch",
    "global_batch_size", "learning_rate", "seed", "run_dir", "resume",
}  # fmt: skip
OTHERS = {
    "split_gpus", "inter_op_threads", "intra_op_threads", "soft_placement", "log_placement", "checkpoint_steps",
    "copy_to", "model", "dropout", "gradient_dtype", "bytes_per_pack", "profile", "native_logs", "shard_optimizer",
    "shard_weights",
    "gradient_compression", "gradient_rank", "gradient_start_step",
    "local_steps", "local_outer_rate", "local_outer_momentum", "batch_statistics",
}  # fmt: skip
SUMMARY = {
    "recipe", "strategy", "replicas", "devices", "emulated", "dataset", "global_batch_size", "epochs", "steps",
    "train_loss", "train_accuracy", "test_loss", "test_accuracy", "images_per_second", "examples_per_second",
    "loss", "accuracy", "val_loss", "val_accuracy", "wall_seconds", "resumed_from_step", "versions",
}  # fmt: skip


def checkpoint(run):
    """The SHA-256 of the arrays in the newest checkpoint: equal sums mean equal bits."""
    newest = max((run / "checkpoints").glob("step-*"))
    return newest.name, json.loads((newest / "manifest.json").read_text())["sha256"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("recipe") / "run with a space and a ' quote"
    command = ["-m", "recipes.cifar_mirrored", *SMALL, "--epochs=2", f"--run_dir={run}"]
    done = processes.python(run.parent, *command, limit=240)
    assert done.returncode == 0, done.stderr
    return run, done.stdout


@pytest.mark.smoke
@pytest.mark.slow
def test_a_run_writes_what_the_contract_says(undisturbed):
    run, out = undisturbed
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary) >= SUMMARY
    assert (summary["replicas"], summary["emulated"], summary["epochs"], summary["steps"]) == (2, True, 2, 20)
    assert summary["images_per_second"] > 0
    with (run / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["epoch"], row["step"]) for row in rows] == [("1", "10"), ("2", "20")]
    assert float(rows[-1]["val_accuracy"]) == summary["test_accuracy"]
    assert list((run / "tensorboard").rglob("events.*"))
    assert "2 logical CPU devices stand in" in out
    assert "shapes" in out
    assert "\x1b" not in out


@pytest.mark.slow
def test_the_model_that_is_left_opens_in_plain_keras(undisturbed):
    program = (
        "import keras, numpy, sys\nmodel = keras.models.load_model(sys.argv[1])\n"
        "print(model.predict(numpy.zeros((3, 32, 32, 3), 'uint8'), verbose=0).shape)\n"
    )
    done = processes.python(undisturbed[0], "-c", program, str(undisturbed[0] / "model.keras"), limit=120)
    assert "(3, 10)" in done.stdout, done.stderr


@pytest.mark.smoke
@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, id="INT"), pytest.param(signal.SIGKILL, -9, id="KILL")],
)
def test_killed_and_resumed_ends_with_the_same_bits(recipe, tmp_path, undisturbed, number, code):
    flags = (*SMALL, "--epochs=2", f"--run_dir={tmp_path / 'run'}", "--checkpoint_steps=5")
    process = recipe.start(*flags)
    try:
        processes.wait_for(lambda: list((tmp_path / "run/checkpoints").glob("step-*")), process, limit=120)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, err
    if code > 0:
        assert "checkpoint written" in err
        assert "Traceback" not in err
        summary = json.loads((tmp_path / "run/summary.json").read_text())
        assert summary["status"] == "interrupted"
        assert f"after step {summary['steps']}; checkpoint written" in err
    done = recipe.run(*flags, "--resume")
    assert done.returncode == 0, done.stderr
    assert "Resumed after step" in done.stdout
    assert checkpoint(tmp_path / "run") == checkpoint(undisturbed[0])


@pytest.mark.first
@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_aloud(recipe, tmp_path, undisturbed):
    shutil.copytree(undisturbed[0], tmp_path / "run")
    flags = (*SMALL, f"--run_dir={tmp_path / 'run'}")
    newest = max((tmp_path / "run/checkpoints").glob("step-*"))
    os.truncate(newest / "arrays.safetensors", 1000)
    done = recipe.run(*flags, "--epochs=2", "--resume")
    assert done.returncode == 0, done.stderr
    assert f"{newest.name} is damaged" in done.stdout
    assert "Resumed after step 10" in done.stdout

    for path in (tmp_path / "run/checkpoints").glob("step-*"):
        (path / "manifest.json").write_text("{}")
    done = recipe.run(*flags, "--epochs=2", "--resume")
    assert done.returncode == 2
    assert "every checkpoint is damaged" in done.stderr
    assert "Traceback" not in done.stderr


REFUSED = {
    "a word": (["--gpus=two"], "--gpus=two"),
    "a flag nobody knows": (["--epoch=3"], "--epochs"),
    "a stray argument": (["2"], "'2'"),
    "no epochs": (["--epochs=0"], "--epochs=0"),
    "a batch of nothing": (["--global_batch_size=0"], "--global_batch_size=0"),
    "an unknown data set": (["--data=mnist"], "mnist"),
}
SLOWLY_REFUSED = {
    "a batch that can't be shared": (["--gpus=3", "--global_batch_size=128"], "Give 126 or 129"),
    "more than there is": (["--gpus=2", "--global_batch_size=30000"], "at most 20000"),
}


def refused(recipe, flags, word):
    (recipe.directory / "file").touch()
    (recipe.directory / "other").mkdir()
    (recipe.directory / "other/run.json").write_text('{"recipe": "other", "config": {}}')
    done = recipe.run(*flags, limit=100)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    message = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(message) == 1
    assert word in message[0]
    assert ", but " in message[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_answered_in_one_message(recipe, name):
    refused(recipe, *REFUSED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOWLY_REFUSED)
def test_a_mistake_that_takes_tensorflow_to_see(recipe, name):
    refused(recipe, *SLOWLY_REFUSED[name])


@pytest.mark.slow
def test_help_lists_every_flag_at_once(recipe):
    done = recipe.run("--help", limit=20, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    listed = {
        line.split("=")[0].strip().removeprefix("--").removeprefix("[no]")
        for line in done.stdout.splitlines()
        if line.startswith("  --")
    }
    assert listed == SHARED | OTHERS, "users and other programs rely on these names"
    assert "python -m recipes.cifar_mirrored --gpus=2" in done.stdout
    assert "tensorflow" not in done.stderr
    assert "rich" not in done.stderr


def test_the_table_of_help_has_every_shared_flag_once():
    source = ast.parse(pathlib.Path(toolkit.cli.flags.__file__).read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(source) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    defined = {call.args[0].value for call in calls if call.func.attr.startswith("DEFINE_")}
    listed = [name for group in toolkit.cli.flags.GROUPS.values() for name in group]
    assert sorted(listed) == sorted(defined)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(each.stem for each in (ROOT / "recipes").glob("[a-z]*.py")))
def test_a_recipes_help_fits_a_terminal(name):
    command = [sys.executable, "-m", f"recipes.{name}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
