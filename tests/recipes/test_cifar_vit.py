"""The vision transformer's recipe: its ways train the same, and its table."""

import json

import pytest


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--shard_optimizer",), ("--shard_weights",)])
def test_its_ways_train_the_same(recipe, tmp_path, more):
    flags = ("--data=shapes", "--steps_per_epoch=4", "--global_batch_size=16", "--gpus=2")
    done = recipe.run(*flags, *more, f"--run_dir={tmp_path / 'run'}", name="cifar_vit", COLUMNS="80")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "run/summary.json").read_text())["parallelism"]
    assert [(row["conv"], row["fc"]) for row in rows] == [
        ("replicated", "replicated"),
        ("replicated", "sharded"),
        ("planned", "planned"),
    ]
    assert rows[1]["parameters"] < 0.55 * rows[0]["parameters"]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-4)
    assert rows[0]["loss"] == pytest.approx(rows[2]["loss"], rel=1e-4)
    assert "…" not in done.stdout[done.stdout.index("ms/step") :]
