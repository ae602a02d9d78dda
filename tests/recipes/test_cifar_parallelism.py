"""The recipes that divide layers: their table, and the run that they leave."""

import json

import processes
import pytest

ROWS = [("replicated", "replicated"), ("replicated", "sharded"), ("sharded", "replicated"), ("sharded", "sharded")]
SMALL = ("--data=shapes", "--model=small_cnn", "--steps_per_epoch=8", "--global_batch_size=32", "--learning_rate=0.01")


def check(rows):
    assert [(row["conv"], row["fc"]) for row in rows] == [*ROWS, ("planned", "planned")]
    assert all(row["measured_seconds"] > 0 and row["predicted_seconds"] > 0 for row in rows)
    by = {(row["conv"], row["fc"]): row for row in rows}
    assert by["sharded", "sharded"]["parameters"] < by["replicated", "replicated"]["parameters"] * 0.7
    # The same training, but for what batch normalisation makes of rounding.
    assert max(row["loss"] for row in rows) - min(row["loss"] for row in rows) < 0.02


@pytest.mark.long
@pytest.mark.slow
def test_mirrored(recipe, tmp_path):
    done = recipe.run(*SMALL, "--gpus=2", f"--run_dir={tmp_path / 'run'}", name="cifar_parallelism", COLUMNS="80")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    check(summary["parallelism"])
    assert summary["strategy"] == "mirrored"
    assert all(row["measured_bytes"] is None for row in summary["parallelism"])
    table = done.stdout[done.stdout.index("ms/step") :]
    assert table.count("replicated") >= 4
    assert "…" not in table


@pytest.mark.long
@pytest.mark.slow
def test_in_two_processes_the_bytes_are_those_predicted(tmp_path):
    # On a loopback that no other test sends over; and many steps, since one task may be ahead of the other by a part
    # of one where the first or the last bytes are read.
    done = processes.launch_apart(
        tmp_path,
        *("--workers=2", "-m", "recipes.cifar_parallelism", *SMALL),
        *("--steps_per_epoch=40", f"--run_dir={tmp_path / 'run'}"),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads((tmp_path / "run/summary.json").read_text())["parallelism"]
    check(rows)
    for row in rows:
        # The headers of packets weigh more where little travels; half a step of 34 is 0.015.
        assert 0.985 <= row["measured_bytes"] / row["predicted_bytes"] < 1.15, row


@pytest.mark.smoke
@pytest.mark.slow
def test_hybrid(recipe, tmp_path):
    done = recipe.run(
        "--gpus=2",
        "--data=shapes",
        "--epochs=1",
        "--steps_per_epoch=8",
        "--gradient_dtype=bfloat16",
        "--activation_dtype=float16",
        f"--run_dir={tmp_path / 'run'}",
        name="cifar_hybrid",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 8


@pytest.mark.slow
def test_rows_are_not_resumed(recipe, tmp_path):
    done = recipe.run("--resume", f"--run_dir={tmp_path / 'run'}", name="cifar_parallelism")
    assert done.returncode == 2
    assert (
        "--resume, but cifar_parallelism can't resume: it compares whole trainings. Leave --resume out." in done.stderr
    )
