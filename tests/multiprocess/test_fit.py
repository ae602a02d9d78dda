"""Unmodified compile, fit, evaluate and predict in several processes."""

import importlib.util
import json
import pathlib

import numpy as np
import processes
import pytest

SCRIPT = pathlib.Path(__file__).with_name("fit_kinds.py")
# What a single process and several must agree on.
SAME = ["numpy", "tf.data", "class_weight", "tables", "normalised"]
OTHERS = ["steps_per_execution", "callbacks", "loss scale"]


def run(folder, count):
    shared = folder / "shared"
    shared.mkdir()
    arguments = [[str(folder / f"{number}.json"), str(shared)] for number in range(count)]
    with processes.group([SCRIPT], arguments, folder, cluster=count > 1) as group:
        group.succeed(limit=280)
    return [json.loads(pathlib.Path(out).read_text()) for out, *_ in arguments], shared


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What two workers saw, the directory that they shared, and what one process saw."""
    two, shared = run(tmp_path_factory.mktemp("two"), 2)
    (one,), _ = run(tmp_path_factory.mktemp("one"), 1)
    return two, shared, one


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", SAME + OTHERS)
def test_both_workers_end_with_the_same_metrics_and_weights(seen, kind):
    (first, second), _, _ = seen
    assert first[kind]["history"] == second[kind]["history"]
    assert first[kind]["weights"] == second[kind]["weights"]


@pytest.mark.parametrize("kind", SAME)
def test_the_numbers_are_those_of_one_process(seen, kind):
    (first, _), _, one = seen
    for name, values in one[kind]["history"].items():
        np.testing.assert_allclose(first[kind]["history"][name], values, atol=1e-6, err_msg=name)
    for mine, theirs in zip(first[kind]["weights"], one[kind]["weights"], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_metrics_count_every_example_once(seen):
    (first, _), _, _ = seen
    assert first["evaluate"][1] * 103 == pytest.approx(round(first["evaluate"][1] * 103), abs=1e-3)
    for kind in ("numpy", "tf.data"):
        accuracy = first[kind]["history"]["accuracy"][0] * 103
        assert accuracy == pytest.approx(round(accuracy), abs=1e-3), kind


def test_predictions_come_whole_and_in_order(seen):
    (first, second), _, one = seen
    assert np.shape(first["predict"]) == (103, 2)
    assert first["predict"] == second["predict"]
    np.testing.assert_allclose(first["predict"], one["predict"], atol=1e-6)


def test_callbacks_of_all_workers_share_their_paths(seen):
    (first, second), shared, _ = seen
    assert sorted(p.name for p in (shared / "best").iterdir()) == ["1.keras", "2.keras"]
    assert (shared / "newest.weights.h5").exists()
    assert len((shared / "log.csv").read_text().splitlines()) == 3, "a heading and two epochs"
    assert len(list((shared / "board" / "train").iterdir())) == 1, "only the chief writes for TensorBoard"
    assert not (shared / "backup").exists(), "BackupAndRestore removes it at the end"
    assert first["chief"]
    assert not second["chief"]


def test_a_model_that_all_workers_save_can_be_loaded(seen):
    (first, second), shared, _ = seen
    assert first["loaded"] < 1e-6
    assert second["loaded"] < 1e-6
    assert first["exported"] < 1e-6
    assert second["exported"] < 1e-6
    assert first["sharded"] < 1e-6
    assert second["sharded"] < 1e-6
    assert not list(shared.glob(".*")), "a file written aside is left"


ORBAX = """
import json, os, sys
import toolkit
strategy = toolkit.strategies.create()
import keras, numpy as np
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
y = (x[:, :4].sum(axis=1) > 0).astype("int32")
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
kept, how, every = os.path.abspath("kept"), sys.argv[1], int(sys.argv[2])
saving = keras.callbacks.OrbaxCheckpoint(kept, save_freq=every or "epoch", save_on_background=how == "background")
model.fit(x, y, batch_size=32, epochs=2, verbose=0, callbacks=[saving])
# Keras 3.15 loads a model on TensorFlow without its weights.
from orbax.checkpoint import v1
with v1.training.Checkpointer(kept) as orbax:
    found = orbax.load_checkpointables()["pytree"]
same = np.array_equal(found["trainable_variables"]["sequential"]["dense"]["kernel"], model.layers[0].kernel.numpy())
print("SEEN", json.dumps([same, found["metrics_variables"]["accuracy"]["count"]]), flush=True)
"""


@pytest.mark.long
@pytest.mark.skipif(not importlib.util.find_spec("orbax"), reason="Orbax isn't installed")
@pytest.mark.parametrize("how", ["at once", "background"])
@pytest.mark.parametrize("every", ["0", "2"])
def test_the_chief_saves_with_orbax_what_all_read(tmp_path, how, every):
    """A metric's variables are exchanged when they are read; strategies/test_fit_callbacks.py does without Orbax."""
    (tmp_path / "script.py").write_text(ORBAX)
    ended = processes.launch(tmp_path, "script.py", how, every, tasks=("--workers=2", "--stall_timeout=60"))
    assert processes.seen(ended) == [[True, 64]] * 2
